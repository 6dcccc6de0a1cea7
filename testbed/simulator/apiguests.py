"""Keeps the API's guests equal to the configuration files on the simulated host, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fakepve import FakeCt  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from testbed.simulator.machine import HostMachine

Known = tuple[dict[str, str], dict[str, str | None]]


class GuestFiles:
    """`pull` takes files into the API's model, `push` writes what the API changed since."""

    def __init__(self, pve: Any, machine: HostMachine) -> None:
        self._pve, self._machine = pve, machine
        self._known: dict[int, Known] = {}

    def pull(self) -> None:
        """Make the API's guests those of the files, with their state."""
        vms, node = self._machine.vms, self._machine.state.hostname
        ids = vms.ids()
        self._pve.vms[:] = [vm for vm in self._pve.vms if vm.vmid in ids]
        for vmid in ids:
            config = vms.config(vmid)
            vm = self._pve.vm(vmid) or self._pve.add_vm(vmid, config.get("name"), node=node)
            vm.config, vm.pending = dict(config.items()), dict(config.pending)
            vm.name = config.get("name")
            vm.status = vm.qmpstatus = "running" if vms.need(vmid).running else "stopped"
            self._known[vmid] = (dict(vm.config), dict(vm.pending))
        self._pve.cts[:] = [self._container(vmid) for vmid in self._machine.containers.all]

    def push(self) -> None:
        """Write the configuration files of the virtual machines that the API changed, made or removed."""
        vms = self._machine.vms
        present = {vm.vmid: vm for vm in self._pve.vms}
        for vmid in [v for v in self._known if v not in present]:
            del self._known[vmid]
            vms.remove(vmid)
        for vmid, vm in present.items():
            now: Known = ({k: str(v) for k, v in vm.config.items()}, dict(vm.pending))
            before = self._known.get(vmid)
            if now != before:
                config = vms.config(vmid)
                values = now[0]
                old = before[0] if before else {}
                config.change({k: v for k, v in values.items() if old.get(k) != v}, old.keys() - values.keys())
                config.pending = {k: v if v is None else str(v) for k, v in now[1].items()}
                self._machine.tree.save(f"{vms.folder}/{vmid}.conf", config.text())
                self._known[vmid] = now

    def _container(self, vmid: int) -> FakeCt:
        container = self._machine.containers.all[vmid]
        config = self._machine.containers.config(vmid)
        values: dict[str, object] = {k: v for k, v in config.items() if not k.startswith("lxc.")}
        raw = [[k, v] for k, v in config.items() if k.startswith("lxc.")]
        return FakeCt(
            vmid,
            node=self._machine.state.hostname,
            status="running" if container.running else "stopped",
            config=values | ({"lxc": raw} if raw else {}),
            defaults=False,
        )
