"""Recording a host: the simulated one, and ones that hold what must not be recorded."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Self

import asyncssh
import pytest

from cli import main
from host.facts import read_facts
from testbed.simulator import Simulator
from testbed.stage import merge
from testbed.workspace import shipped_topology
from tests.facts import hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.conftest import Project, Topology

HELD = "sk-written-in-clear"
_HOST_KEY = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()
_HOST = {"node": "kpro6", "address": "192.0.2.6", "hostKey": _HOST_KEY}


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    """kpro6 as it was found."""
    with Simulator() as host:
        yield host


def _topology(simulator: Simulator) -> Topology:
    topology = shipped_topology("sim")
    del topology["host"]["knownHosts"]
    topology["host"] |= {
        "port": simulator.ssh_port,
        "hostKey": simulator.host_key,
        "identityFile": str(simulator.identity_file),
    }
    topology["services"]["sglang-qwen"]["canonicalUnit"] = "units/sglang-qwen.service"
    merge(topology)
    return topology


@pytest.mark.simulator
def test_a_recording_plans_as_the_live_host_does(project: Project, simulator: Simulator) -> None:
    """What was recorded is what a live plan sees: the same picture and the same changes, with no host to reach."""
    untouched, topology = simulator.contents(), _topology(simulator)
    project.stack(topology)
    live = project.run("diagram", "-s", "sim")
    assert live.exit_code == 0, live.output
    result = project.run("record", "-s", "sim")
    assert result.exit_code == 0, result.output
    path = project.folder / "facts" / "sim.json"
    assert result.stdout == f"recorded {path}\n"
    assert read_facts(path).host.hostname == "kpro6"
    topology["host"] |= {"facts": "recorded", "port": 1}
    project.stack(topology)
    assert project.run("diagram", "-s", "sim").stdout == live.stdout
    assert simulator.contents() == untouched
    assert not simulator.own_files()


@pytest.mark.simulator
def test_a_recording_is_for_version_control(project: Project, simulator: Simulator) -> None:
    """It is sorted JSON, a line each, and twice the same for a host that did not change."""
    project.stack(_topology(simulator))
    path = project.folder / "facts" / "sim.json"
    texts = []
    for _ in range(2):
        assert project.run("record", "-s", "sim").exit_code == 0
        texts.append(path.read_text())
    assert texts[0] == texts[1] == json.dumps(json.loads(texts[0]), indent=2, sort_keys=True) + "\n"
    assert "PRIVATE KEY" not in texts[0]


@pytest.mark.simulator
def test_a_key_in_a_deployed_unit_is_not_recorded(project: Project, simulator: Simulator) -> None:
    """A unit that holds its API key in clear is named, and nothing is written or shown of the key."""
    unit = simulator.root / "var/lib/lxc/129/rootfs/etc/systemd/system/sglang-qwen.service"
    unit.write_text(unit.read_text().replace("--tp 8", f"--tp 8 --api-key {HELD}"))
    assert HELD in unit.read_text()
    project.stack(_topology(simulator))
    said = project.refuses("record", "-s", "sim")
    assert "services.0.text" in said
    assert HELD not in said
    assert not (project.folder / "facts").exists()


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("services", "text", f"ExecStart=x --api-key {HELD}"),
        ("services", "text", f"# --admin-api-key={HELD}"),
        ("services", "text", f"Environment=HF_TOKEN={HELD}"),
        ("services", "drop_ins", {"/etc/x.conf": f"Environment=SGLANG_API_KEY={HELD}"}),
        ("containers", "config", f"lxc.environment: A_SECRET={HELD}"),
    ],
)
def test_a_secret_anywhere_in_the_facts_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch, kind: str, field: str, value: object
) -> None:
    """A key, token or password that somebody wrote on the host never reaches a project file, nor the screen."""
    raw = hosts.raw_facts("kpro6", "found")
    raw[kind][0][field] = value
    _answer(monkeypatch, raw)
    project.stack(hosts.raw_split() | {"host": _HOST})
    said = project.refuses("record", "-s", "sim")
    assert f"the host's {kind}.0.{field}" in said
    assert "in clear" in said
    assert HELD not in said
    assert not (project.folder / "facts").exists()


def test_what_the_agent_masked_is_recorded(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that comes from an environment file, masked in the process's arguments, hinders no recording."""
    raw = hosts.raw_facts("kpro6", "found")
    raw["services"][0]["text"] += "# --api-key ${SGLANG_API_KEY}\n"
    raw["services"][0]["process"]["argv"] += ["--api-key=***", "--admin-api-key", "***"]
    _answer(monkeypatch, raw)
    project.stack(hosts.raw_split() | {"host": _HOST})
    assert project.run("record", "-s", "sim").exit_code == 0
    assert json.loads((project.folder / "facts" / "sim.json").read_text()) == raw


def test_a_host_that_is_not_there_is_named(project: Project) -> None:
    """A closed port ends in one message with the settings to check, and leaves no file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    project.stack(hosts.raw_split() | {"host": {**_HOST, "address": "127.0.0.1", "port": port}})
    said = project.refuses("record", "-s", "sim")
    assert f"127.0.0.1:{port}" in said
    assert "host.port" in said
    assert not (project.folder / "facts").exists()


def _answer(monkeypatch: pytest.MonkeyPatch, raw: hosts.Raw) -> None:
    """Let the host have these facts."""

    class Client:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def facts(self, _request: object) -> hosts.Raw:
            return raw

    monkeypatch.setattr(main, "AgentClient", lambda _target: Client())
