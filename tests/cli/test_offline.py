"""Commands that need no host, and mistakes in a stack file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from cli.stack import load_stack
from host.errors import HostError
from tests.facts import hosts
from topology.presets import gpu_presets, model_presets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import MakeCommand, Project

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nprivate-key-material\n-----END OPENSSH PRIVATE KEY-----\n"
COPY = "units/sglang-qwen.service"


def _recorded(topology: hosts.Raw) -> hosts.Raw:
    topology["host"] |= {"facts": "recorded", "hostKey": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA"}
    del topology["host"]["knownHosts"], topology["host"]["identityFile"]
    topology["services"]["sglang-qwen"]["canonicalUnit"] = COPY
    return topology


@pytest.fixture
def recorded(project: Project) -> Project:
    """A project with a recording of kpro6 as it was found, and the unit's copy."""
    raw = hosts.raw_facts("kpro6", "found")
    for name in ("facts", "units"):
        (project.folder / name).mkdir()
    (project.folder / "facts" / "sim.json").write_text(json.dumps(raw))
    (project.folder / COPY).write_text(raw["services"][0]["text"])
    return project


def test_presets_are_listed(project: Project) -> None:
    """Every name that a stack file may give a GPU or a model, with its kind."""
    result = project.run("presets")
    assert result.exit_code == 0
    for kind, names in (("gpu", gpu_presets()), ("model", model_presets())):
        assert names
        for name in names:
            assert re.search(rf"{kind}\W+{re.escape(name)}\b", result.stdout)


def test_without_a_command_there_is_help(project: Project) -> None:
    """The commands are named to who doesn't know them."""
    result = project.run()
    for command in ("presets", "diagram", "record"):
        assert command in result.output


def test_a_diagram_shows_before_after_and_what_changes(recorded: Project) -> None:
    """From a recording, without a host: the host as it is, as it will be, and each difference in words."""
    recorded.stack(_recorded(hosts.raw_split()))
    result = recorded.run("diagram", "--stack", "sim")
    assert result.exit_code == 0, result.output
    before, _, after = result.stdout.partition("after ")
    assert "tp 8  on 8 GPUs" in before
    assert "tp 4  on 4 GPUs" in after
    assert "0000:81:00.0: driver nvidia -> vfio-pci" in after
    assert "service sglang-qwen: tp 8 -> 4" in after
    assert result.stderr == ""


def test_a_diagram_of_a_host_that_is_as_wanted_has_no_change(recorded: Project) -> None:
    """Where nothing differs, nothing is said to differ."""
    recorded.stack(_recorded(hosts.raw_whole()))
    result = recorded.run("diagram", "-s", "sim")
    assert result.exit_code == 0, result.output
    assert " -> " not in result.stdout


def test_a_diagram_writes_nothing(recorded: Project) -> None:
    """A picture leaves the project's folder as it was."""
    recorded.stack(_recorded(hosts.raw_split()))
    before = {path: path.stat().st_mtime_ns for path in recorded.folder.rglob("*")}
    recorded.run("diagram", "-s", "sim")
    assert {path: path.stat().st_mtime_ns for path in recorded.folder.rglob("*")} == before


def test_every_problem_of_a_stack_file_is_said(recorded: Project) -> None:
    """Two mistakes are two messages, each with its fix."""
    topology = _recorded(hosts.raw_split())
    topology["pools"]["serving"]["devices"][0] = "72:00.0"
    topology["services"]["sglang-qwen"]["arguments"]["tp"] = 4
    recorded.stack(topology)
    said = recorded.refuses("diagram", "-s", "sim")
    assert "0000:72:00.0" in said
    assert "--tp" in said
    assert said.count("Fix: ") >= 2


def test_a_long_message_is_not_broken(recorded: Project) -> None:
    """Commands and paths in a message can be copied: it is no wider for a terminal that is narrow."""
    topology = _recorded(hosts.raw_split())
    topology["services"]["sglang-qwen"]["arguments"]["tp"] = 4
    recorded.stack(topology)
    [line] = recorded.run("diagram", "-s", "sim").stderr.splitlines()
    assert len(line) > 200


