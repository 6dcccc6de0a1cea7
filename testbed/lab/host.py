"""The lab as its administrator sees it: what `testbed.checks` asks of a host, over SSH."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from testbed.checks import CONTAINER, UNIT, Host
from testbed.simulator.pveconf import parse_mappings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from testbed.lab.lab import Lab

DEVICES = "/sys/bus/pci/devices"
Mapped = tuple[str, str, str, int]


class LabHost(Host):
    """Looks over SSH where the simulated host's own looks into a folder."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def close(self) -> None:
        """Nothing to close: the connection is the lab's."""

    def shell(self, *command: str) -> str:
        """What a command prints, run in the root folder; its standard error instead where it fails."""
        done = self._lab.run(f"cd / && {shlex.join(command)}")
        return done.stdout if done.status == 0 else f"exit {done.status}: {done.stderr}"

    def driver(self, address: str) -> str | None:
        """The driver a device is bound to."""
        return self._link(address, "driver") or None

    def persisted(self, address: str) -> str | None:
        """The driver that driverctl's file gives the device at the next boot."""
        return self._lab.read(f"/etc/driverctl.d/pci-{address}").strip() or None

    def mapping(self, name: str) -> list[Mapped]:
        """A mapping's devices: path, id, subsystem id, IOMMU group, as /etc/pve/mapping/pci.cfg holds them."""
        mapping = parse_mappings(self._lab.read("/etc/pve/mapping/pci.cfg")).get(name)
        entries = mapping.entries if mapping else ()
        return sorted((e["path"], e["id"], e["subsystem-id"], int(e["iommugroup"])) for e in entries)

    def live(self, addresses: Iterable[str]) -> list[Mapped]:
        """The same of devices, from sysfs."""
        return sorted((one, self._ids(one), self._ids(one, "subsystem_"), int(self._group(one))) for one in addresses)

    def unit(self) -> str:
        """The unit file as deployed in the container."""
        return self._lab.read(f"/var/lib/lxc/{CONTAINER}/rootfs/etc/systemd/system/{UNIT}")

    def _link(self, address: str, name: str) -> str:
        return self._lab.run(f"basename $(readlink {DEVICES}/{address}/{name})").stdout.strip()

    def _group(self, address: str) -> str:
        return self._link(address, "iommu_group")

    def _ids(self, address: str, prefix: str = "") -> str:
        names = " ".join(f"{DEVICES}/{address}/{prefix}{name}" for name in ("vendor", "device"))
        return ":".join(word.removeprefix("0x") for word in self._lab.check(f"cat {names}").split())
