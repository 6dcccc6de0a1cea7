"""The one order that works, as edges between resources."""

from __future__ import annotations

import itertools

import pytest

from tests.components.programs import performed

PHASES = {
    "the agent's file": ("agent-file",),
    "the agent": ("agent-register",),
    "pools verified": ("serving-verified", "confidential-verified"),
    "all drained": ("serving-binding-drain", "confidential-binding-drain"),
    "all bound": ("serving-binding-driver", "confidential-binding-driver"),
    "mapped": ("gpu-confidential-mapping",),
    "passed on": ("lxc-129-gpus", "vm-200-gpus"),
    "unit written": ("sglang-qwen-unit",),
    "serving": ("sglang-qwen-serving",),
    "verified": ("sglang-qwen-verified",),
}
STEPS = list(itertools.pairwise(PHASES))


@pytest.mark.parametrize("act", ["adopt", "split", "swap", "merge"])
@pytest.mark.parametrize(("before", "after"), STEPS, ids=[f"{a} -> {b}" for a, b in STEPS])
def test_a_phase_begins_when_all_of_the_one_before_is_done(act: str, before: str, after: str) -> None:
    """No resource of a phase can begin before every resource of the earlier phases is done, across pools too."""
    recording = performed(act)
    names = list(PHASES)
    earlier = {name for phase in names[: names.index(before) + 1] for name in PHASES[phase]} & recording.children.keys()
    assert earlier
    for name in PHASES[after]:
        if name in recording.children:
            assert earlier <= recording.before(name)


def test_every_resource_has_its_phase() -> None:
    """The phases above are everything that the program does on the host, so none of it is unordered."""
    placed = {name for names in PHASES.values() for name in names}
    assert set(performed("split").children) == placed | {"sglang-qwen-copy"}


def test_a_binding_waits_for_the_drain_of_the_other_pool() -> None:
    """In a swap, the guest that holds a device is the other pool's: the edge to its drain is there by itself."""
    recording = performed("swap")
    for name in PHASES["all bound"]:
        direct = {recording.resources[urn].name for urn in recording.children[name].dependencies}
        assert direct >= set(PHASES["all drained"])


def test_the_copy_follows_the_unit() -> None:
    """The workstation's copy is written only once the unit is deployed, so it never says what no host has."""
    assert "sglang-qwen-unit" in performed("split").before("sglang-qwen-copy")


def test_the_agent_is_uninstalled_last() -> None:
    """A destroy runs the edges backwards, so everything that asks the host for something needs the agent's removal."""
    recording = performed("split")
    for name in recording.children.keys() - {"agent-file", "agent-register"}:
        assert "agent-register" in recording.before(name)


def test_nothing_waits_for_a_component() -> None:
    """A component orders nothing by itself, so every edge ends at a resource that does something."""
    recording = performed("split")
    edges = {urn for resource in recording.resources.values() for urn in resource.dependencies}
    assert edges
    assert all(recording.resources[urn].custom for urn in edges)