def _no_recording(folder: Path) -> None:
    (folder / "facts" / "sim.json").unlink()


def _unreadable_copy(folder: Path) -> None:
    (folder / COPY).write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(_no_recording, "`gpu-topology record`"), (_unreadable_copy, "canonicalUnit")],
)
def test_a_file_that_cannot_be_used_is_named(recorded: Project, spoil: Callable[[Path], None], said: str) -> None:
    """What the command needs besides the stack file is named where it is missing or broken."""
    recorded.stack(_recorded(hosts.raw_split()))
    spoil(recorded.folder)
    assert said in recorded.refuses("diagram", "-s", "sim")


@pytest.mark.parametrize("command", ["diagram", "record"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, ("Pulumi.sim.yaml cannot be read", "--stack")),
        (b"config: [", ("Pulumi.sim.yaml cannot be read",)),
        (b"config: {a: 1, a: 2}", ("Pulumi.sim.yaml cannot be read", "duplicate")),
        (b"\xff\xfe\x00", ("Pulumi.sim.yaml cannot be read",)),
        (b"", ("Pulumi.sim.yaml has no section `config`",)),
        (b"- config\n", ("Pulumi.sim.yaml has no section `config`",)),
        (b"config: text\n", ("Pulumi.sim.yaml has no section `config`",)),
        (b"config: {}\n", ("topology", "is missing")),
        (b"config: {gpu-topology:topology: 4}\n", ("topology", "is a int")),
        (b"config: {gpu-topology:topology: {version: v9}}\n", ("version", "v9")),
    ],
)
def test_a_broken_stack_file_is_one_message(
    project: Project, command: str, content: bytes | None, said: tuple[str, ...]
) -> None:
    """No file, no YAML or no topology: each is told with its fix, and ends with status 1."""
    if content is not None:
        (project.folder / "Pulumi.sim.yaml").write_bytes(content)
    message = project.refuses(command, "--stack", "sim")
    assert all(part in message for part in (*said, "Fix: ")), message


def test_the_stack_must_be_named(project: Project) -> None:
    """Without --stack it is a usage error, which says so."""
    result = project.run("diagram")
    assert result.exit_code == 2
    assert "--stack" in result.output


def _keyed(project: Project) -> Any:
    project.stack(_recorded(hosts.raw_split()), sshPrivateKey={"secure": "v1:encrypted"})
    return load_stack("sim", project.folder)


def test_the_stacks_private_key_is_decrypted_by_pulumi(project: Project, pulumi: MakeCommand) -> None:
    """The key that the stack keeps encrypted is asked of Pulumi by name, in the project's folder, when it is needed."""
    (project.folder / "key").write_text(KEY)
    pulumi('echo "$PWD $*" >> asked; while read -r line; do echo "$line"; done < key')
    stack = _keyed(project)
    assert not (project.folder / "asked").exists()
    assert stack.target().private_key == KEY
    asked = (project.folder / "asked").read_text()
    assert asked == f"{project.folder} config get sshPrivateKey --stack sim --non-interactive\n"
    assert "private-key-material" not in repr(stack)
    assert "private-key-material" not in repr(stack.target())


def test_a_stack_without_a_private_key_asks_pulumi_nothing(project: Project, pulumi: MakeCommand) -> None:
    """Where the SSH agent or an identity file is used, no passphrase is needed."""
    pulumi("exit 1")
    project.stack(_recorded(hosts.raw_split()))
    assert load_stack("sim", project.folder).target().private_key is None


def test_a_key_that_cannot_be_decrypted_says_why(project: Project, pulumi: MakeCommand) -> None:
    """Pulumi's own words are passed on, with what to set."""
    pulumi("echo 'error: passphrase must be set' >&2; exit 255")
    with pytest.raises(HostError, match=r"passphrase must be set.*PULUMI_CONFIG_PASSPHRASE"):
        _keyed(project).target()


def test_a_missing_pulumi_is_named(project: Project, pulumi: MakeCommand) -> None:
    """Without Pulumi there is nothing to decrypt with, which is said."""
    with pytest.raises(HostError, match=r"pulumi cannot be run .*on PATH"):
        _keyed(project).target()
