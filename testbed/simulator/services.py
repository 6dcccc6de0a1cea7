"""The processes behind services: stub SGLang servers as real processes, and daemons that only show in /proc."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from testbed.simulator.drivers import CONTROL_NODES
from testbed.simulator.events import EventKind
from testbed.simulator.processes import Process
from testbed.simulator.script import STOP_TIMEOUT_S, Script
from testbed.simulator.sglang_stub import parse_arguments
from testbed.simulator.units import UnitError

if TYPE_CHECKING:
    import argparse

    from testbed.simulator.events import EventLog
    from testbed.simulator.faults import Faults
    from testbed.simulator.processes import Processes
    from testbed.simulator.state import HostState
    from testbed.simulator.sysfs import Function
    from testbed.simulator.systemd import Manager
    from testbed.simulator.unitfile import Command
    from testbed.simulator.units import Running, Unit

STUB = Path(__file__).with_name("sglang_stub.py")
IDLE, SERVING, HANGING = (0, 15.0), (0, 82.0), (100, 131.0)  # utilisation %, watts; the hang's are kpro6's
COMPUTE_NODES = CONTROL_NODES[:2]


class Machine(Protocol):
    """What services need of the machine they run on."""

    log: EventLog
    processes: Processes
    faults: Faults
    state: HostState
    socket: str
    environment: dict[str, str]
    shell: dict[str, str]
    warm: bool

    def visible(self, container: int | None) -> list[Function]:
        """The GPUs that a process can open, on the host or in a container."""

    def computable(self, container: int | None) -> list[Function]:
        """The GPUs that CUDA finds there."""


class Daemon:
    """A daemon without a real process that holds every GPU it sees, as nvidia-persistenced does."""

    def __init__(self, machine: Machine, manager: Manager, unit: Unit, argv: list[str]) -> None:
        self._machine = machine
        devices = tuple(f"/dev/nvidia{g.minor}" for g in machine.visible(manager.container))
        process = machine.processes.spawn(
            Process(
                argv=tuple(argv),
                cgroup=_cgroup(manager, unit),
                devices=(CONTROL_NODES[0], *devices) if devices else (),
                container=manager.container,
            )
        )
        self.pid, self.argv, self.environment = process.pid, process.argv, process.environment
        self.tp: int | None = None

    async def started(self) -> None:
        """Return: it is started when it runs."""

    async def stop(self) -> None:
        """End it."""
        self._machine.processes.end(self.pid)


class Sglang:
    """A running stub server; `port` is its real one, `asked` the one inside its network namespace."""

    def __init__(self, machine: Machine, manager: Manager, unit: Unit, arguments: argparse.Namespace) -> None:
        self.machine, self.manager, self.unit, self.arguments = machine, manager, unit, arguments
        self.gpus = machine.computable(manager.container)[: arguments.tp * arguments.pp * arguments.dp]
        self.port: int | None = None
        self.settled = asyncio.Event()
        self.pid = 0
        self.argv: tuple[str, ...] = ()
        self.environment: dict[str, str] = {}
        self.tp: int | None = arguments.tp
        self._ranks: list[int] = []
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def asked(self) -> int:
        """The port inside the network namespace."""
        return int(self.arguments.port)

    async def start(self, key: str, argv: list[str], environment: dict[str, str]) -> None:
        """Start the real process and show it, with one process for each rank, below /proc."""
        self.argv, self.environment = tuple(argv), environment
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-IS",
            str(STUB),
            json.dumps(self._told(key)),
            *_own_arguments(argv),
            env={**environment, **self.machine.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        spawn, where = self.machine.processes.spawn, self.manager
        cgroup = _cgroup(where, self.unit)
        shared = Process(argv=tuple(argv), cgroup=cgroup, environment=environment, container=where.container)
        main = spawn(shared)
        self.pid = main.pid
        for rank, gpu in enumerate(self.gpus):
            devices = (f"/dev/nvidia{gpu.minor}", *COMPUTE_NODES)
            comm = f"sglang::scheduler_TP{rank}"
            process = spawn(replace(shared, argv=(comm,), comm=comm, devices=devices, parent=main.pid))
            self._ranks.append(process.pid)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._watch())]

    async def started(self) -> None:
        """Return: it is started when it runs."""

    async def stop(self) -> None:
        """End the real process, then close what it held."""
        self._stopping = True
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._gone()
        await asyncio.gather(*self._tasks)

    def told(self, event: str, detail: dict[str, object]) -> None:
        """Take note of what the process says of itself."""
        log, scope = self.machine.log, {"container": self.manager.container, "tp": self.tp}
        match event:
            case "listening":
                self.port = int(str(detail["port"]))
            case "hang":
                self._load(HANGING, 4300)
                self.settled.set()
            case "ready":
                self.settled.set()
                self._load(SERVING, 89_900)
                log.add(EventKind.SERVICE_READY, self.unit.name, **scope)
            case "token":
                log.add(EventKind.SERVICE_TOKEN, self.unit.name, **scope)
            case "server_info":
                log.add(EventKind.SERVER_INFO, self.unit.name, **scope)

    def _told(self, key: str) -> dict[str, object]:
        machine, model = self.machine, str(self.arguments.model_path)
        settings = machine.state.sglang
        factor = machine.faults.factor
        local = model.startswith("/")
        visible = machine.computable(self.manager.container)
        return {
            "socket": machine.socket,
            "service": key,
            "visible": len(visible),
            "translated": machine.state.translated,
            "load_s": 0 if machine.warm else settings.load_s * factor,
            "stop_s": settings.stop_s * factor,
            "model_exists": not local or self.manager.tree.path(f"{self.manager.base}{model}").is_dir(),
            "weights_gb": settings.weights_gb.get(model, 0),
            "memory_mib": min((g.model.memory_mib for g in visible), default=0),
            "taken_ports": [
                u.running.asked
                for u in self.manager.units.values()
                if isinstance(u.running, Sglang) and u is not self.unit
            ],
            "nccl_conf": _settings(self.manager.inside("/etc/nccl.conf") or ""),
        }

    def _load(self, load: tuple[int, float], memory_mib: int) -> None:
        for gpu in self.gpus:
            gpu.load = (*load, memory_mib)

    def _gone(self) -> None:
        self._load(IDLE, 4)
        for pid in (*self._ranks, self.pid):
            self.machine.processes.end(pid)
        self.port = None

    async def _read(self) -> None:
        stream = self._process.stdout or asyncio.StreamReader()
        async for line in stream:
            self.unit.journal.append(line.decode(errors="replace").rstrip("\n"))

    async def _watch(self) -> None:
        status = await self._process.wait()
        self.settled.set()
        if not self._stopping:
            await self._tasks[0]
            self._gone()
            self.manager.exited(self.unit, self, status)


class ServiceLauncher:
    """Starts what a unit names, if the simulator knows it."""

    DAEMONS = ("nvidia-persistenced", "nv-hostengine")

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._next = 0
        self.servers: dict[str, Sglang] = {}

    async def launch(
        self, manager: Manager, unit: Unit, commands: list[Command], environment: dict[str, str]
    ) -> Running:
        """Start what a unit runs.

        Raises:
            UnitError: a program is none that the simulator knows.
        """
        if Script.runs(manager, unit):
            shell = self._machine.shell
            script = Script(self._machine.processes, manager, unit, {**shell, **environment})
            script.start(commands, shell["PATH"].partition(":")[0])
            return script
        if len(commands) != 1:
            count = len(commands)
            raise UnitError(f"{unit.name} has {count} commands: only the host's oneshot units may have other than one")
        argv = commands[0].argv
        if argv[0].rsplit("/", 1)[-1] in self.DAEMONS:
            return Daemon(self._machine, manager, unit, argv)
        if not _is_sglang(argv):
            raise UnitError(
                f"the simulator runs SGLang, {', '.join(self.DAEMONS)} and the host's oneshot units only, "
                f"not {' '.join(argv)!r}"
            )
        self._next += 1
        key = f"{manager.scope}/{unit.name}/{self._next}"
        try:
            arguments = parse_arguments(_own_arguments(argv))
        except SystemExit:
            raise UnitError(f"sglang cannot read its arguments: {' '.join(argv)!r}") from None
        server = Sglang(self._machine, manager, unit, arguments)
        self.servers[key] = server
        await server.start(key, argv, environment)
        return server

    def port(self, container: int | None, asked: int) -> int | None:
        """The real port behind a port of a network namespace."""
        return next(
            (s.port for s in self.servers.values() if s.manager.container == container and s.asked == asked and s.port),
            None,
        )


def _is_sglang(argv: list[str]) -> bool:
    return "sglang.launch_server" in argv or [a.rsplit("/", 1)[-1] for a in argv[:2]] == ["sglang", "serve"]


def _own_arguments(argv: list[str]) -> list[str]:
    marker = "sglang.launch_server" if "sglang.launch_server" in argv else "serve"
    return argv[argv.index(marker) + 1 :]


def _cgroup(manager: Manager, unit: Unit) -> str:
    return f"{f'/lxc/{manager.container}/ns' if manager.container else ''}/system.slice/{unit.name}"


def _settings(text: str) -> dict[str, str]:
    lines = (line.split("#", 1)[0].partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, eq, value in lines if eq}
