"""The exported topology object."""

from __future__ import annotations

import json
from hashlib import sha256

from tests.facts import hosts
from topology.export import topology_output

SPEC = hosts.plan(hosts.split(), hosts.facts("kpro6", "split")).spec


def test_the_output_tells_pools_and_services() -> None:
    """Devices, driver, NUMA node, owner, memory and tp of each pool; tp, unit and readiness of each service."""
    output = topology_output(SPEC)
    assert output["version"] == "v1"
    assert output["host"] == {"node": "kpro6", "snp": True, "translatedIommu": True}
    assert output["pools"]["serving"] == {
        "devices": ["0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0"],
        "driver": "nvidia",
        "numaNode": 0,
        "owners": ["lxc/129"],
        "gpu": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "memoryMib": 97887,
        "tp": 4,
    }
    assert output["pools"]["confidential"]["owners"] == ["vm/200"]
    assert output["pools"]["confidential"]["tp"] is None
    service = output["services"]["sglang-qwen"]
    assert service["tp"] == 4
    assert service["unitHash"] == sha256(SPEC.services[0].text.encode()).hexdigest()
    assert service["readiness"] == {"check": "token", "deadline": 1200, "tokenTimeout": 120}


def test_the_output_is_plain_json() -> None:
    """It survives a round trip through the state unchanged."""
    output = topology_output(SPEC)
    assert json.loads(json.dumps(output)) == output
