"""Who holds a GPU: open device nodes of every process, containers' included, and running virtual machines."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .guests import running_vms, vm_config
from .pci import Address, Pci
from .vm_config import refers_to

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .request import Managed, Service
    from .system import System

HOST_DAEMONS = frozenset({"nvidia-persistenced.service", "nvidia-dcgm.service", "dcgm.service"})
"""The NVIDIA driver's own daemons on a host: they hold every card, and are stopped and started around a rebind."""
_DAEMON_NAMES = {"nvidia-persiste": "nvidia-persistenced.service", "nv-hostengine": "nvidia-dcgm.service"}
NVIDIA_MAJOR = 195


@dataclass(frozen=True)
class Holder:
    """A process, or a running VM, that holds at least one of the devices asked for."""

    pid: int | None
    command: str
    unit: str | None
    container: int | None
    vmid: int | None
    devices: tuple[Address, ...]

    def describe(self) -> str:
        """The holder in a message: PID, command, unit, guest, devices."""
        parts = [f"PID {self.pid} ({self.command})" if self.pid else self.command]
        parts += [f"unit {self.unit}"] if self.unit else []
        parts += [f"container {self.container}"] if self.container is not None else []
        parts += [f"VM {self.vmid}"] if self.vmid is not None else []
        return f"{', '.join(parts)} holds {', '.join(self.devices)}"

    @property
    def daemon(self) -> bool:
        """Whether it is one of the driver's own daemons on the host."""
        return self.container is None and self.unit in HOST_DAEMONS

    def service_of(self, managed: Managed) -> Service | None:
        """The managed service that it belongs to."""
        for service in managed.services:
            if (service.unit, service.container) == (self.unit, self.container):
                return service
        return None

    def is_managed(self, managed: Managed) -> bool:
        """Whether this program may stop it."""
        return self.daemon or self.vmid in managed.vms or self.service_of(managed) is not None


def nodes_of(pci: Pci, devices: Iterable[Address]) -> dict[str, set[Address]]:
    """Device nodes whose holders hold devices: /dev/nvidiaN, /dev/dri/…, /dev/vfio/GROUP (all of the group's)."""
    nodes: dict[str, set[Address]] = {}
    for device in devices:
        base = f"/sys/bus/pci/devices/{device}"
        own = [f"/dev/dri/{name}" for name in pci.root.names(f"{base}/drm")]
        own += [f"/dev/vfio/devices/{name}" for name in pci.root.names(f"{base}/vfio-dev")]
        if (minor := pci.minor(device)) is not None:
            own.append(f"/dev/nvidia{minor}")
        if (group := pci.group(device)) is not None:
            own.append(f"/dev/vfio/{group}")
        for node in own:
            nodes.setdefault(node, set()).add(device)
    return nodes


def find_holders(system: System, devices: Iterable[Address]) -> list[Holder]:
    """Everything that holds one of the devices now."""
    pci = Pci(system.root)
    wanted = tuple(devices)
    nodes = nodes_of(pci, wanted)
    found = []
    for pid in _pids(system):
        held = sorted({device for node in _open_nodes(system, pid) for device in nodes.get(node, ())})
        if held:
            found.append(_holder(system, pid, tuple(held)))
    seen = {holder.vmid for holder in found}
    configured = {vmid: refers_to(vm_config(system, vmid) or "", wanted, system.root) for vmid in running_vms(system)}
    return found + [
        Holder(None, "a running virtual machine", None, None, vmid, devices)
        for vmid, devices in configured.items()
        if devices and vmid not in seen
    ]


def process_place(system: System, pid: int) -> tuple[str | None, int | None]:
    """The systemd unit and the container of a process, from its control group.

    As in `0::/lxc/129/ns/system.slice/sglang-qwen.service`.
    """
    text = system.root.text(f"/proc/{pid}/cgroup") or ""
    path = next((line.split(":", 2)[2] for line in text.splitlines() if line.startswith("0::")), text)
    container = re.search(r"/lxc/(\d+)(?:/|$)", path)
    unit = next((part for part in reversed(path.split("/")) if part.endswith((".service", ".scope"))), None)
    return unit, int(container.group(1)) if container else None


def _holder(system: System, pid: int, held: tuple[Address, ...]) -> Holder:
    unit, container = process_place(system, pid)
    name = system.root.word(f"/proc/{pid}/comm") or "?"
    arguments = command_line(system, pid)
    vmid = _vmid(arguments) if container is None else None
    if unit is None and container is None:
        unit = _DAEMON_NAMES.get(name)
    return Holder(pid, shown(arguments) or name, unit, container, vmid, held)


def command_line(system: System, pid: int) -> list[str]:
    """A process's arguments; read apart, since this waits for the memory lock of a process that hangs."""
    path = f"/proc/{pid}/cmdline"
    text = system.read_apart({"cmdline": lambda: system.root.text(path)}, 1.0).get("cmdline")
    return str(text).rstrip("\0").split("\0") if text else []


def hide_secrets(arguments: list[str]) -> list[str]:
    """Arguments with the values of API keys hidden."""
    before = ["", *arguments]
    return [
        "***"
        if re.fullmatch(r"--(admin-)?api-key", flag)
        else re.sub(r"^(--(?:admin-)?api-key=).*", r"\1***", argument)
        for flag, argument in zip(before, arguments, strict=False)
    ]


def shown(arguments: list[str]) -> str:
    """A command in a message: without secrets, and not longer than a line."""
    return " ".join(hide_secrets(arguments))[:120]


def _vmid(arguments: list[str]) -> int | None:
    for flag, value in pairwise(arguments):
        if flag == "-id" and value.isdigit():
            return int(value)
    return None


def _pids(system: System) -> list[int]:
    own = os.getpid()
    return sorted(int(name) for name in system.root.names("/proc") if name.isdigit() and int(name) != own)


def _open_nodes(system: System, pid: int) -> set[str]:
    nodes: set[str] = set()
    try:
        entries = list(system.root.at(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it ended meanwhile
        return nodes
    for entry in entries:
        try:
            target = str(entry.readlink()).removesuffix(" (deleted)")
        except OSError:
            continue
        if "nvidia" in target or "/dev/" in target:
            nodes.add(_node(entry, target))
    return nodes


def _node(link: Path, target: str) -> str:
    """The node behind an open file: by its device number, since a container may know it by another path."""
    try:
        status = link.stat()
    except OSError:
        return target
    if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == NVIDIA_MAJOR:
        return f"/dev/nvidia{os.minor(status.st_rdev)}"
    return target
