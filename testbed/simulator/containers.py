"""LXC containers: configuration, start and stop, device nodes inside, and the systemd that runs there."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from testbed.simulator.drivers import CONTROL, device_number
from testbed.simulator.events import EventKind
from testbed.simulator.guests import guest_lock
from testbed.simulator.processes import Process
from testbed.simulator.pveconf import GuestConfig, GuestError
from testbed.simulator.systemd import Manager

if TYPE_CHECKING:
    from testbed.simulator.kernel import Kernel
    from testbed.simulator.services import ServiceLauncher
    from testbed.simulator.state import ContainerState
    from testbed.simulator.sysfs import Function
    from testbed.simulator.tree import Tree

# The driver's clients open a node to read and write; LXC's own rule `c *:* m` lets a container make nodes only.
_ALLOW = re.compile(r"^(?:a|c\s+(\d+|\*):(\d+|\*)\s+(?=\w*r)(?=\w*w)\w+)$")
_DEV_KEY = re.compile(r"^dev(\d+)$")
INIT = "/sbin/init"
START_S = 0.05


@dataclass
class Container:
    """A container; `nodes` are the device nodes it was given at its start, `allowed` those that it may open."""

    vmid: int
    manager: Manager
    init_pid: int | None = None
    nodes: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    @property
    def running(self) -> bool:
        """Whether its init runs."""
        return self.init_pid is not None

    @property
    def rootfs(self) -> str:
        """Its root folder below the tree's."""
        return f"var/lib/lxc/{self.vmid}/rootfs"

    def may_open(self, node: str) -> bool:
        """Whether it has a node, and its cgroup lets it open that."""
        return node in self.allowed


class Containers:
    """All containers of the host."""

    def __init__(self, tree: Tree, kernel: Kernel, launcher: ServiceLauncher, node: str) -> None:
        self.tree, self.kernel, self.launcher = tree, kernel, launcher
        self.folder = f"etc/pve/nodes/{node}/lxc"
        self.node = node
        self.all: dict[int, Container] = {}

    def add(self, vmid: int, state: ContainerState) -> None:
        """Define a container as the state file has it."""
        self.tree.put(f"{self.folder}/{vmid}.conf", state.config)
        base = f"var/lib/lxc/{vmid}/rootfs"
        for name in ("etc/systemd/system", "dev", "tmp", "root", "run", "usr/lib/systemd/system"):
            self.tree.path(f"{base}/{name}").mkdir(parents=True, exist_ok=True)
        for name, text in state.files.items():
            self.tree.put(f"{base}/{name.lstrip('/')}", text)
        self.all[vmid] = Container(vmid, Manager(self.tree, self.kernel.log, self.launcher, base, vmid))

    def need(self, vmid: int) -> Container:
        """The container.

        Raises:
            GuestError: there is no such container.
        """
        if vmid not in self.all or self.tree.read(f"{self.folder}/{vmid}.conf") is None:
            raise GuestError(f"Configuration file 'nodes/{self.node}/lxc/{vmid}.conf' does not exist")
        return self.all[vmid]

    def config(self, vmid: int) -> GuestConfig:
        """The container's configuration as it is on disk now."""
        return GuestConfig.parse(self.tree.read(f"{self.folder}/{vmid}.conf") or "", "lxc")

    async def set(self, vmid: int, values: dict[str, str], delete: set[str]) -> None:
        """Change keys of the configuration; a running container takes them at its next start.

        Raises:
            GuestError: the configuration is locked.
        """
        container = self.need(vmid)
        async with guest_lock(self.tree, f"lxc/pve-config-{vmid}.lock"):
            config = self.config(vmid)
            if container.running:
                config.postpone(values, delete)
            else:
                config.change(values, delete)
            self.tree.save(f"{self.folder}/{vmid}.conf", config.text())

    async def start(self, vmid: int) -> None:
        """Start the container and its enabled units.

        Raises:
            GuestError: it runs already, is locked, or a device it is given does not exist.
        """
        container = self.need(vmid)
        if container.running:
            raise GuestError(f"CT {vmid} already running")
        async with guest_lock(self.tree, f"lxc/pve-config-{vmid}.lock"):
            config = self.config(vmid)
            if config.apply_pending():
                self.tree.save(f"{self.folder}/{vmid}.conf", config.text())
        await asyncio.sleep(START_S * self.kernel.faults.factor)
        self._give_devices(container, config)
        init = Process(argv=(INIT,), comm="systemd", cgroup=f"/lxc/{vmid}/ns/init.scope", container=vmid, inner_pid=1)
        container.init_pid = self.kernel.processes.spawn(init).pid
        gpus = ",".join(g.address for g in self.visible(container))
        self.kernel.log.add(EventKind.CONTAINER_START, vmid, gpus=gpus)
        await container.manager.boot()

    async def stop(self, vmid: int) -> None:
        """Stop the container: its units first, then whatever else runs in it.

        Raises:
            GuestError: it does not run.
        """
        container = self.need(vmid)
        if not container.running:
            raise GuestError(f"CT {vmid} not running")
        await self.halt(container)

    async def halt(self, container: Container) -> None:
        """End the container's units, then its other processes, and take its device nodes away: no file is asked."""
        await container.manager.shut_down()
        for process in self.kernel.processes.of_container(container.vmid):
            self.kernel.processes.end(process.pid)
        container.init_pid, container.nodes, container.allowed = None, (), ()
        shutil.rmtree(self.tree.path(f"{container.rootfs}/dev"))
        self.tree.path(f"{container.rootfs}/dev").mkdir()
        self.kernel.log.add(EventKind.CONTAINER_STOP, container.vmid)

    def visible(self, container: Container) -> list[Function]:
        """The GPUs that a process in the container can open: node, cgroup and control node all given."""
        if not container.may_open(CONTROL):
            return []
        return [g for g in self.kernel.nvidia_gpus() if container.may_open(f"/dev/nvidia{g.minor}")]

    def _give_devices(self, container: Container, config: GuestConfig) -> None:
        nodes: list[str] = []
        rules: list[tuple[str, str]] = []
        for key, value in config.items():
            if _DEV_KEY.match(key):
                source = value.partition(",")[0].removeprefix("path=")
                self._need_node(container.vmid, source)
                nodes.append(source)
                number = device_number(self.tree, source)
                rules += [(str(number[0]), str(number[1]))] if number else []
            elif key == "lxc.mount.entry":
                fields = value.split()
                if fields[0].startswith("/dev/") and len(fields) > 3:
                    optional = "optional" in fields[3].split(",")
                    if not optional:
                        self._need_node(container.vmid, fields[0])
                    if self.tree.path(fields[0]).exists():
                        nodes.append(f"/{fields[1].lstrip('/')}")
            elif key == "lxc.cgroup2.devices.allow":  # LXC ignores lxc.cgroup.* where there is cgroup2 only: cgfsng.c
                rule = _ALLOW.match(value)
                rules += [(rule[1] or "*", rule[2] or "*")] if rule else []
        for node in ("/dev/null", *nodes):
            self.tree.put(f"{container.rootfs}{node}")
        container.nodes = tuple(nodes)
        container.allowed = tuple(node for node in nodes if _allows(rules, device_number(self.tree, node)))

    def _need_node(self, vmid: int, path: str) -> None:
        if not self.tree.path(path).exists():
            raise GuestError(f"startup for container '{vmid}' failed\nDevice {path} does not exist")


def _allows(rules: list[tuple[str, str]], number: tuple[int, int] | None) -> bool:
    return number is not None and any(
        major in ("*", str(number[0])) and minor in ("*", str(number[1])) for major, minor in rules
    )
