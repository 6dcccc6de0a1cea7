"""The agent's operations on a host, with the requests that the program sends for kpro6's topologies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, cast

from host.client import AgentClient
from testbed.checks import CONFIDENTIAL, CONTAINER, SERVING, UNIT, VM
from testbed.simulator.pveconf import Mapping, format_mappings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.hosts import HostUnderTest

MAPPING = "gpu-confidential"
SERVICE = {"name": "sglang-qwen", "unit": UNIT, "container": CONTAINER}
MANAGED = {"services": [SERVICE], "vms": [VM], "containers": [CONTAINER]}
ALL = (*SERVING, *CONFIDENTIAL)
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
# Generous: what takes a second on a hypervisor takes ten on an emulated one that shares its two cores.
PATIENCE = {"stop_timeout_s": 120, "holders_timeout_s": 120, "boot_timeout_s": 300}

Facts = dict[str, Any]


class Operations:
    """The agent on one host; each operation is a method that takes what varies."""

    def __init__(self, host: HostUnderTest) -> None:
        self._host = host
        self._client = AgentClient(host.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def call(self, operation: str, **request: object) -> Facts:
        """One operation's answer."""
        return cast("Facts", dict(self._client.call(operation, {**PATIENCE, **request})))

    def facts(self, **limits: float) -> Facts:
        """The host's facts."""
        request = {"containers": [CONTAINER], "vms": [VM], "services": [SERVICE]}
        return cast("Facts", dict(self._client.facts({"commands_limit_s": 60, **request, **limits})))

    def device(self, address: str) -> Facts:
        """One device's facts."""
        return next(device for device in self.facts()["devices"] if device["address"] == address)

    def bind(self, pool: str, devices: Sequence[str], driver: str, others: Sequence[str] = (), **more: object) -> Facts:
        """Bind a pool."""
        request = {"pool": pool, "devices": [*devices], "driver": driver, "others": [*others], "managed": MANAGED}
        return self.call("bind", revision="test", **request, **more)

    def container(self, devices: Sequence[str], style: str = "raw") -> Facts:
        """Give the container its GPUs."""
        request = {"vmid": CONTAINER, "devices": [*devices], "style": style, "units": [UNIT], "start": True}
        return self.call("container", revision="test", **request)

    def unit(self, tp: int) -> Facts:
        """Deploy the unit with another tensor parallelism."""
        text = self.unit_text()
        old = text.partition("--tp ")[2].split()[0]
        return self.deploy(text.replace(f"--tp {old}", f"--tp {tp}"))

    def deploy(self, text: str) -> Facts:
        """Deploy a unit."""
        return self.call("unit", **SERVICE, path=UNIT_PATH, text=text, enabled=True, revision="test")

    def unit_text(self) -> str:
        """The unit as deployed."""
        return self._host.read(f"/var/lib/lxc/{CONTAINER}/rootfs{UNIT_PATH}")

    def serve(self, devices: Sequence[str], **more: object) -> Facts:
        """Serve on these GPUs, all of them for tensor parallelism."""
        request: dict[str, object] = {
            **SERVICE,
            "port": 30000,
            "tp": len(devices),
            "gpus": len(devices),
            "devices": [*devices],
            "environment": {"NCCL_P2P_DISABLE": "1"},
            "enabled": True,
            "deadline_s": 300,
            "token_timeout_s": 60,
            "translated_iommu": True,
            "revision": "test",
        }
        return self.call("serve", **request | more)

    def map(self, devices: Sequence[str]) -> None:
        """Write the PCI mapping, as Proxmox's API does for the program."""
        facts = {device["address"]: device for device in self.facts()["devices"]}
        entries = tuple(_entry(facts[address]) for address in devices)
        text = format_mappings({MAPPING: Mapping(MAPPING, entries)})
        self._host.write("/etc/pve/mapping/pci.cfg", text)

    def vm(self, devices: Sequence[str], *, start: bool = True) -> Facts:
        """Give the VM its GPUs."""
        request = {"vmid": VM, "mapping": MAPPING, "count": len(devices), "pool": "confidential"}
        flags = {"pcie": True, "rombar": False, "start": start}
        return self.call("vm", devices=[*devices], revision="test", **request, **flags)


def _entry(device: Facts) -> dict[str, str]:
    return {
        "id": f"{device['vendor']}:{device['device']}",
        "iommugroup": str(device["iommu_group"]),
        "node": "kpro6",
        "path": device["address"],
        "subsystem-id": f"{device['subsystem_vendor']}:{device['subsystem_device']}",
    }


def split(operations: Operations) -> None:
    """Hand NUMA node 1's cards to the VM and serve on node 0's, in the program's order."""
    operations.call("register", managed=MANAGED)
    request = {"pool": "confidential", "devices": [*CONFIDENTIAL], "driver": "vfio-pci"}
    operations.call("drain", revision="test", managed=MANAGED, **request)
    operations.bind("confidential", CONFIDENTIAL, "vfio-pci", SERVING)
    operations.bind("serving", SERVING, "nvidia", CONFIDENTIAL)
    operations.map(CONFIDENTIAL)
    operations.container(SERVING)
    operations.unit(len(SERVING))
    operations.serve(SERVING)
    operations.vm(CONFIDENTIAL)


def merge(operations: Operations) -> None:
    """Take the cards back from the VM and serve on all eight, in the program's order."""
    request = {"pool": "serving", "devices": [*ALL], "driver": "nvidia"}
    operations.call("drain", revision="test", managed=MANAGED, **request)
    operations.bind("serving", ALL, "nvidia")
    operations.container(ALL)
    operations.unit(len(ALL))
    operations.serve(ALL)
    operations.call("vm-release", vmid=VM)
    operations.call("release", pool="confidential", managed=MANAGED)
