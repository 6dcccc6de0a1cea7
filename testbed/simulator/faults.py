"""Faults on demand: what can go wrong on a host, switched on and off by tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.simulator.events import EventKind

T = TypeVar("T")


class Faulty(Protocol):
    """The parts of the simulated host that faults reach into."""

    def cut_ssh(self) -> None:
        """Drop every SSH connection."""

    def set_silent(self, *, on: bool) -> None:
        """Accept TCP and say nothing, or be well again; not from the event loop."""

    def set_disk_full(self, *, on: bool) -> None:
        """Let writes below /etc and /var fail with ENOSPC, or be well again."""

    def start_foreign(self, address: str, container: int | None) -> int:
        """Start a process that this program does not manage on a GPU; gives its PID."""

    def end_foreign(self, pid: int) -> None:
        """End that process."""

    def faults_changed(self) -> None:
        """Let everything that waits look again."""


class Runner(Protocol):
    """Runs a function where the simulated host lives, and gives its result."""

    def __call__(self, act: Callable[[], T]) -> T:
        """Run `act`."""
        ...


class Faults:
    """Switches for faults; safe to use from the test's thread."""

    def __init__(self, host: Faulty, run: Runner) -> None:
        self._host = host
        self._run = run
        self.cut_after: EventKind | None = None
        self.hanging: set[str] = set()
        self.failing: dict[str, str | None] = {}
        self.api_task: str | None = None
        self.factor = 1.0

    def ssh_cut(self, after: EventKind | None = None) -> None:
        """Drop all SSH connections, now or once right after the next event of a kind; commands get SIGHUP."""
        if after is None:
            self._run(self._host.cut_ssh)
        else:
            self.cut_after = after

    def unbind_hang(self, address: str) -> None:
        """Let the device's next unbind block until `clear`, as a leaked usage count does."""
        self.hanging.add(address)

    def bind_fail(self, address: str, driver: str | None = None) -> None:
        """Let the probe of a device fail, by one driver or by any."""
        self.failing[address] = driver

    def api_task_error(self, message: str = "simulated task error") -> None:
        """Let every task of the Proxmox API, and every change of a mapping, end with an error."""
        self.api_task = message

    def disk_full(self) -> None:
        """Let writes below /etc and /var fail with ENOSPC."""
        self._run(lambda: self._host.set_disk_full(on=True))

    def foreign_process(self, address: str, container: int | None = None) -> int:
        """Start a process on a GPU that nobody manages, on the host or in a container; gives its PID."""
        return self._run(lambda: self._host.start_foreign(address, container))

    def end_process(self, pid: int) -> None:
        """End a process that `foreign_process` started."""
        self._run(lambda: self._host.end_foreign(pid))

    def slow(self, factor: float) -> None:
        """Let loading, stopping and starting take so many times longer."""
        self.factor = factor

    def silent_host(self) -> None:
        """Let the SSH port accept connections and say nothing."""
        self._host.set_silent(on=True)

    def clear(self) -> None:
        """Be well again: what hung goes on; foreign processes stay."""
        self._host.set_silent(on=False)
        self._run(self._clear)

    def _clear(self) -> None:
        self.cut_after, self.api_task, self.factor = None, None, 1.0
        self.hanging.clear()
        self.failing.clear()
        self._host.set_disk_full(on=False)
        self._host.faults_changed()
