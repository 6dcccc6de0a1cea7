"""systemd on the host or in a container: units as loaded, their states, their journals."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Protocol

from testbed.simulator.events import EventKind
from testbed.simulator.unitfile import parse_unit
from testbed.simulator.units import Unit, UnitError, ordered

if TYPE_CHECKING:
    from testbed.simulator.events import EventLog
    from testbed.simulator.tree import Tree
    from testbed.simulator.unitfile import Command
    from testbed.simulator.units import Running

UNIT_FOLDERS = ("etc/systemd/system", "usr/lib/systemd/system")
WANTS = "etc/systemd/system/multi-user.target.wants"
START_LIMIT_BURST = 5
RESTART_DELAY_S = 0.1  # instead of RestartSec, so that a crash loop takes its five rounds in a test's time


class Launcher(Protocol):
    """Starts the processes of services."""

    async def launch(
        self, manager: Manager, unit: Unit, commands: list[Command], environment: dict[str, str]
    ) -> Running:
        """Start what a unit runs.

        Raises:
            UnitError: systemd could not execute it.
        """


class Manager:
    """One systemd; `base` is its root folder below the tree's, `container` the VMID or None for the host."""

    def __init__(self, tree: Tree, log: EventLog, launcher: Launcher, base: str, container: int | None) -> None:
        self.tree, self.log, self.launcher = tree, log, launcher
        self.base, self.container = base, container
        self.units: dict[str, Unit] = {}
        self._journals: dict[str, list[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ----------------------------------------------------------------- lookup

    def fragment(self, name: str) -> str | None:
        """The unit file's path as this systemd sees it."""
        return next((f"/{f}/{name}" for f in UNIT_FOLDERS if self.tree.path(f"{self.base}/{f}/{name}").is_file()), None)

    def drop_ins(self, name: str) -> list[str]:
        """The drop-ins' paths, sorted by file name as systemd applies them."""
        found = {
            path.name: f"/{folder}/{name}.d/{path.name}"
            for folder in reversed(UNIT_FOLDERS)
            for path in self.tree.path(f"{self.base}/{folder}/{name}.d").glob("*.conf")
        }
        return [found[key] for key in sorted(found)]

    def unit(self, name: str) -> Unit | None:
        """The unit, loaded from disk if systemd does not have it in memory yet."""
        full = name if "." in name else f"{name}.service"
        if full not in self.units and self.fragment(full):
            self.units[full] = self._load(Unit(full, journal=self._journals.setdefault(full, [])))
        return self.units.get(full)

    def need(self, name: str) -> Unit:
        """The unit.

        Raises:
            UnitError: there is no such unit.
        """
        unit = self.unit(name)
        if unit is None:
            raise UnitError(f"Unit {name if '.' in name else name + '.service'} not found.")
        return unit

    def names(self) -> list[str]:
        """The names of all services, on disk or in memory."""
        on_disk = {p.name for f in UNIT_FOLDERS for p in self.tree.path(f"{self.base}/{f}").glob("*.service")}
        return sorted(on_disk | set(self.units))

    def need_reload(self, unit: Unit) -> bool:
        """Whether the files changed since they were loaded, by the time stamps that systemd compares."""
        return unit.fragments != self._stamps(unit.name)

    def enablement(self, name: str) -> str:
        """enabled, disabled or static; empty where there is no file."""
        if os.path.lexists(self.tree.path(f"{self.base}/{WANTS}/{name}")):
            return "enabled"
        unit = self.unit(name)
        if unit is None or self.fragment(name) is None:
            return ""
        return "disabled" if unit.definition.values("Install", "WantedBy") else "static"

    def inside(self, path: str) -> str | None:
        """Read a file as a process of this system sees it."""
        return self.tree.read(f"{self.base}/{path.lstrip('/')}")

    @property
    def scope(self) -> str:
        """The subject of events about this systemd."""
        return "host" if self.container is None else str(self.container)

    # ---------------------------------------------------------------- actions

    async def start(self, unit: Unit) -> None:
        """Start a unit; nothing happens if it is active.

        Raises:
            UnitError: it could not be executed, or is restarted too often.
        """
        async with unit.lock:
            await self._start(unit)

    async def stop(self, unit: Unit) -> None:
        """Stop a unit and wait for its processes."""
        if unit.running is not None and unit.sub == "start":
            await unit.running.stop()  # a start job that waits for its process holds the lock until then
        async with unit.lock:
            await self._stop(unit)

    async def restart(self, unit: Unit) -> None:
        """Stop a unit and start it again.

        Raises:
            UnitError: it could not be executed.
        """
        async with unit.lock:
            await self._stop(unit)
            await self._start(unit)

    def enable(self, unit: Unit) -> bool:
        """Link a unit into its target; gives whether that changed something: not for one that no target wants."""
        if self.enablement(unit.name) != "disabled":
            return False
        self.tree.check_space(self.tree.path(f"{self.base}/etc/systemd/system"))
        self.tree.link(f"{self.base}/{WANTS}/{unit.name}", self.fragment(unit.name) or "")
        self.log.add(EventKind.UNIT_ENABLE, unit.name, container=self.container)
        return True

    def disable(self, name: str) -> bool:
        """Take a unit out of its target; gives whether that changed something."""
        if not os.path.lexists(self.tree.path(f"{self.base}/{WANTS}/{name}")):
            return False
        self.tree.drop(f"{self.base}/{WANTS}/{name}")
        self.log.add(EventKind.UNIT_DISABLE, name, container=self.container)
        return True

    def reload(self) -> None:
        """Read all unit files again, as daemon-reload does."""
        for name, unit in tuple(self.units.items()):
            if self.fragment(name):
                self._load(unit)
            elif unit.active in ("inactive", "failed"):
                del self.units[name]
        self.log.add(EventKind.SYSTEMD_RELOAD, self.scope)

    def reset_failed(self, unit: Unit) -> None:
        """Forget a failure and the count of restarts."""
        unit.restarts = 0
        if unit.active == "failed":
            unit.active, unit.sub, unit.result = "inactive", "dead", "success"

    async def boot(self) -> None:
        """Start every enabled unit, one after the other, in the order that After= and Before= ask for."""
        enabled = (self.unit(name) for name in self.names() if self.enablement(name) == "enabled")
        for unit in ordered([unit for unit in enabled if unit]):
            try:
                await self.start(unit)
            except UnitError as error:
                unit.journal.append(str(error))

    async def shut_down(self) -> None:
        """Stop every unit, and forget all of them; journals are on disk and stay."""
        await asyncio.gather(*(self.stop(unit) for unit in self.units.values()))
        for task in tuple(self._tasks):
            task.cancel()
        self.units.clear()

    def exited(self, unit: Unit, running: Running, status: int, result: str = "") -> None:
        """Take note that a main process ended, and restart it where the unit says so.

        Args:
            unit: the process's unit.
            running: the process.
            status: its exit code, or minus a signal's number.
            result: why it ended, where its status does not tell.
        """
        if unit.running is not running:
            return
        unit.running, unit.status = None, status
        unit.result = result or ("success" if status == 0 else "exit-code" if status > 0 else "signal")
        good = unit.result == "success"
        unit.active, unit.sub = ("inactive", "dead") if good else ("failed", "failed")
        unit.journal.append(f"{unit.name}: Main process exited, code=exited, status={status}")
        self.log.add(EventKind.SERVICE_EXIT, unit.name, container=self.container, status=status)
        policy = unit.definition.last("Service", "Restart", "no")
        if policy == "always" or (policy == "on-failure" and not good):
            if unit.restarts >= START_LIMIT_BURST:
                unit.active, unit.sub, unit.result = "failed", "failed", "start-limit-hit"
                unit.journal.append(f"{unit.name}: Start request repeated too quickly.")
                return
            unit.active, unit.sub = "activating", "auto-restart"
            task = asyncio.get_running_loop().create_task(self._restart_later(unit))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # --------------------------------------------------------------- internals

    async def _restart_later(self, unit: Unit) -> None:
        await asyncio.sleep(RESTART_DELAY_S)
        if unit.sub == "auto-restart":
            unit.restarts += 1
            try:
                await self.start(unit)
            except UnitError as error:
                unit.journal.append(str(error))

    async def _start(self, unit: Unit) -> None:
        if unit.running is not None:
            return
        unmet = self._unmet(unit)
        if unmet:
            unit.journal.append(f"{unit.name} was skipped because of an unmet condition check ({unmet}).")
            return
        unit.active, unit.sub, unit.since = "activating", "start", time.time()
        unit.journal.append(f"Started {unit.name} - {unit.definition.last('Unit', 'Description')}.")
        try:
            environment = unit.definition.environment(self.inside)
            commands = unit.definition.commands(environment)
            unit.running = await self.launcher.launch(self, unit, commands, environment)
        except (FileNotFoundError, UnitError) as error:
            unit.active, unit.sub, unit.result, unit.status = "failed", "failed", "exit-code", 203
            unit.journal.append(f"{unit.name}: Failed to execute: {error}")
            raise UnitError(f"Job for {unit.name} failed: {error}") from error
        self.log.add(EventKind.SERVICE_START, unit.name, container=self.container, tp=unit.running.tp)
        await unit.running.started()
        if unit.sub == "start":  # it runs; else it ended, and `exited` took note of how
            unit.active, unit.sub, unit.result = "active", "running", "success"
        elif unit.result != "success":
            raise UnitError(f"Job for {unit.name} failed: {unit.result}, status {unit.status}")

    async def _stop(self, unit: Unit) -> None:
        running, unit.running = unit.running, None
        if running is not None:
            unit.active, unit.sub = "deactivating", "stop-sigterm"
            self.log.add(EventKind.SERVICE_STOP, unit.name, container=self.container)
            await running.stop()
            unit.journal.append(f"Stopped {unit.name}.")
        if unit.active != "failed":
            unit.active, unit.sub, unit.result = "inactive", "dead", "success"

    def _unmet(self, unit: Unit) -> str | None:
        """The condition that keeps a unit from being started."""
        for value in unit.definition.values("Unit", "ConditionPathExists"):
            there = self.tree.path(f"{self.base}/{value.lstrip('!').lstrip('/')}").exists()
            if there is value.startswith("!"):
                return f"ConditionPathExists={value}"
        return None

    def _load(self, unit: Unit) -> Unit:
        unit.fragments = self._stamps(unit.name)
        texts = [self.inside(path) or "" for path, _, _ in unit.fragments]
        unit.definition = parse_unit(texts)
        return unit

    def _stamps(self, name: str) -> tuple[tuple[str, int, int], ...]:
        main = self.fragment(name)
        stamps = []
        for path in ([main] if main else []) + self.drop_ins(name):
            stat = self.tree.path(f"{self.base}{path}").stat()
            stamps.append((path, stat.st_mtime_ns, stat.st_ino))
        return tuple(stamps)
