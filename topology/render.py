"""A service's unit file, rendered from what it must mean and from what a hand-written one says beyond that."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from topology.unit import VARIABLE, Setting, quote_word

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jinja2 import Template

    from topology.compare import WantedUnit
    from topology.unit import Unit

_FOLDER = Path(__file__).with_name("templates")
_SPOKEN = {"Description", "ExecStart", "Environment", "EnvironmentFile", "UnsetEnvironment", "NUMAPolicy", "NUMAMask"}
"""Directives that are rendered from the topology, whatever a found unit says."""

_FIRST_FLAGS = ("model-path", "served-model-name", "host", "port", "tp", "pp", "dp")

_UNIT_DEFAULTS = (
    ("After", "network-online.target"),
    ("Wants", "network-online.target"),
    # A server that fails to load fails again, after up to 20 minutes: then a person is needed.
    ("StartLimitIntervalSec", "3600"),
    ("StartLimitBurst", "3"),
)
_SERVICE_DEFAULTS = (
    ("Type", "simple"),
    ("Restart", "on-failure"),
    ("RestartSec", "10"),
    # SGLang ends its schedulers itself; what a wedged GPU keeps alive is killed, or the pool could not be drained.
    ("KillMode", "mixed"),
    ("TimeoutStopSec", "60"),
    # NCCL and CUDA pin host memory for transfers and open a file for each channel.
    ("LimitMEMLOCK", "infinity"),
    ("LimitNOFILE", "1048576"),
)
_INSTALL_DEFAULTS = (("WantedBy", "multi-user.target"),)


def render_unit(wanted: WantedUnit, *, description: str, found: Unit | None) -> str:
    """Render the unit; directives of `found` of which the topology does not speak are kept, before our defaults."""
    kept = [s for s in (found.settings if found else ()) if s.key not in _SPOKEN]
    inherited = found.value("Unit", "Description") if found else None
    return _template().render(
        description=description.replace("%", "%%") or inherited or f"SGLang {wanted.service}",
        unit=_section("Unit", kept, (), _UNIT_DEFAULTS),
        service=_section("Service", kept, _spoken(wanted), _SERVICE_DEFAULTS),
        environment=sorted(wanted.environment.items()),
        environment_files=wanted.environment_files,
        command=wanted.command,
        flags=sorted(wanted.flags.items(), key=lambda flag: (_rank(flag[0]), flag[0])),
        install=_section("Install", kept, (), _INSTALL_DEFAULTS),
        others=_other_sections(kept),
    )


def _spoken(wanted: WantedUnit) -> list[Setting]:
    pairs = [("WorkingDirectory", wanted.working_directory), ("User", wanted.user)]
    if wanted.numa_node is not None:
        # docs/adr/0008: preferred, since a node that is full or not allowed must not keep the server from starting.
        pairs += [("NUMAPolicy", "preferred"), ("NUMAMask", str(wanted.numa_node))]
    return [Setting("Service", key, value) for key, value in pairs if value is not None]


def _section(
    name: str,
    kept: Iterable[Setting],
    spoken: Iterable[Setting],
    defaults: Iterable[tuple[str, str]],
) -> list[Setting]:
    """What the topology says, then what was found, then defaults for what neither says."""
    said = list(spoken)
    said_keys = {setting.key for setting in said}
    found = [s for s in kept if s.section == name and s.key not in said_keys]
    taken = said_keys | {s.key for s in found}
    return [*said, *found, *(Setting(name, key, value) for key, value in defaults if key not in taken)]


def _other_sections(kept: Iterable[Setting]) -> list[tuple[str, list[Setting]]]:
    sections: dict[str, list[Setting]] = {}
    for setting in kept:
        if setting.section not in {"Unit", "Service", "Install"}:
            sections.setdefault(setting.section, []).append(setting)
    return list(sections.items())


def _rank(flag: str) -> int:
    return _FIRST_FLAGS.index(flag) if flag in _FIRST_FLAGS else len(_FIRST_FLAGS)


def _command_word(word: str) -> str:
    """A word of ExecStart; `${NAME}` stays, so that a key can come from an environment file and not stand here."""
    return word if VARIABLE.fullmatch(word) else quote_word(word, command=True)


@cache
def _template() -> Template:
    # Imported on first use: it costs a tenth of an empty program's preview, and a plan that adopts renders nothing.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=False,  # noqa: S701  a unit file is not HTML; every word is quoted as systemd reads it
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"word": quote_word, "command_word": _command_word}
    return environment.get_template("sglang.service.j2")
