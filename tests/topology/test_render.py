"""A rendered unit means what is wanted and keeps what the topology does not speak of."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from topology.compare import Overlay, WantedUnit, unit_changes
from topology.render import render_unit
from topology.unit import parse_unit

WANTED = WantedUnit(
    service="s",
    command=("/bin/python", "-m", "sglang.launch_server"),
    flags={"tp": ("4",), "model-path": ("/models/x",), "trust-remote-code": ()},
    environment={"NCCL_P2P_DISABLE": "1"},
    environment_files=("-/etc/sglang.env",),
    working_directory=None,
    user=None,
    numa_node=None,
    to_be_enabled=True,
)
FOUND = """\
[Unit]
Description=By hand
After=mnt-models.mount
[Service]
User=ai
TimeoutStartSec=1800
ExecStartPre=/bin/a
ExecStartPre=/bin/b
Restart=always
NUMAPolicy=bind
NUMAMask=1
Environment=OLD=1
ExecStart=/bin/old --tp 8
[Install]
WantedBy=models.target
[X-Site]
Owner=me
"""
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
NAME = st.from_regex(r"[a-z][a-z-]{0,8}", fullmatch=True)


def render(wanted: WantedUnit, found: str | None = None, description: str = "") -> str:
    """Render over a found text."""
    return render_unit(wanted, description=description, found=None if found is None else parse_unit(found))


def test_a_unit_from_nothing_is_complete() -> None:
    """Without a unit found it restarts on failure, stops in bounded time and is wanted by the boot."""
    unit = parse_unit(render(WANTED))
    assert unit.value("Unit", "Description") == "SGLang s"
    assert unit.value("Service", "Restart") == "on-failure"
    assert unit.value("Service", "TimeoutStopSec") == "60"
    assert unit.value("Service", "LimitMEMLOCK") == "infinity"
    assert unit.values("Install", "WantedBy") == ("multi-user.target",)
    assert unit.commands({}) == (
        ("/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/x", "--tp", "4", "--trust-remote-code"),
    )


def test_tensor_parallelism_is_written_as_people_search_for_it() -> None:
    """The flag stands on its own line as `--tp 4`."""
    assert "\n  --tp 4 \\\n" in render(WANTED)


def test_numa_follows_the_pool() -> None:
    """GPUs on one node prefer its memory; GPUs on several, or on a host with one node, say nothing."""
    unit = parse_unit(render(replace(WANTED, numa_node=1)))
    assert (unit.value("Service", "NUMAPolicy"), unit.value("Service", "NUMAMask")) == ("preferred", "1")
    assert parse_unit(render(WANTED, FOUND)).value("Service", "NUMAMask") is None


def test_what_the_topology_does_not_speak_of_is_kept() -> None:
    """Directives and sections of a hand-written unit survive, before our defaults; flags and variables do not."""
    unit = parse_unit(render(WANTED, FOUND))
    assert unit.value("Unit", "Description") == "By hand"
    assert unit.values("Unit", "After") == ("mnt-models.mount",)
    assert unit.value("Service", "User") == "ai"
    assert unit.values("Service", "ExecStartPre") == ("/bin/a", "/bin/b")
    assert unit.values("Service", "Restart") == ("always",)
    assert unit.values("Install", "WantedBy") == ("models.target",)
    assert unit.value("X-Site", "Owner") == "me"
    assert unit.environment == {"NCCL_P2P_DISABLE": "1"}
    assert len(unit.commands({})) == 1


def test_what_the_topology_says_beats_what_was_found() -> None:
    """A user and a description in the configuration replace those of the found unit."""
    unit = parse_unit(render(replace(WANTED, user="root"), FOUND, description="100% ours"))
    assert unit.values("Service", "User") == ("root",)
    assert unit.value("Unit", "Description") == "100%% ours"


def test_rendering_over_its_own_text_changes_nothing() -> None:
    """The text is stable, so that a unit which was deployed is rendered to the same bytes."""
    once = render(replace(WANTED, numa_node=0), FOUND)
    assert render(replace(WANTED, numa_node=0), once) == once


def test_a_variable_stays_a_variable() -> None:
    """A key from an environment file is named in the command, while any other dollar is a dollar."""
    text = render(replace(WANTED, flags={"api-key": ("${KEY}",), "chat-template": ("a$B",)}))
    assert "--api-key ${KEY}" in text
    assert '"a$$B"' in text


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(NAME, st.lists(TEXT.filter(lambda t: not t.startswith("--")), max_size=2), max_size=4),
    st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), TEXT, max_size=4),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([None, FOUND]),
)
def test_a_rendered_unit_means_what_was_wanted(
    flags: dict[str, list[str]], environment: dict[str, str], numa_node: int | None, found: str | None
) -> None:
    """Whatever flags and values hold, systemd reads back exactly them."""
    words = {name: tuple(values) for name, values in flags.items()}
    wanted = replace(WANTED, flags=words, environment=environment, numa_node=numa_node)
    assert unit_changes(render(wanted, found), wanted, Overlay()) == ()
