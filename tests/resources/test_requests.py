"""What a resource asks of the agent, to the letter, and what it keeps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from host.resources.binding import DriverBindingProvider
from host.resources.container import ContainerGpusProvider
from host.resources.unit import UnitFileProvider
from host.resources.vm import VmGpusProvider
from tests.resources.conftest import (
    CONFIDENTIAL,
    MANAGED,
    SERVING,
    FakeHost,
    binding,
    container,
    deployed_text,
    kept,
    unit,
    vm,
)

if TYPE_CHECKING:
    from host.resources.agent_resource import AgentResourceProvider
    from host.resources.session import Properties

UNIT = {"name": "sglang-qwen", "unit": "sglang-qwen.service", "container": 129}
PATH = "/etc/systemd/system/sglang-qwen.service"

CASES: dict[str, tuple[type[AgentResourceProvider], Properties, str, Any, Any, Any, Any]] = {
    "binding": (
        DriverBindingProvider,
        binding(),
        "confidential",
        {
            "pool": "confidential",
            "devices": CONFIDENTIAL,
            "driver": "vfio-pci",
            "others": SERVING,
            "managed": MANAGED,
            "revision": "one",
        },
        {"pool": "confidential", "managed": MANAGED},
        {"addresses": CONFIDENTIAL},
        dict.fromkeys(CONFIDENTIAL, "vfio-pci"),
    ),
    "container": (
        ContainerGpusProvider,
        container(),
        "lxc/129",
        {
            "vmid": 129,
            "devices": SERVING,
            "style": "raw",
            "units": ["sglang-qwen.service"],
            "revision": "one",
            "start": True,
        },
        {"vmid": 129},
        {"containers": [129], "addresses": SERVING},
        SERVING,
    ),
    "vm": (
        VmGpusProvider,
        vm(),
        "vm/200",
        {
            "vmid": 200,
            "mapping": "gpu-confidential",
            "count": 4,
            "pcie": True,
            "rombar": False,
            "start": True,
            "pool": "confidential",
            "devices": CONFIDENTIAL,
            "revision": "one",
        },
        {"vmid": 200},
        {"vms": [200]},
        {"hostpci": 4, "running": True},
    ),
    "unit": (
        UnitFileProvider,
        unit(),
        "sglang-qwen",
        {**UNIT, "path": PATH, "text": deployed_text(), "enabled": True, "revision": "one"},
        {**UNIT, "path": PATH},
        {"services": [UNIT]},
        deployed_text(),
    ),
}
OPERATIONS = {
    "binding": ("bind", "release"),
    "container": ("container", "container-release"),
    "vm": ("vm", "vm-release"),
    "unit": ("unit", "unit-release"),
}


def _exactly(requests: list[tuple[str, Any]], *wanted: tuple[str, Any]) -> None:
    """Compare as JSON, where 129.0 and 129 differ: the agent takes whole numbers only."""
    assert json.dumps(requests, sort_keys=True) == json.dumps([list(one) for one in wanted], sort_keys=True)


@pytest.mark.parametrize("name", CASES)
def test_create_applies(host: FakeHost, name: str) -> None:
    """A create is one apply operation; its ID names the thing on its host."""
    provider, inputs, identity, request, *_ = CASES[name]
    assert provider().create(inputs).id == identity
    _exactly(host.requests, (OPERATIONS[name][0], request))


@pytest.mark.parametrize("name", CASES)
def test_update_applies_what_is_new(host: FakeHost, name: str) -> None:
    """An update is the same operation with the new inputs; the old ones matter to the host's book alone."""
    provider, inputs, _, request, *_ = CASES[name]
    provider().update("id", {**inputs, "revision": "old"}, {**inputs, "revision": "two"})
    _exactly(host.requests, (OPERATIONS[name][0], request | {"revision": "two"}))


@pytest.mark.parametrize("name", CASES)
def test_delete_releases(host: FakeHost, name: str) -> None:
    """A delete hands back what the host's book says is this resource's, from the state alone."""
    provider, inputs, _, _, release, *_ = CASES[name]
    state = kept(provider().create(inputs))
    host.requests.clear()
    provider().delete("id", state)
    _exactly(host.requests, (OPERATIONS[name][1], release))


@pytest.mark.parametrize("name", CASES)
def test_read_asks_for_its_own_facts_only(host: FakeHost, name: str) -> None:
    """A refresh asks about this one thing, and of a host that is as wanted it reads what is wanted."""
    provider, inputs, identity, *_, facts, wanted = CASES[name]
    read = provider().read(identity, inputs)
    _exactly(host.requests, ("facts", facts))
    assert read.id == identity
    assert kept(read)["observed"] == wanted
    assert provider().diff(identity, kept(read), inputs).changes is False


@pytest.mark.parametrize("name", CASES)
def test_the_state_has_the_inputs_and_what_was_observed(host: FakeHost, name: str) -> None:
    """Nothing else is kept: neither an answer of the host nor anything needed to connect."""
    provider, inputs, *_, wanted = CASES[name]
    for outs in (provider().create(inputs).outs, provider().update("id", {}, inputs).outs):
        assert outs == {**inputs, "observed": wanted}


def test_a_service_on_the_host_itself_has_no_container(host: FakeHost) -> None:
    """The engine drops a container of None; the agent is told null."""
    inputs = unit(container=None)
    assert "container" not in inputs
    UnitFileProvider().create(inputs)
    UnitFileProvider().delete("id", inputs)
    host.raw["services"][0]["container"] = None
    UnitFileProvider().read("id", inputs)
    where = {**UNIT, "container": None}
    _exactly(
        host.requests,
        ("unit", {**where, "path": PATH, "text": deployed_text(), "enabled": True, "revision": "one"}),
        ("unit-release", {**where, "path": PATH}),
        ("facts", {"services": [where]}),
    )
