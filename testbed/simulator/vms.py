"""Virtual machines: start with Proxmox's checks of PCI mappings, and the process that then holds the groups."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from testbed.simulator.events import EventKind
from testbed.simulator.guests import guest_lock
from testbed.simulator.processes import Process
from testbed.simulator.pveconf import (
    GuestConfig,
    GuestError,
    Mapping,
    check_entry,
    choose_devices,
    entries_on,
    first_function,
    parse_mappings,
    properties,
)

if TYPE_CHECKING:
    from testbed.simulator.kernel import Kernel
    from testbed.simulator.sysfs import Function
    from testbed.simulator.tree import Tree

MAPPINGS = "etc/pve/mapping/pci.cfg"
START_S = 0.05
_HOSTPCI = re.compile(r"^hostpci(\d+)$")


def check_device(name: str, entry: dict[str, str], functions: dict[str, Function]) -> None:
    """Compare a mapping's entry with the live hardware, field by field.

    Raises:
        GuestError: they differ.
    """
    function = functions.get(first_function(entry["path"]))
    check_entry(name, entry, None if function is None else _live(function))


def _live(function: Function) -> dict[str, str]:
    ids = function.ids
    return {
        "id": f"{ids.vendor}:{ids.device}",
        "iommugroup": str(function.group),
        "subsystem-id": f"{ids.subsystem_vendor}:{ids.subsystem_device}",
    }


@dataclass
class Vm:
    """A virtual machine; `devices` are the functions that its process holds."""

    vmid: int
    pid: int | None = None
    devices: tuple[str, ...] = ()

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.pid is not None


class Vms:
    """All virtual machines of the host."""

    def __init__(self, tree: Tree, kernel: Kernel, node: str) -> None:
        self.tree, self.kernel, self.node = tree, kernel, node
        self.folder = f"etc/pve/nodes/{node}/qemu-server"
        self._running: dict[int, Vm] = {}

    def ids(self) -> list[int]:
        """The VMIDs that have a configuration."""
        return sorted(int(p.stem) for p in self.tree.path(self.folder).glob("*.conf"))

    def need(self, vmid: int) -> Vm:
        """The virtual machine.

        Raises:
            GuestError: there is no such machine.
        """
        if self.tree.read(f"{self.folder}/{vmid}.conf") is None:
            raise GuestError(f"Configuration file 'nodes/{self.node}/qemu-server/{vmid}.conf' does not exist")
        return self._running.get(vmid) or Vm(vmid)

    def config(self, vmid: int) -> GuestConfig:
        """The machine's configuration as it is on disk now."""
        return GuestConfig.parse(self.tree.read(f"{self.folder}/{vmid}.conf") or "", "qemu")

    def mappings(self) -> dict[str, Mapping]:
        """The PCI mappings as they are on disk now."""
        return parse_mappings(self.tree.read(MAPPINGS) or "")

    async def set(self, vmid: int, values: dict[str, str], delete: set[str]) -> None:
        """Change keys of the configuration; a running machine takes them at its next start.

        Raises:
            GuestError: there is no such machine, or a mapping does not exist.
        """
        vm = self.need(vmid)
        for key, value in values.items():
            name = properties(value, "host").get("mapping")
            if _HOSTPCI.match(key) and name and name not in self.mappings():
                raise GuestError(f"400 Parameter verification failed.\n{key}: PCI mapping '{name}' does not exist")
        async with guest_lock(self.tree, f"qemu-server/lock-{vmid}.conf"):
            config = self.config(vmid)
            if vm.running:
                config.postpone(values, delete)
            else:
                config.change(values, delete)
            self.tree.save(f"{self.folder}/{vmid}.conf", config.text())

    async def start(self, vmid: int) -> None:
        """Start the machine with its devices.

        Raises:
            GuestError: it runs already, a mapping does not fit the live hardware, no device of a mapping is free, or
                a group is not viable.
        """
        if self.need(vmid).running:
            raise GuestError(f"VM {vmid} already running")
        async with guest_lock(self.tree, f"qemu-server/lock-{vmid}.conf"):
            config = self.config(vmid)
            if config.apply_pending():
                self.tree.save(f"{self.folder}/{vmid}.conf", config.text())
            chosen = self._choose(config)
            for function in chosen:
                await self._to_vfio(function)
            self._check_groups(chosen)
            await asyncio.sleep(START_S * self.kernel.faults.factor)
            groups = sorted({f.group for f in chosen})
            nodes = ("/dev/vfio/vfio", *(f"/dev/vfio/{g}" for g in groups)) if groups else ()
            argv = ["/usr/bin/kvm", "-id", str(vmid), "-name", f"{config.get('name')},debug-threads=on"]
            argv += [word for f in chosen for word in ("-device", f"vfio-pci,host={f.address}")]
            process = self.kernel.processes.spawn(
                Process(argv=tuple(argv), cgroup=f"/qemu.slice/{vmid}.scope", devices=nodes)
            )
            self._running[vmid] = Vm(vmid, process.pid, tuple(f.address for f in chosen))
            self.tree.put(f"run/qemu-server/{vmid}.pid", f"{process.pid}\n")
            self.kernel.log.add(EventKind.VM_START, vmid, devices=",".join(f.address for f in chosen))

    def stop(self, vmid: int) -> None:
        """Stop the machine; its devices stay on vfio-pci.

        Raises:
            GuestError: there is no such machine, or it does not run.
        """
        if not self.need(vmid).running:
            raise GuestError(f"VM {vmid} not running")
        self._halt(self._running.pop(vmid))

    def halt_all(self) -> None:
        """Stop every machine, as a power-off does."""
        while self._running:
            self._halt(self._running.popitem()[1])

    def _halt(self, vm: Vm) -> None:
        self.tree.drop(f"run/qemu-server/{vm.vmid}.pid")
        self.kernel.log.add(EventKind.VM_STOP, vm.vmid)
        self.kernel.processes.end(vm.pid or 0)

    def remove(self, vmid: int) -> None:
        """Delete a machine's configuration."""
        self.tree.drop(f"{self.folder}/{vmid}.conf")

    # --------------------------------------------------------------- devices

    def _choose(self, config: GuestConfig) -> list[Function]:
        """Pick the functions for every hostpci entry."""
        wanted = [
            (key, [[f.address for f in device] for device in self._alternatives(properties(value, "host"))])
            for key, value in config.items()
            if _HOSTPCI.match(key)
        ]
        users = {address: vm.vmid for vm in self._running.values() for address in vm.devices}
        return [self.kernel.functions[address] for address in choose_devices(wanted, users)]

    def _alternatives(self, options: dict[str, str]) -> list[list[Function]]:
        """The devices that an entry may take: all of its mapping on this node, compared with the mapping first."""
        name = options.get("mapping")
        if name is None:
            return [self._functions(options["host"])]
        entries = entries_on(self.mappings(), name, self.node)
        for entry in entries:
            check_device(name, entry, self.kernel.functions)
        return [self._functions(entry["path"]) for entry in entries]

    def _functions(self, path: str) -> list[Function]:
        full = path if path.count(":") == 2 else f"0000:{path}"
        found = [f for f in self.kernel.functions.values() if full in (f.address, f.slot)]
        if not found:
            raise GuestError(f"no PCI device found for '{path}'")
        return found

    async def _to_vfio(self, function: Function) -> None:
        """Bring a function to vfio-pci by its ids, as Proxmox does: identical free cards come along."""
        if function.driver == "vfio-pci":
            return
        self.kernel.load_module("vfio-pci")
        ids = f"{function.ids.vendor} {function.ids.device}"
        await self.kernel.write("bus/pci/drivers/vfio-pci/new_id", ids)
        if function.driver and function.driver != "vfio-pci":
            await self.kernel.write(f"bus/pci/drivers/{function.driver}/unbind", function.address)
        await self.kernel.write("bus/pci/drivers/vfio-pci/bind", function.address)
        if function.driver != "vfio-pci":
            raise GuestError(f"Cannot bind {function.address} to vfio")

    def _check_groups(self, chosen: list[Function]) -> None:
        for function in chosen:
            others = [f for f in self.kernel.group(function.group) if f.driver not in (None, "vfio-pci")]
            if others:
                raise GuestError(
                    f"kvm: -device vfio-pci,host={function.address}: vfio {function.address}: group {function.group} "
                    "is not viable\nPlease ensure all devices within the iommu_group are bound to their vfio bus "
                    f"driver.\nstart failed: QEMU exited with code 1 ({others[0].address} is on {others[0].driver})"
                )
