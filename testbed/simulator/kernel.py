"""The kernel's PCI core: which driver has which function, and what a write to an attribute of sysfs does."""

from __future__ import annotations

import asyncio
import errno
import shutil
from typing import TYPE_CHECKING

from testbed.simulator import filesystem, sysfs
from testbed.simulator.drivers import Driver, NvidiaDriver, make_driver
from testbed.simulator.events import EventKind

if TYPE_CHECKING:
    from testbed.simulator.processes import Processes
    from testbed.simulator.sysfs import Function
    from testbed.simulator.world import World

OK = 0
PCI_DRIVERS = {"nvidia", "vfio-pci", "snd_hda_intel", "ast", "pcieport"}
BUILT_IN = ("pcieport", "snd_hda_intel")
MODULE_OF = {"vfio_pci": "vfio-pci"}


class Kernel:
    """PCI functions, drivers, and attribute writes with the errno a real kernel answers."""

    def __init__(self, world: World, processes: Processes) -> None:
        self.world, self.processes = world, processes
        self.tree, self.log, self.state = world.tree, world.log, world.state
        self.faults, self.changed = world.faults, world.changed
        self.functions: dict[str, Function] = {}
        self.removed: dict[str, Function] = {}
        self.drivers: dict[str, Driver] = {}
        self.dynamic_ids: dict[str, set[tuple[str, str]]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        processes.released.append(self._released)

    # ------------------------------------------------------------------ boot

    def power_on(self) -> None:
        """Enumerate the bus; no driver is loaded yet."""
        for folder in ("sys/devices", "sys/bus/pci", "sys/kernel/iommu_groups", "sys/module", "dev", "proc/driver"):
            shutil.rmtree(self.tree.path(folder), ignore_errors=True)
        filesystem.nodes_files(self.tree, self.state)
        self.tree.put("/dev/null")
        self.tree.put("/dev/net/tun")
        self.drivers, self.dynamic_ids, self.removed, self._locks = {}, {}, {}, {}
        self.functions = sysfs.plug(self.state)
        self.changed.notify()
        for function in self.functions.values():
            sysfs.show(self.tree, function, self.group_type)
        for name in ("drivers_probe", "rescan"):
            self.tree.put(f"sys/bus/pci/{name}")
        for name in BUILT_IN:
            self.load_module(name)

    @property
    def group_type(self) -> str:
        """What /sys/kernel/iommu_groups/N/type says."""
        return "DMA-FQ" if self.state.translated else "identity"

    def load_module(self, module: str) -> None:
        """Load a module, by its name or its driver's; its driver then takes what is free and matches."""
        name = MODULE_OF.get(module, module)
        self.tree.path(f"sys/module/{module.replace('-', '_')}").mkdir(parents=True, exist_ok=True)
        if name not in PCI_DRIVERS or name in self.drivers:
            return
        self.drivers[name] = make_driver(name, self.tree, self.state.nvidia)
        self.dynamic_ids[name] = set()
        for attribute in ("bind", "unbind", "new_id", "remove_id"):
            self.tree.put(f"sys/bus/pci/drivers/{name}/{attribute}")
        self.log.add(EventKind.MODULE_LOAD, module)
        for function in self.functions.values():
            if function.driver is None and self._matches(name, function):
                self._attach(name, function)

    # ------------------------------------------------------- attribute writes

    async def write(self, path: str, data: str) -> int:
        """Write to the attribute at a path below /sys; gives 0 or an errno, and may take as long as a kernel's."""
        value = data.strip()
        match path.split("/"):
            case ["bus", "pci", "drivers", name, attribute]:
                return await self._driver_write(name, attribute, value)
            case ["bus", "pci", "drivers_probe"]:
                return await self._drivers_probe(value)
            case ["bus", "pci", "rescan"]:
                return self._rescan()
            case ["devices", _, address, attribute] if address in self.functions:
                return await self._device_write(self.functions[address], attribute, value)
        return errno.EACCES

    async def _driver_write(self, name: str, attribute: str, value: str) -> int:
        match attribute:
            case "bind":
                return await self._bind(name, value)
            case "unbind":
                return await self._unbind(name, value)
            case "new_id":
                return self.add_dynamic_id(name, value)
            case "remove_id":
                return self._remove_dynamic_id(name, value)
        return errno.EACCES

    async def _device_write(self, function: Function, attribute: str, value: str) -> int:
        match attribute:
            case "driver_override":
                async with self._lock(function):
                    function.override = value or None
                    sysfs.show_override(self.tree, function)
                    self.log.add(EventKind.OVERRIDE, function.address, driver=function.override)
                return OK
            case "remove":
                await self.detach(function)
                del self.functions[function.address]
                self.removed[function.address] = function
                sysfs.hide(self.tree, function)
                return OK
            case "rescan":
                return self._rescan()
            case "reset":
                # A two-function card only has the bus reset, which the kernel refuses for one function.
                alone = sum(f.slot == function.slot for f in self.functions.values()) == 1
                return OK if function.ids.function_level_reset and alone else errno.ENOTTY
        return errno.EACCES

    async def _bind(self, name: str, address: str) -> int:
        function = self.functions.get(address)
        if function is None or name not in self.drivers:
            return errno.ENODEV
        async with self._lock(function):
            if not self._matches(name, function):
                return errno.ENODEV
            if function.driver:
                return errno.EBUSY
            return OK if self._attach(name, function) else errno.EIO

    async def _unbind(self, name: str, address: str) -> int:
        function = self.functions.get(address)
        if function is None or function.driver != name:
            return errno.ENODEV
        await self.detach(function)
        return OK

    async def _drivers_probe(self, address: str) -> int:
        function = self.functions.get(address)
        if function is None:
            return errno.ENODEV
        async with self._lock(function):
            self.probe(function)
        return OK  # a probe that fails is no error here: only the driver link tells

    def _remove_dynamic_id(self, name: str, value: str) -> int:
        wanted = tuple(value.lower().split()[:2])
        known = self.dynamic_ids.get(name, set())
        found = {one for one in known if one == wanted}
        known -= found
        return OK if found else errno.ENODEV

    def add_dynamic_id(self, name: str, value: str) -> int:
        """Let a driver take every free device with an id, `vendor device` in hexadecimal; gives 0 or an errno."""
        fields = value.lower().split()
        if name not in self.drivers:
            return errno.ENODEV
        if len(fields) < 2:
            return errno.EINVAL
        wanted = (fields[0], fields[1])
        if wanted in self.dynamic_ids[name]:
            return errno.EEXIST
        self.dynamic_ids[name].add(wanted)
        for function in self.functions.values():
            if function.driver is None and not function.unbinding and self._matches(name, function):
                self._attach(name, function)
        return OK

    def _rescan(self) -> int:
        for address, function in sorted(self.removed.items()):
            function.override, function.driver = None, None
            self.functions[address] = function
            sysfs.show(self.tree, function, self.group_type)
            self.probe(function)
        self.removed.clear()
        self.functions = dict(sorted(self.functions.items()))
        return OK

    # ---------------------------------------------------------- driver model

    def probe(self, function: Function) -> None:
        """Let the first driver that matches take a function that has none."""
        if function.driver is None:
            name = next((n for n in self.drivers if self._matches(n, function)), None)
            if name:
                self._attach(name, function)

    async def detach(self, function: Function) -> None:
        """Unbind a function, waiting for the last holder of its node, as the real drivers do."""
        async with self._lock(function):
            if function.driver is None:
                return
            driver = self.drivers[function.driver]
            if self._stuck(function):
                function.unbinding = True
                sysfs.block_reads(self.tree, function)
                await self.changed.until(lambda: self._forgotten(function) or not self._stuck(function))
                if self._forgotten(function):
                    return
                function.unbinding = False
                sysfs.unblock_reads(self.tree, function)
            driver.detach(function)
            sysfs.show_driver(self.tree, function, bound_to=None)
            function.driver = None
            self.log.add(EventKind.UNBIND, function.address, driver=driver.name)

    def group(self, number: int) -> list[Function]:
        """The members of an IOMMU group, bridges aside."""
        return [f for f in self.functions.values() if f.group == number and not f.is_bridge]

    def wedged(self) -> bool:
        """Whether an unbind of a GPU hangs, which makes nvidia-smi wait too."""
        return any(f.unbinding and f.driver == "nvidia" for f in self.functions.values())

    def nvidia_gpus(self) -> list[Function]:
        """The GPUs on the nvidia driver, in the bus's order."""
        return [f for f in self.functions.values() if f.driver == "nvidia"]

    @property
    def nvidia(self) -> NvidiaDriver | None:
        """The nvidia driver, if it is loaded."""
        driver = self.drivers.get("nvidia")
        return driver if isinstance(driver, NvidiaDriver) else None

    def _stuck(self, function: Function) -> bool:
        node = self.drivers[function.driver].node(function) if function.driver else None
        return function.address in self.faults.hanging or bool(node and self.processes.holders(node))

    def _forgotten(self, function: Function) -> bool:
        """Whether the machine was booted anew since."""
        return self.functions.get(function.address) is not function

    def _matches(self, name: str, function: Function) -> bool:
        if function.override:
            return function.override == name
        dynamic = (function.ids.vendor, function.ids.device) in self.dynamic_ids[name]
        return function.ids.driver == name or dynamic

    def _attach(self, name: str, function: Function) -> bool:
        failing = self.faults.failing
        if not function.alive or (function.address in failing and failing[function.address] in (None, name)):
            return False
        self.drivers[name].attach(function)
        sysfs.show_driver(self.tree, function, bound_to=name)
        function.driver = name
        self.log.add(EventKind.BIND, function.address, driver=name)
        return True

    def _lock(self, function: Function) -> asyncio.Lock:
        return self._locks.setdefault(function.address, asyncio.Lock())

    def _released(self, node: str) -> None:
        for function in self.functions.values():
            if function.driver and self.drivers[function.driver].node(function) == node:
                self.log.add(EventKind.HOLDER_GONE, function.address, node=node)
