"""The simulated hypervisor: kernel, guests, systemd and files put together, with boot and power-off."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import TYPE_CHECKING

from testbed.simulator import filesystem
from testbed.simulator.containers import Containers
from testbed.simulator.drivers import UVM
from testbed.simulator.events import EventKind
from testbed.simulator.kernel import Kernel
from testbed.simulator.processes import Process, Processes
from testbed.simulator.pveconf import GuestError
from testbed.simulator.services import ServiceLauncher, Sglang
from testbed.simulator.systemd import Manager
from testbed.simulator.vms import Vms
from testbed.simulator.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from testbed.simulator.sysfs import Function
    from testbed.simulator.world import World

OVERRIDES = "etc/driverctl.d"
SETTLE_S = 30
_IDS = re.compile(r"vfio[-_]pci(?:\.|\s+)ids=(\S+)")


class HostMachine:
    """Everything behind the SSH server and the API; lives on the simulator's event loop."""

    def __init__(self, world: World, socket: str, environment: dict[str, str], shell: dict[str, str]) -> None:
        self.state, self.tree, self.log, self.faults = world.state, world.tree, world.log, world.faults
        self.socket, self.environment, self.shell = socket, environment, shell
        self.warm = False
        self.processes = Processes(world.tree, world.changed)
        self.kernel = Kernel(world, self.processes)
        self.launcher = ServiceLauncher(self)
        self.systemd = Manager(world.tree, world.log, self.launcher, "", None)
        self.containers = Containers(world.tree, self.kernel, self.launcher, world.state.hostname)
        self.vms = Vms(world.tree, self.kernel, world.state.hostname)
        self.watch = Watch(world.tree, world.log)
        world.log.before = self.watch.look

    # ----------------------------------------------------------- power cycle

    async def install(self) -> None:
        """Lay out the files of the found state, and boot into it; services are as if loaded long ago."""
        filesystem.lay_out(self.tree, self.state)
        for vmid, container in self.state.containers.items():
            self.containers.add(vmid, container)
        for vmid, vm in self.state.vms.items():
            self.tree.put(f"{self.vms.folder}/{vmid}.conf", vm.config)
        self.warm = True
        await self._boot(
            [vmid for vmid, c in self.state.containers.items() if c.running],
            [vmid for vmid, v in self.state.vms.items() if v.running],
            {},
        )
        servers = self.launcher.servers.values()
        await asyncio.wait_for(asyncio.gather(*(s.settled.wait() for s in servers)), SETTLE_S)
        self.warm = False

    async def boot(self, majors: dict[str, int]) -> None:
        """Boot again after a power-off, with what is on disk now, and these majors instead of the state's."""
        await self._boot(
            [v for v in self.containers.all if self.containers.config(v).get("onboot") == "1"],
            [v for v in self.vms.ids() if self.vms.config(v).get("onboot") == "1"],
            majors,
        )

    async def power_off(self) -> None:
        """Stop guests and services, and end every process; a leaked usage count does not outlive it."""
        self.faults.hanging.clear()
        running = [c for c in self.containers.all.values() if c.running]
        await asyncio.gather(self.systemd.shut_down(), *(self.containers.halt(c) for c in running))
        self.vms.halt_all()
        self.processes.end_all()
        self.watch.pause()

    async def _boot(self, containers: list[int], vms: list[int], majors: dict[str, int]) -> None:
        self.watch.pause()
        self.processes.boot_time = int(time.time()) - 60
        state = self.state.model_copy(update={"nvidia": self.state.nvidia.model_copy(update=majors)})
        filesystem.boot_files(self.tree, state, self.processes.boot_time, str(uuid.uuid4()))
        self.kernel.power_on()
        self.log.add(EventKind.HOST_BOOT, self.state.hostname)
        self._bind_drivers()
        self.processes.spawn(Process(argv=("/sbin/init",), comm="systemd", cgroup="/init.scope"))
        self.watch.start()
        await self.systemd.boot()
        for vmid in containers:
            await self._try_guest(self.containers.start(vmid))
        for vmid in vms:
            await self._try_guest(self.vms.start(vmid))

    async def _try_guest(self, start: Awaitable[None]) -> None:
        """A guest that does not start leaves the others alone, as pve-guests does."""
        try:
            await start
        except GuestError as error:
            self.log.add(EventKind.FAULT, "guest start", message=str(error))

    def _bind_drivers(self) -> None:
        """Let udev replay driverctl's overrides before any driver sees a device, then load the modules."""
        wanted = list(self.state.kernel.modules)
        for address, driver in self.persisted().items():
            function = self.kernel.functions.get(address)
            if function is not None:
                function.override = driver
                self.tree.put(f"{function.home}/driver_override", f"{driver}\n")
                wanted.append(driver)
        ids = self._vfio_ids()
        if ids:
            self.kernel.load_module("vfio_pci")
            for one in ids:
                self.kernel.add_dynamic_id("vfio-pci", one)
        for module in dict.fromkeys(wanted):
            self.kernel.load_module(module)

    def persisted(self) -> dict[str, str]:
        """The overrides below /etc/driverctl.d, by address."""
        folder = self.tree.path(OVERRIDES)
        return {p.name.removeprefix("pci-"): p.read_text().strip() for p in sorted(folder.glob("pci-*"))}

    def _vfio_ids(self) -> list[str]:
        texts = [self.state.kernel.cmdline]
        texts += [p.read_text() for p in sorted(self.tree.path("etc/modprobe.d").glob("*.conf"))]
        found = (_IDS.search(line) for text in texts for line in text.splitlines() if not line.startswith("#"))
        return [one.replace(":", " ") for match in found if match for one in match[1].split(",")]

    # ------------------------------------------------------------- questions

    def visible(self, container: int | None) -> list[Function]:
        """The GPUs that a process can open, on the host or in a container."""
        if container is None:
            return self.kernel.nvidia_gpus()
        return self.containers.visible(self.containers.all[container])

    def computable(self, container: int | None) -> list[Function]:
        """The GPUs that CUDA finds there: none without nvidia-uvm, which nvidia-smi can do without."""
        if container is not None and not self.containers.all[container].may_open(UVM):
            return []
        return self.visible(container)

    def server(self, key: str) -> Sglang | None:
        """The stub server that a message speaks of."""
        return self.launcher.servers.get(key)

    def manager(self, container: int | None) -> Manager:
        """The systemd of the host or of a container."""
        return self.systemd if container is None else self.containers.all[container].manager

    # ---------------------------------------------------------------- faults

    def start_foreign(self, address: str, container: int | None) -> int:
        """Start a process that nobody manages on a GPU; gives its PID."""
        function = self.kernel.functions[address]
        node = self.kernel.drivers[function.driver].node(function) if function.driver else None
        if node is None:
            raise ValueError(f"{address} has no device node that a process could hold: its driver is {function.driver}")
        scope = f"/lxc/{container}/ns/user.slice" if container else "/user.slice/user-1000.slice/session-3.scope"
        extra = ("/dev/nvidiactl", "/dev/nvidia-uvm") if function.driver == "nvidia" else ("/dev/vfio/vfio",)
        process = self.processes.spawn(
            Process(argv=("/usr/bin/python3", "train.py"), cgroup=scope, devices=(node, *extra), container=container)
        )
        self.log.add(EventKind.FAULT, "foreign_process", pid=process.pid, address=address)
        return process.pid
