"""A host's oneshot unit that runs Python: a real process in the private root, as if it was started over SSH."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from testbed.simulator.processes import Process
from testbed.simulator.unitfile import seconds

if TYPE_CHECKING:
    from testbed.simulator.processes import Processes
    from testbed.simulator.systemd import Manager
    from testbed.simulator.units import Unit

PYTHON = "/usr/bin/python3"
STOP_TIMEOUT_S = 20


class Script:
    """The unit's process; its start job ends with it. What it prints is in the journal when it has ended."""

    tp: int | None = None

    def __init__(self, processes: Processes, manager: Manager, unit: Unit, argv: list[str]) -> None:
        self._processes, self._manager, self._unit = processes, manager, unit
        self.argv = tuple(argv)
        self.pid = 0
        self.environment: dict[str, str] = {}
        self._ended = asyncio.Event()

    @staticmethod
    def runs(manager: Manager, unit: Unit, argv: list[str]) -> bool:
        """Whether a unit is one of these."""
        oneshot = unit.definition.last("Service", "Type") == "oneshot"
        return oneshot and manager.container is None and argv[:1] == [PYTHON]

    async def start(self, environment: dict[str, str]) -> None:
        """Start the process."""
        self.environment = environment
        self._output = os.memfd_create("journal")  # no pipe: a child that outlives the process would keep it open
        self._process = await asyncio.create_subprocess_exec(
            shutil.which("python3", path=environment["PATH"]) or PYTHON,
            *self.argv[1:],
            cwd=self._manager.tree.root,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        shown = Process(argv=self.argv, cgroup=f"/system.slice/{self._unit.name}", environment=environment)
        self.pid = self._processes.spawn(shown).pid
        self._task = asyncio.create_task(self._watch())

    async def started(self) -> None:
        """Wait for its end, which is when systemd counts it as started."""
        await self._ended.wait()

    async def stop(self) -> None:
        """End every process of the group, those that heed SIGTERM by that."""
        await self._end()
        await self._ended.wait()

    async def _end(self) -> None:
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        await self._process.wait()

    async def _watch(self) -> None:
        result = ""
        try:
            limit = seconds(self._unit.definition.last("Service", "TimeoutStartSec", "infinity"))
            await asyncio.wait_for(self._process.wait(), limit)
        except TimeoutError:
            self._unit.journal.append(f"{self._unit.name}: start operation timed out. Terminating.")
            result = "timeout"
            await self._end()
        self._signal(signal.SIGKILL)  # what it left behind goes with its cgroup
        printed = os.pread(self._output, os.fstat(self._output).st_size, 0)
        os.close(self._output)
        self._unit.journal += printed.decode(errors="replace").splitlines()
        self._processes.end(self.pid)
        self._manager.exited(self._unit, self, self._process.returncode or 0, result)
        self._ended.set()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
