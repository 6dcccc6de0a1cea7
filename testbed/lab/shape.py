"""The shapes that the lab's machine comes in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Iommu(StrEnum):
    """Whether devices' DMA is translated (groups of type DMA…) or passed through (identity), by kernel parameter."""

    TRANSLATED = "translated"
    PASSTHROUGH = "passthrough"


@dataclass(frozen=True)
class Slot:
    """A card's place: its bus, in hexadecimal as in its address, and its NUMA node."""

    bus: int
    numa_node: int

    @property
    def address(self) -> str:
        """The card's PCI address."""
        return f"0000:{self.bus:02x}:00.0"


SLOTS = (
    Slot(0x01, 0), Slot(0x11, 0), Slot(0x61, 0), Slot(0x71, 0),
    Slot(0x81, 1), Slot(0x91, 1), Slot(0xE1, 1), Slot(0xF1, 1),
)  # fmt: skip
"""Where kpro6 has its eight cards."""


@dataclass(frozen=True)
class Shape:
    """One machine: whether its cards have an audio function, as workstation cards do, and its IOMMU.

    With `reversed_minors` the kernel finds the host bridges behind the first from the last, so that /dev/nvidiaN runs
    against the addresses: a trap for whoever takes a minor for a position.
    """

    name: str
    audio: bool = False
    iommu: Iommu = Iommu.TRANSLATED
    reversed_minors: bool = False


SERVER = Shape("server")
WORKSTATION = Shape("workstation", audio=True, iommu=Iommu.PASSTHROUGH, reversed_minors=True)
SHAPES = {shape.name: shape for shape in (SERVER, WORKSTATION)}
