"""PCI functions as sysfs and the NVIDIA driver's procfs show them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

from .result import BadRequestError, Json

if TYPE_CHECKING:
    from .root import Root

Address = NewType("Address", str)
"""A canonical PCI address: `0000:81:00.0`."""

_ADDRESS = re.compile(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}):([01][0-9a-f])\.([0-7])", re.IGNORECASE)
DEVICES = "/sys/bus/pci/devices"
DRIVERS = "/sys/bus/pci/drivers"
PERSISTED = "/etc/driverctl.d"
NVIDIA = "nvidia"
VFIO = "vfio-pci"
DISPLAY = "03"


def parse_address(text: str) -> Address:
    """The canonical form of `81:00.0` or `0000:81:00.0`."""
    match = _ADDRESS.fullmatch(text.strip())
    if not match:
        raise BadRequestError(f'{text!r} is not a PCI address: write it as "81:00.0" or "0000:81:00.0"')
    domain, bus, slot, function = match.groups()
    return Address(f"{domain or '0000'}:{bus}:{slot}.{function}".lower())


def slot_of(address: str) -> str:
    """The slot that a function is part of: `0000:81:00`."""
    return address.rpartition(".")[0]


@dataclass(frozen=True)
class Pci:
    """The PCI functions of one host."""

    root: Root

    def all(self) -> list[Address]:
        """Every function's address, in order."""
        return [Address(name) for name in self.root.names(DEVICES)]

    def exists(self, address: Address) -> bool:
        """Whether the kernel knows this function."""
        return self.root.at(f"{DEVICES}/{address}").exists()

    def attribute(self, address: Address, name: str) -> str | None:
        """An attribute that never blocks."""
        return self.root.word(f"{DEVICES}/{address}/{name}")

    def number(self, address: Address, name: str) -> int | None:
        """A numeric attribute that never blocks."""
        return self.root.number(f"{DEVICES}/{address}/{name}")

    def identity(self, address: Address, name: str) -> str:
        """An id attribute (vendor, device…) as four hex digits."""
        return (self.attribute(address, name) or "").removeprefix("0x")

    def device_class(self, address: Address) -> str:
        """Six hex digits: `030200` is a 3D controller."""
        return self.identity(address, "class")

    def is_display(self, address: Address) -> bool:
        """Whether the function is a display controller: a GPU, whoever made it."""
        return self.device_class(address).startswith(DISPLAY)

    def driver(self, address: Address) -> str | None:
        """The driver that it is bound to; reading a link never blocks."""
        return self.root.link_name(f"{DEVICES}/{address}/driver")

    def override(self, address: Address) -> str | None:
        """`driver_override`: blocks while a removal of the device hangs, so it is read apart."""
        text = self.attribute(address, "driver_override")
        return None if text in (None, "(null)") else text

    def persisted(self, address: Address) -> str | None:
        """The driver that driverctl binds it to at boot."""
        return self.root.word(f"{PERSISTED}/pci-{address}")

    def group(self, address: Address) -> int | None:
        """Its IOMMU group's number."""
        name = self.root.link_name(f"{DEVICES}/{address}/iommu_group")
        return int(name) if name and name.isdigit() else None

    def functions(self, address: Address) -> list[Address]:
        """All functions of its slot: a card's audio or USB function goes where its GPU goes."""
        slot = slot_of(address)
        return [other for other in self.all() if slot_of(other) == slot]

    def alive(self, address: Address) -> bool:
        """Whether it answers: a card that fell off the bus keeps its folder, but its configuration reads ffffffff."""
        try:
            with self.root.at(f"{DEVICES}/{address}/config").open("rb", buffering=0) as config:
                return config.read(4) not in (b"\xff\xff\xff\xff", b"")
        except OSError:
            return False

    def bars(self, address: Address) -> list[Json]:
        """Sizes in bytes of its memory regions (BAR 0 to 5)."""
        sizes: list[Json] = []
        for line in (self.root.text(f"{DEVICES}/{address}/resource") or "").splitlines()[:6]:
            start, end = (int(word, 16) for word in line.split()[:2])
            if end > start:
                sizes.append(end - start + 1)
        return sizes

    def minors(self) -> dict[Address, int]:
        """The minors of all that is bound to the NVIDIA driver."""
        bound = [address for address in self.all() if self.driver(address) == NVIDIA]
        return {address: minor for address in bound if (minor := self.minor(address)) is not None}

    def minor(self, address: Address) -> int | None:
        """The N of its /dev/nvidiaN, from the NVIDIA driver; it shifts when cards leave, so it is read each time."""
        text = self.root.text(f"/proc/driver/nvidia/gpus/{address}/information") or ""
        match = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        return int(match.group(1)) if match else None
