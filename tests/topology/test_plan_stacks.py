"""The stack files that ship with the project."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.facts import hosts
from topology.facts import Facts
from topology.load import load_topology
from topology.plan import make_plan
from topology.problem import TopologyError

FILLED = {
    "address": "192.0.2.6",
    "hostKey": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEXAMPLE",
    "endpoint": "https://192.0.2.6:8006/",
    "VMID": "200",
    "python": "/opt/sglang/venv/bin/python",
    "model": "/models/Qwen3.5-397B-A17B-NVFP4",
}


def stack(name: str) -> Any:
    """The topology of a shipped stack file."""
    text = (hosts.REPOSITORY / f"Pulumi.{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema/stack.schema.json\n")
    return YAML(typ="safe").load(text)["config"]["gpu-topology:topology"]


def filled(value: Any, key: str = "") -> Any:
    """The same with every placeholder filled in, as its owner would."""
    if isinstance(value, dict):
        return {(FILLED["VMID"] if "<fill in" in str(k) else k): filled(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [filled(item, "python") for item in value]
    if isinstance(value, str) and value.startswith("<fill in"):
        return FILLED["model" if key == "path" else key]
    return value


def test_kpro6_names_every_placeholder() -> None:
    """Loaded as shipped, each value that only its owner knows is one message that says how to find it."""
    with pytest.raises(TopologyError) as caught:
        load_topology(stack("kpro6"))
    assert {problem.rule for problem in caught.value.problems} == {"placeholder"}
    assert len(caught.value.problems) == len(FILLED)
    assert all("`" in problem.fix or "https://" in problem.fix for problem in caught.value.problems)


def test_kpro6_filled_in_is_the_split() -> None:
    """Its pools, container, VM and tensor parallelism are those of the host after the split."""
    raw = hosts.raw_facts("kpro6", "found")
    plan = make_plan(
        load_topology(filled(stack("kpro6"))),
        Facts.model_validate(raw),
        base=hosts.REPOSITORY,
        read_local=lambda _: None,
    )
    spec = plan.spec
    assert {pool.name: (pool.numa_node, pool.owners, len(pool.devices)) for pool in spec.pools} == {
        "confidential": (1, ("vm/200",), 4),
        "serving": (0, ("lxc/129",), 4),
    }
    assert spec.services[0].tp == 4


def test_the_canonical_unit_of_kpro6_is_what_the_plan_renders() -> None:
    """The copy that ships is the unit of a host that has none yet, byte for byte."""
    raw = hosts.raw_facts("kpro6", "split")
    raw["services"][0] |= {"exists": False, "text": None, "path": None, "active": "inactive", "process": None}
    topology = load_topology(filled(stack("kpro6")))
    plan = make_plan(topology, Facts.model_validate(raw), base=hosts.REPOSITORY, read_local=lambda _: None)
    service = plan.spec.services[0]
    assert (hosts.REPOSITORY / service.canonical_unit).read_text() == service.text
    assert "--tp 4" in service.text
    assert "Environment=NCCL_P2P_DISABLE=1" in service.text


def test_sim_is_kpro6_on_loopback() -> None:
    """The simulated stack has the same pools and containers, and nothing left to fill in."""
    sim, real = load_topology(stack("sim")), load_topology(filled(stack("kpro6")))
    assert sim.pools == real.pools
    assert sim.containers == real.containers
    assert sim.vms == real.vms
    assert sim.services["sglang-qwen"].arguments == real.services["sglang-qwen"].arguments
    assert sim.host.address == "127.0.0.1"
