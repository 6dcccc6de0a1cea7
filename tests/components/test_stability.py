"""What a preview shows: all that changed, and after an `up` nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.components.programs import STORY, performed, performed_again, story

if TYPE_CHECKING:
    from tests.components.recording import Recording

ACTS = [name for name, _ in STORY]
COPY = "sglang-qwen-copy"


def _inputs(recording: Recording) -> dict[str, dict[str, Any]]:
    """All inputs by URN. The agent's file is another path in each of these runs, and the same bytes."""
    return {
        urn: {name: value for name, value in resource.inputs.items() if name != "source"}
        for urn, resource in recording.resources.items()
    }


def _triggers(name: str) -> dict[str, list[Any]]:
    children = performed(name).children
    return {name: child.inputs["triggers"] for name, child in children.items() if "triggers" in child.inputs}


def _triggers_before(name: str) -> dict[str, list[Any]]:
    return _triggers(ACTS[ACTS.index(name) - 1])


@pytest.mark.parametrize("name", ACTS)
def test_a_preview_after_the_up_asks_for_the_same(name: str) -> None:
    """Each input, request and trigger after an `up` is what it was before it, so the engine finds no difference."""
    before, after = performed(name), performed_again(name)
    first, second = _inputs(before), _inputs(after)
    urn = before.children[COPY].urn
    # The copy's revision is not compared with the last one: anything but this asks for a write.
    assert second[urn].pop("revision") == "adopted"
    del first[urn]["revision"]
    assert first == second


@pytest.mark.parametrize("name", ACTS)
def test_a_preview_after_the_up_orders_and_replaces_as_it_did(name: str) -> None:
    """Edges and options do not depend on whether the host is as wanted already."""
    before, after = performed(name), performed_again(name)
    for urn, resource in before.resources.items():
        again = after.resources[urn]
        assert resource.dependencies == again.dependencies
        assert resource.delete_before_replace == again.delete_before_replace
        assert resource.replace_on_changes == again.replace_on_changes


def test_an_unchanged_pool_is_not_drained_again() -> None:
    """The serving pool loses devices in the split and keeps the others on nvidia: its drain is not triggered."""
    before, after = _triggers_before("split"), _triggers("split")
    assert before["serving-binding-drain"] == after["serving-binding-drain"]


@pytest.mark.parametrize(
    ("name", "drained"),
    [
        ("split", {"confidential-binding-drain"}),
        ("swap", {"serving-binding-drain", "confidential-binding-drain"}),
        ("merge", {"serving-binding-drain"}),
    ],
)
def test_a_pool_whose_devices_move_is_drained(name: str, drained: set[str]) -> None:
    """A drain is triggered, or new, for each pool that takes a device from another driver, and for no other."""
    before, after = _triggers_before(name), _triggers(name)
    drains = {drain for drain in after if drain.endswith("-drain")}
    assert {drain for drain in drains if after[drain] != before.get(drain)} == drained


@pytest.mark.parametrize("name", ["split", "swap", "merge"])
def test_a_service_whose_gpus_change_is_replaced(name: str) -> None:
    """Its triggers are its revision, its tensor parallelism and its devices, so a preview shows what they become."""
    before, after = _triggers_before(name), _triggers(name)
    service = story()[name].plan.spec.services[0]
    assert after["sglang-qwen-serving"] == [service.revision, service.tp, list(service.devices)]
    assert before["sglang-qwen-serving"][2] != after["sglang-qwen-serving"][2]
    assert before["sglang-qwen-verified"] != after["sglang-qwen-verified"] == [service.revision]


def test_adopting_triggers_nothing_that_was_not_adopted() -> None:
    """On a host that is as wanted every action has the revision of what was never touched."""
    triggers = _triggers("adopt")
    service = story()["adopt"].plan.spec.services[0]
    assert triggers["serving-binding-drain"] == ["adopted"]
    assert triggers["sglang-qwen-verified"] == ["adopted"]
    assert triggers["sglang-qwen-serving"] == ["adopted", 8, list(service.devices)]
    assert triggers["agent-register"] == []


def test_a_pool_is_verified_again_when_its_devices_change() -> None:
    """What is verified is what triggers it: each device with ids, NUMA node and IOMMU group as the plan saw them."""
    child = performed("split").children["serving-verified"]
    [trigger] = child.inputs["triggers"]
    assert trigger == json.loads(child.inputs["stdin"])
    assert [device["address"] for device in trigger["devices"]] == list(story()["split"].plan.spec.pools[1].addresses)
    assert trigger["devices"][0] == {
        "address": "0000:01:00.0",
        "vendor": "10de",
        "device": "2bb5",
        "numa_node": 0,
        "iommu_group": 44,
    }
    assert _triggers("split")["serving-verified"] != _triggers_before("split")["serving-verified"]


@pytest.mark.parametrize("name", ["split", "merge"])
def test_revisions_are_on_the_host_before_they_are_in_the_state(name: str) -> None:
    """An operation is told its revision, so that the host's book has it when the next plan asks."""
    children, spec = performed(name).children, story()[name].plan.spec
    for binding in spec.bindings:
        drain = json.loads(children[f"{binding.pool}-binding-drain"].inputs["stdin"])
        assert drain["revision"] == binding.drain_revision
        assert (drain["devices"], drain["driver"]) == (list(binding.devices), binding.driver)
        assert children[f"{binding.pool}-binding-driver"].inputs["revision"] == binding.revision
    for container in spec.containers:
        assert children[f"lxc-{container.vmid}-gpus"].inputs["revision"] == container.revision
    for vm in spec.vms:
        assert children[f"vm-{vm.vmid}-gpus"].inputs["revision"] == vm.revision
    for service in spec.services:
        assert children[f"{service.name}-unit"].inputs["revision"] == service.unit_revision
        assert json.loads(children[f"{service.name}-serving"].inputs["stdin"])["revision"] == service.revision
