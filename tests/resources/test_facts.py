"""Facts for a plan: from the host, or from a recording of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import pytest

from host import facts as module
from host.errors import HostError
from host.facts import facts_request, gather_facts, read_facts
from host.target import Target
from tests.facts import hosts
from tests.resources.conftest import CONFIDENTIAL, SERVING, FakeHost
from topology.load import load_topology

if TYPE_CHECKING:
    from pathlib import Path

    from topology.config import Topology

TARGET = Target(address="192.0.2.6", port=22, user="root", host_key="ssh-ed25519 AAAA", root="/")


class FakeClient(FakeHost):
    """A client as `with` uses it."""

    closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """The client that is made."""
    fake = FakeClient()
    monkeypatch.setattr(module, "AgentClient", lambda _target: fake)
    return fake


def _topology(source: str) -> Topology:
    raw = hosts.raw_split()
    raw["host"]["facts"] = source
    return load_topology(raw)


def test_all_that_the_stack_file_names_is_asked_in_one_request() -> None:
    """Every device, container, VM and service, in an order that does not depend on the file's."""
    assert facts_request(hosts.split()) == {
        "addresses": SERVING + CONFIDENTIAL,
        "containers": [129],
        "vms": [200],
        "services": [{"name": "sglang-qwen", "unit": "sglang-qwen.service", "container": 129}],
    }


def test_a_service_may_name_its_unit() -> None:
    """A unit whose name isn't the service's is asked for by its own."""
    raw = hosts.raw_split()
    raw["services"]["sglang-qwen"]["unit"] = "inference.service"
    request: Any = facts_request(load_topology(raw))
    assert request["services"] == [{"name": "sglang-qwen", "unit": "inference.service", "container": 129}]


def test_live_facts_are_one_round_trip(client: FakeClient, tmp_path: Path) -> None:
    """A live host is asked once, a recording beside it is not looked at, and the connection is closed."""
    (tmp_path / "kpro6.json").write_text("{}")
    found = gather_facts(_topology("live"), TARGET, recorded=tmp_path / "kpro6.json")
    assert found == hosts.facts("kpro6", "split")
    assert client.requests == [("facts", facts_request(hosts.split()))]
    assert client.closed


def test_recorded_facts_reach_no_host(client: FakeClient, tmp_path: Path) -> None:
    """A pull request's CI plans from the recording, where there is no host to reach."""
    (tmp_path / "kpro6.json").write_text(json.dumps(hosts.raw_facts("kpro6", "found")))
    found = gather_facts(_topology("recorded"), TARGET, recorded=tmp_path / "kpro6.json")
    assert found == hosts.facts("kpro6", "found")
    assert client.requests == []


@pytest.mark.parametrize("text", [None, "{"])
def test_a_recording_that_cannot_be_read_says_how_to_make_it(tmp_path: Path, text: str | None) -> None:
    """No file, or one that is no JSON, names the file and the command that records."""
    path = tmp_path / "kpro6.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(HostError, match=r"kpro6\.json cannot be read .*`gpu-topology record`"):
        read_facts(path)


@pytest.mark.parametrize("source", ["live", "recorded"])
def test_facts_of_another_format_are_named(client: FakeClient, tmp_path: Path, source: str) -> None:
    """Facts that this version does not know say where they differ and from where they came."""
    client.raw["version"] = "v9"
    path = tmp_path / "kpro6.json"
    path.write_text(json.dumps(client.raw))
    said = "192.0.2.6's agent" if source == "live" else str(path)
    with pytest.raises(HostError, match=r"are not of format v1: version: .*record them again") as raised:
        gather_facts(_topology(source), TARGET, recorded=path)
    assert said in str(raised.value)
