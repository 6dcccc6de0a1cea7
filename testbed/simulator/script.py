"""A host's oneshot unit: real processes in the private root, one after the other, as if they were started over SSH."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.simulator.processes import Process
from testbed.simulator.unitfile import seconds
from testbed.simulator.units import UnitError

if TYPE_CHECKING:
    from testbed.simulator.processes import Processes
    from testbed.simulator.systemd import Manager
    from testbed.simulator.unitfile import Command
    from testbed.simulator.units import Unit

STOP_TIMEOUT_S = 20


class Script:
    """The unit's commands; its start job ends with the last. What one prints is in the journal when it has ended."""

    tp: int | None = None

    def __init__(self, processes: Processes, manager: Manager, unit: Unit, environment: dict[str, str]) -> None:
        self._processes, self._manager, self._unit = processes, manager, unit
        self.environment = environment
        self.argv: tuple[str, ...] = ()
        self.pid = 0
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._ended = asyncio.Event()

    @staticmethod
    def runs(manager: Manager, unit: Unit) -> bool:
        """Whether a unit is one of these."""
        return manager.container is None and unit.definition.last("Service", "Type") == "oneshot"

    def start(self, commands: list[Command], shims: str) -> None:
        """Start the first command, and each further one behind it.

        `shims` is the folder of the simulated host's programs: the machine's own would act on the machine.

        Raises:
            UnitError: a program is not there, or there is none to run.
        """
        if not commands:
            raise UnitError(f"{self._unit.name} has no ExecStart")
        programs = [_program(command, shims) for command in commands]
        self._task = asyncio.create_task(self._run(list(zip(programs, commands, strict=True))))

    async def started(self) -> None:
        """Wait for the end, which is when systemd counts it as started."""
        await self._ended.wait()

    async def stop(self) -> None:
        """End every process of the group, those that heed SIGTERM by that; no further command is run."""
        self._stopping = True
        await self._end()
        await self._ended.wait()

    async def _run(self, commands: list[tuple[str, Command]]) -> None:
        status, result = 0, ""
        for program, command in commands:
            status, result = await self._execute(program, command.argv)
            if command.optional and status and not result and not self._stopping:
                self._unit.journal.append(f"{self._unit.name}: {command.argv[0]} failed with {status}, ignored.")
                status = 0
            if status or result or self._stopping:
                break
        self._manager.exited(self._unit, self, status, result)
        self._ended.set()

    async def _execute(self, program: str, argv: list[str]) -> tuple[int, str]:
        """Run one command; gives its status, and `timeout` where that ended it: systemd times each for itself."""
        output = os.memfd_create("journal")  # no pipe: a child that outlives the process would keep it open
        self._process = await asyncio.create_subprocess_exec(
            program,
            *argv[1:],
            cwd=self._manager.tree.root,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        self.argv = tuple(argv)
        shown = Process(argv=self.argv, cgroup=f"/system.slice/{self._unit.name}", environment=self.environment)
        self.pid = self._processes.spawn(shown).pid
        if self._stopping:  # while it was made
            self._signal(signal.SIGKILL)
        result = ""
        try:
            limit = seconds(self._unit.definition.last("Service", "TimeoutStartSec", "infinity"))
            await asyncio.wait_for(self._process.wait(), limit)
        except TimeoutError:
            self._unit.journal.append(f"{self._unit.name}: start operation timed out. Terminating.")
            result = "timeout"
            await self._end()
        self._signal(signal.SIGKILL)  # what it left behind goes with its cgroup
        printed = os.pread(output, os.fstat(output).st_size, 0)
        os.close(output)
        self._unit.journal += printed.decode(errors="replace").splitlines()
        self._processes.end(self.pid)
        return self._process.returncode or 0, result

    async def _end(self) -> None:
        if self._process:
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if self._process:
                os.killpg(self._process.pid, number)


def _program(command: Command, shims: str) -> str:
    found = shutil.which(Path(command.argv[0]).name, path=shims)
    if found is None:
        raise UnitError(f"the simulated host cannot run {' '.join(command.argv)!r}")
    return found
