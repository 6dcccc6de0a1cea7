"""Proxmox guests on this node: their configuration files, their state, and commands inside containers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .result import FailedError

if TYPE_CHECKING:
    from .system import Completed, System

CONTAINERS = "/etc/pve/lxc"
VMS = "/etc/pve/qemu-server"
TOOL_LIMIT = 30.0
"""Seconds for pct and qm commands that only ask: they start a Perl interpreter, about 0.6 s on an idle host."""


def vm_config(system: System, vmid: int) -> str | None:
    """A VM's configuration text; None when there is no such VM on this node."""
    return system.root.text(f"{VMS}/{vmid}.conf")


def container_config(system: System, vmid: int) -> str | None:
    """A container's configuration text; None when there is no such container on this node."""
    return system.root.text(f"{CONTAINERS}/{vmid}.conf")


def ids_in(system: System, folder: str) -> list[int]:
    """The VMIDs with a configuration in `folder`."""
    stems = (name.removesuffix(".conf") for name in system.root.names(folder) if name.endswith(".conf"))
    return sorted(int(stem) for stem in stems if stem.isdigit())


def running_vms(system: System) -> list[int]:
    """VMIDs that run; none asked for where the node has no VM at all."""
    if not ids_in(system, VMS):
        return []
    done = system.run("qm", "list", limit=TOOL_LIMIT)
    if not done.ok:
        raise FailedError(f"the running VMs could not be listed: {done.complaint()}")
    return sorted(vmid for vmid, state in parse_list(done.out).items() if state == "running")


def parse_list(table: str) -> dict[int, str]:
    """VMID → state of what `pct list` or `qm list` prints: they differ in the columns' order, the header tells."""
    header, *lines = table.splitlines() or [""]
    column = next((index for index, word in enumerate(header.upper().split()) if word == "STATUS"), 1)
    rows = (line.split() for line in lines)
    return {int(words[0]): words[column] for words in rows if len(words) > column and words[0].isdigit()}


def status(system: System, tool: str, vmid: int) -> str:
    """`running` or `stopped`, by `pct status` or `qm status`."""
    done = system.need(tool, "status", str(vmid), limit=TOOL_LIMIT)
    return done.out.partition("status:")[2].strip().split(" ")[0]


def inside(container: int | None, *argv: str) -> tuple[str, ...]:
    """A command for a container, or for the host itself when there is none."""
    return argv if container is None else ("pct", "exec", str(container), "--", *argv)


def run_inside(system: System, container: int | None, *argv: str, limit: float = TOOL_LIMIT) -> Completed:
    """Run a command in a container, or on the host."""
    return system.run(*inside(container, *argv), limit=limit)


def need_inside(system: System, container: int | None, *argv: str, limit: float = TOOL_LIMIT) -> Completed:
    """Run a command in a container, or on the host, that must succeed."""
    return system.need(*inside(container, *argv), limit=limit)


def shut_down(system: System, tool: str, vmid: int, timeout: float) -> None:
    """Shut a guest down cleanly; stop it hard when its time is over."""
    asked = system.run(tool, "shutdown", str(vmid), "--timeout", f"{max(1, round(timeout))}", limit=timeout + 30)
    if not asked.ok or status(system, tool, vmid) == "running":
        system.progress(f"{tool} {vmid} did not shut down within {timeout:.0f} s: stopping it")
        system.need(tool, "stop", str(vmid), limit=90)
    deadline = time.monotonic() + 30
    while status(system, tool, vmid) == "running":
        if time.monotonic() > deadline:
            raise FailedError(f"guest {vmid} still runs after `{tool} stop {vmid}`")
        time.sleep(0.5)
