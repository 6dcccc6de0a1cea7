"""A digest of the simulated host, to show that nothing on it was touched."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.simulator.machine import HostMachine

BOOT_UNIT = "gpu-topology-boot.service"
OWN = (
    f"etc/systemd/system/{BOOT_UNIT}",
    f"etc/systemd/system/multi-user.target.wants/{BOOT_UNIT}",
    "run/lock/gpu-topology.lock",
    "usr/local/lib/gpu-topology-agent.pyz",
    "var/lib/gpu-topology",
)
IGNORED = ("run/lock",)  # locks are taken and left


def contents(machine: HostMachine) -> dict[str, str]:
    """Every file, link and folder below the root by path, and what systemd and the guests hold in memory."""
    root = machine.tree.root
    found = {name: _describe(root / name) for name in _walk(root) if not name.startswith((*OWN, *IGNORED))}
    managers = [machine.systemd, *(c.manager for c in machine.containers.all.values())]
    for manager in managers:
        for unit in manager.units.values():
            if unit.name == BOOT_UNIT:
                continue
            pid = unit.running.pid if unit.running else 0
            text = f"{unit.active} {unit.sub} pid={pid} reload={manager.need_reload(unit)}"
            found[f"unit {manager.scope}/{unit.name}"] = text
    for container in machine.containers.all.values():
        found[f"container {container.vmid}"] = f"{container.init_pid} {container.nodes} {container.allowed}"
    for vmid in machine.vms.ids():
        vm = machine.vms.need(vmid)
        found[f"vm {vmid}"] = f"{vm.pid} {vm.devices}"
    for name, ids in machine.kernel.dynamic_ids.items():
        found[f"ids {name}"] = str(sorted(ids))
    return found


def digest_of(found: dict[str, str]) -> str:
    """One digest of all of it."""
    text = "\n".join(f"{name}\0{value}" for name, value in sorted(found.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def own_files(root: Path) -> list[str]:
    """The program's own files below the root."""
    return [name for name in _walk(root) if name.startswith(OWN)]


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            yield str((Path(folder) / name).relative_to(root))


def _describe(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"-> {path.readlink()}"
    if not stat.S_ISREG(mode):
        return oct(mode)
    return f"{oct(mode)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
