"""The simulated kpro6 with a workspace on it, in the shapes that the demo and the tests move it between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from testbed.workspace import Workspace, shipped_topology

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.simulator.simulator import Simulator

Topology = dict[str, Any]


def split(topology: Topology) -> None:
    """Give NUMA node 1's four GPUs to the VM: the stack file as shipped."""
    for part in ("pools", "vms"):
        topology[part] = shipped_topology("sim")[part]


def merge(topology: Topology) -> None:
    """Give all eight GPUs to the container, and none to the VM."""
    pools = shipped_topology("sim")["pools"]
    serving, confidential = pools["serving"], pools["confidential"]
    del serving["numaNode"]
    topology["pools"] = {
        "serving": serving | {"devices": serving["devices"] + confidential["devices"], "spanNumaNodes": True},
    }
    topology["vms"] = {}


def workspace_on(simulator: Simulator, folder: Path) -> Workspace:
    """A workspace whose stack is the simulated host as it was found: all eight GPUs in the container."""
    topology = shipped_topology("sim")
    host, proxmox = topology["host"], topology["proxmox"]
    del host["knownHosts"]
    host |= {"port": simulator.ssh_port, "hostKey": simulator.host_key, "identityFile": str(simulator.identity_file)}
    proxmox["endpoint"] = simulator.api_url
    topology["services"]["sglang-qwen"]["canonicalUnit"] = "units/sglang-qwen.service"
    merge(topology)
    workspace = Workspace(folder, topology)
    # The API token as the provider takes it from the environment: a throw-away of this simulator, in no file.
    workspace.environment["PROXMOX_VE_API_TOKEN"] = simulator.api_token
    return workspace
