"""When a resource is changed, and when it is left alone: proven for each input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from host.resources.binding import DriverBindingProvider
from host.resources.container import ContainerGpusProvider
from host.resources.unit import UnitFileProvider
from host.resources.vm import VmGpusProvider
from tests.resources.conftest import CONFIDENTIAL, SERVING, FakeHost, binding, container, kept, unit, vm

if TYPE_CHECKING:
    from collections.abc import Callable

    from host.resources.agent_resource import AgentResourceProvider
    from host.resources.session import Properties


@dataclass(frozen=True)
class Kind:
    """A resource: its sound inputs, what of them is compared, what only travels along, and what says where it is."""

    provider: type[AgentResourceProvider]
    inputs: Callable[..., Properties]
    compared: dict[str, object]
    along: dict[str, object]
    placed: dict[str, object]
    drifted: tuple[object, ...]


KINDS = {
    "binding": Kind(
        DriverBindingProvider,
        binding,
        compared={"devices": CONFIDENTIAL[:3], "driver": "nvidia", "revision": "two"},
        # What other pools own and what may be stopped matters only while it binds.
        along={"others": SERVING[:1], "managed": {"services": [], "vms": [], "containers": []}},
        placed={},
        drifted=(
            dict.fromkeys(CONFIDENTIAL, "nvidia"),
            dict.fromkeys(CONFIDENTIAL, "vfio-pci, after a boot the default driver"),
            dict.fromkeys(CONFIDENTIAL[:3], "vfio-pci"),
        ),
    ),
    "container": Kind(
        ContainerGpusProvider,
        container,
        compared={"devices": SERVING[:2], "style": "dev", "revision": "two"},
        along={"units": []},
        placed={"vmid": 130},
        drifted=(SERVING[:3], SERVING + CONFIDENTIAL[:1], []),
    ),
    "vm": Kind(
        VmGpusProvider,
        vm,
        compared={"mapping": "other", "devices": CONFIDENTIAL[:2], "start": False, "revision": "two"},
        along={"pool": "other"},
        placed={"vmid": 201},
        drifted=({"hostpci": 3, "running": True}, {"hostpci": 4, "running": False}),
    ),
    "unit": Kind(
        UnitFileProvider,
        unit,
        compared={"text": "[Service]\n", "enabled": False, "revision": "two"},
        along={"tp": 8},
        placed={"container": 130, "unit": "other.service", "path": "/etc/systemd/system/other.service"},
        drifted=("[Service]\n", None),
    ),
}
COMPARED = [(kind, name) for kind, it in KINDS.items() for name in it.compared]
PLACED = [(kind, name) for kind, it in KINDS.items() for name in it.placed]
ALONG = [(kind, name) for kind, it in KINDS.items() for name in it.along]
DRIFTED = [(kind, drift) for kind, it in KINDS.items() for drift in range(len(it.drifted))]


def _state(kind: Kind) -> Properties:
    """What the state has once the resource was created."""
    return kept(kind.provider().create(kind.inputs()))


@pytest.mark.parametrize("name", KINDS)
def test_the_same_inputs_are_no_change(host: FakeHost, name: str) -> None:
    """A resource that was just applied has nothing to do, and asks the host for nothing to know it."""
    kind = KINDS[name]
    state = _state(kind)
    host.requests.clear()
    result = kind.provider().diff("id", state, kind.inputs())
    assert result.changes is False
    assert not result.replaces
    assert host.requests == []


@pytest.mark.parametrize(("name", "field"), COMPARED)
def test_an_input_that_counts_is_an_update(host: FakeHost, name: str, field: str) -> None:
    """Another device, driver, text or revision is applied in place."""
    kind = KINDS[name]
    result = kind.provider().diff("id", _state(kind), kind.inputs(**{field: kind.compared[field]}))
    assert result.changes is True
    assert not result.replaces


@pytest.mark.parametrize(("name", "field"), PLACED)
def test_another_place_is_a_replacement_the_old_one_first(host: FakeHost, name: str, field: str) -> None:
    """A unit that moves to another container is taken out of the old one before it is written into the new one."""
    kind = KINDS[name]
    result = kind.provider().diff("id", _state(kind), kind.inputs(**{field: kind.placed[field]}))
    assert result.changes is True
    assert result.replaces == [field]
    assert result.delete_before_replace is True


@pytest.mark.parametrize(("name", "field"), ALONG)
def test_an_input_that_only_travels_along_is_no_change(host: FakeHost, name: str, field: str) -> None:
    """What the operation needs to know, and the host need not have, changes nothing by itself."""
    kind = KINDS[name]
    result = kind.provider().diff("id", _state(kind), kind.inputs(**{field: kind.along[field]}))
    assert result.changes is False


@pytest.mark.parametrize(("name", "drift"), DRIFTED)
def test_drift_is_an_update(host: FakeHost, name: str, drift: int) -> None:
    """What a refresh observed and nobody wanted is applied again by the next `up`."""
    kind = KINDS[name]
    state = {**_state(kind), "observed": kind.drifted[drift]}
    result = kind.provider().diff("id", state, kind.inputs())
    assert result.changes is True
    assert not result.replaces


@pytest.mark.parametrize("name", KINDS)
def test_doubles_and_whole_numbers_are_equal(host: FakeHost, name: str) -> None:
    """The engine has doubles only: 129.0 in the inputs and 129 in the state are one container."""
    kind = KINDS[name]

    def doubles(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: doubles(item) for key, item in value.items()}
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    state = _state(kind)
    assert kind.provider().diff("id", state, doubles(kind.inputs())).changes is False
    assert kind.provider().diff("id", doubles(state), kind.inputs()).changes is False


def test_every_input_has_its_meaning() -> None:
    """Each input is compared, a place or travels along, or derives from one that is: none is forgotten."""
    derived = {"binding": {"pool"}, "container": set(), "vm": {"count"}, "unit": {"name"}}
    for name, kind in KINDS.items():
        assert {*kind.compared, *kind.along, *kind.placed, *derived[name]} == kind.inputs().keys()
