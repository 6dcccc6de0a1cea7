"""Whatever the topology before and after, a plan is deterministic, complete and done once it was applied."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.facts import hosts
from topology.facts import Facts
from topology.load import load_topology

ADDRESSES = [f"{bus}:00.0" for bus in ("01", "11", "61", "71", "81", "91", "e1", "f1")]


def topology(serving: list[str], confidential: list[str]) -> hosts.Raw:
    """kpro6 with these devices in its two pools; without the VM where it would get none."""
    raw = hosts.raw_split()
    for name, devices in (("serving", serving), ("confidential", confidential)):
        pool = raw["pools"][name]
        del pool["numaNode"]
        pool |= {"devices": devices, "spanNumaNodes": True}
    if not confidential:
        del raw["pools"]["confidential"]
        raw["vms"] = {}
    return raw


@st.composite
def topologies(draw: st.DrawFn) -> hosts.Raw:
    """Four or eight GPUs for the service, since other numbers break rules, and any of the rest for the VM."""
    order = draw(st.permutations(ADDRESSES))
    serving = draw(st.sampled_from([4, 8]))
    confidential = draw(st.integers(0, len(ADDRESSES) - serving))
    return topology(order[:serving], order[serving : serving + confidential])


def reordered(value: Any, draw: st.DataObject) -> Any:
    """The same YAML with the keys of every mapping in another order."""
    if isinstance(value, dict):
        keys = draw.draw(st.permutations(list(value)))
        return {key: reordered(value[key], draw) for key in keys}
    return value


@settings(max_examples=40, deadline=None)
@given(st.lists(topologies(), min_size=1, max_size=3))
def test_a_plan_that_was_applied_leaves_nothing_to_do(way: list[hosts.Raw]) -> None:
    """Through any sequence of topologies, planning again changes nothing and gives the revisions that were applied."""
    raw = hosts.raw_facts("kpro6", "found")
    for step in way:
        wanted = load_topology(step)
        raw = hosts.applied(hosts.plan(wanted, Facts.model_validate(raw)), raw)
        again = hosts.plan(wanted, Facts.model_validate(raw))
        assert again.changes == ()
        assert hosts.applied(again, raw)["ledger"]["revisions"] == raw["ledger"]["revisions"]


@settings(max_examples=40, deadline=None)
@given(topologies(), st.data())
def test_a_plan_depends_on_meaning_alone(wanted: hosts.Raw, data: st.DataObject) -> None:
    """The order of YAML keys and the number of times it is planned make no difference."""
    facts = hosts.facts("kpro6", "found")
    one = hosts.plan(load_topology(wanted), facts)
    assert hosts.plan(load_topology(reordered(wanted, data)), facts) == one


@settings(max_examples=40, deadline=None)
@given(topologies(), topologies())
def test_every_gpu_ends_with_one_owner_on_that_owners_driver(before: hosts.Raw, after: hosts.Raw) -> None:
    """No two parts of a plan claim one device, and a device changes hands only by a fresh drain of its new pool."""
    raw = hosts.raw_facts("kpro6", "found")
    raw = hosts.applied(hosts.plan(load_topology(before), Facts.model_validate(raw)), raw)
    plan = hosts.plan(load_topology(after), Facts.model_validate(raw))
    owned = [address for binding in plan.spec.bindings for address in binding.devices]
    assert len(owned) == len(set(owned))
    drivers = {device["address"]: device["driver"] for device in raw["devices"]}
    for binding in plan.spec.bindings:
        moves = any(drivers[address] != binding.driver for address in binding.devices)
        known = raw["ledger"]["revisions"].get(f"drain:{binding.pool}", "adopted")
        assert (binding.drain_revision != known) is moves
