"""The simulated kpro6 with a workspace on it, in the shapes that the demo and the tests move it between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from testbed.workspace import Workspace, shipped_topology

if TYPE_CHECKING:
    from pathlib import Path

Topology = dict[str, Any]


class Machine(Protocol):
    """How a stand-in for the hypervisor is reached, on loopback."""

    @property
    def ssh_port(self) -> int:
        """The SSH server's port."""

    @property
    def host_key(self) -> str:
        """The host's public key, one line in authorized_keys format."""

    @property
    def identity_file(self) -> Path:
        """The private key that root may log in with."""

    @property
    def api_url(self) -> str:
        """The Proxmox API's address."""

    @property
    def api_token(self) -> str:
        """An API token, `USER@REALM!NAME=SECRET`."""


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


def workspace_on(machine: Machine, folder: Path) -> Workspace:
    """A workspace whose stack is the host as it was found: all eight GPUs in the container."""
    topology = shipped_topology("sim")
    host, proxmox = topology["host"], topology["proxmox"]
    del host["knownHosts"]
    host |= {"port": machine.ssh_port, "hostKey": machine.host_key, "identityFile": str(machine.identity_file)}
    proxmox["endpoint"] = machine.api_url
    topology["services"]["sglang-qwen"]["canonicalUnit"] = "units/sglang-qwen.service"
    merge(topology)
    workspace = Workspace(folder, topology)
    # The API token as the provider takes it from the environment: a throw-away of this machine, in no file.
    workspace.environment["PROXMOX_VE_API_TOKEN"] = machine.api_token
    return workspace
