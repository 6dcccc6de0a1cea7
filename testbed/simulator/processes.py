"""The process table: what /proc shows of processes that hold devices."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.simulator.tree import Tree
    from testbed.simulator.waiting import Signal

FIRST_PID = 2100
TICKS = 100  # USER_HZ: the unit of start times in /proc/PID/stat
COMM_LENGTH = 15


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process; `devices` are its open device nodes, `inner_pid` its number inside its container."""

    argv: tuple[str, ...]
    cgroup: str
    pid: int = 0
    comm: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    parent: int = 1
    container: int | None = None
    inner_pid: int | None = None
    started: float = 0.0


class Processes:
    """All simulated processes, mirrored below /proc; tells `released` when a node has no holder any more."""

    def __init__(self, tree: Tree, changed: Signal) -> None:
        self._tree = tree
        self._changed = changed
        self._next_pid = FIRST_PID
        self._all: dict[int, Process] = {}
        self.released: list[Callable[[str], None]] = []
        self.boot_time = int(time.time()) - 3600

    def spawn(self, process: Process) -> Process:
        """Start a process under the next free PID; gives it with what was filled in."""
        pid = self._next_pid
        self._next_pid += 7
        inner = process.inner_pid or (pid - FIRST_PID + 200 if process.container else None)
        comm = (process.comm or process.argv[0].rsplit("/", 1)[-1])[:COMM_LENGTH]
        started = replace(process, pid=pid, inner_pid=inner, comm=comm, started=time.time())
        self._all[pid] = started
        self._show(started)
        return started

    def end(self, pid: int) -> None:
        """End a process: its nodes are closed, and waiters look again."""
        process = self._all.pop(pid, None)
        if process is None:
            return
        self._tree.drop(f"proc/{pid}")
        for node in process.devices:
            if not self.holders(node):
                for told in self.released:
                    told(node)
        self._changed.notify()

    def end_all(self) -> None:
        """End every process, as a power-off does."""
        for pid in tuple(self._all):
            self.end(pid)

    def get(self, pid: int) -> Process | None:
        """The process with this PID."""
        return self._all.get(pid)

    def holders(self, node: str) -> list[Process]:
        """The processes that have a device node open."""
        return [p for p in self._all.values() if node in p.devices]

    def of_container(self, vmid: int) -> list[Process]:
        """The processes inside a container."""
        return [p for p in self._all.values() if p.container == vmid]

    def inner(self, vmid: int, inner_pid: int) -> Process | None:
        """The process that a container knows by this number."""
        return next((p for p in self.of_container(vmid) if p.inner_pid == inner_pid), None)

    def _show(self, process: Process) -> None:
        base = f"proc/{process.pid}"
        put, link = self._tree.put, self._tree.link
        put(f"{base}/comm", f"{process.comm}\n")
        put(f"{base}/cmdline", "".join(f"{a}\0" for a in process.argv))
        put(f"{base}/environ", "".join(f"{k}={v}\0" for k, v in process.environment.items()))
        put(f"{base}/cgroup", f"0::{process.cgroup}\n")
        put(f"{base}/stat", self._stat(process))
        put(f"{base}/status", self._status(process))
        link(f"{base}/exe", process.argv[0])
        link(f"{base}/ns/net", f"net:[{4026531840 + (process.container or 0)}]")
        link(f"{base}/ns/pid", f"pid:[{4026531836 + (process.container or 0)}]")
        root = f"var/lib/lxc/{process.container}/rootfs" if process.container else ""
        link(f"{base}/root", f"../../{root}")
        for number, node in enumerate(("/dev/null", "/dev/null", "/dev/null", *process.devices)):
            link(f"{base}/fd/{number}", node)

    def _stat(self, process: Process) -> str:
        # Fields 3 to 22 of proc(5): readers want the state, the parent and the start time.
        start = int((process.started - self.boot_time) * TICKS)
        pid = process.pid
        head = f"{pid} ({process.comm}) S {process.parent} {pid} {pid} 0 -1 4194304"
        return f"{head} 0 0 0 0 0 0 0 0 20 0 1 0 {start} 0 0\n"

    @staticmethod
    def _status(process: Process) -> str:
        inner = f"\t{process.inner_pid}" if process.inner_pid else ""
        lines = (
            f"Name:\t{process.comm}",
            "State:\tS (sleeping)",
            f"Tgid:\t{process.pid}",
            f"Pid:\t{process.pid}",
            f"PPid:\t{process.parent}",
            "Uid:\t0\t0\t0\t0",
            f"NSpid:\t{process.pid}{inner}",
        )
        return "\n".join(lines) + "\n"
