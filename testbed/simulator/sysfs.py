"""What a PCI function looks like in sysfs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.simulator.state import FunctionState, HostState, ModelState
    from testbed.simulator.tree import Tree

NO_OVERRIDE = "(null)\n"
BRIDGE = "06"
VGA = "0300"
CONFIG_SIZE = 256


@dataclass
class Function:
    """One PCI function and what the kernel knows of it right now."""

    address: str
    ids: FunctionState
    model: ModelState
    numa_node: int
    group: int
    alive: bool = True
    override: str | None = None
    driver: str | None = None
    unbinding: bool = False
    minor: int | None = None
    load: tuple[int, float, int] = field(default=(0, 15.0, 4))  # utilisation %, watts, MiB used

    @property
    def slot(self) -> str:
        """The address without the function."""
        return self.address.rsplit(".", 1)[0]

    @property
    def is_bridge(self) -> bool:
        """Whether it is a PCI bridge, which never counts for a group's viability."""
        return self.ids.pci_class.startswith(BRIDGE)

    @property
    def is_gpu(self) -> bool:
        """Whether the nvidia driver would take it."""
        return self.ids.driver == "nvidia"

    @property
    def home(self) -> str:
        """Its folder below the root, links resolved."""
        return f"sys/devices/pci{self.address[:4]}:{self.address[5:7]}/{self.address}"


def plug(state: HostState) -> dict[str, Function]:
    """List every function of every card, in the bus's order."""
    return {
        f"{slot}.{number}": Function(
            address=f"{slot}.{number}",
            ids=ids,
            model=state.models[card.model],
            numa_node=card.numa_node,
            group=card.iommu_group,
            alive=card.alive,
        )
        for slot, card in sorted(state.cards.items())
        for number, ids in enumerate(state.models[card.model].functions)
    }


def show(tree: Tree, function: Function, group_type: str) -> None:
    """Make the function's folder, its attributes, and its links from the bus and its IOMMU group."""
    home, ids, address = function.home, function.ids, function.address
    for name, value in _attributes(function).items():
        tree.put(f"{home}/{name}", value)
    tree.put(f"{home}/config", _config_space(function))
    tree.link_between(f"{home}/subsystem", "sys/bus/pci")
    tree.link_between(f"sys/bus/pci/devices/{address}", home)
    group = f"sys/kernel/iommu_groups/{function.group}"
    tree.put(f"{group}/type", f"{group_type}\n")
    tree.link_between(f"{group}/devices/{address}", home)
    tree.link_between(f"{home}/iommu_group", group)
    if ids.pci_class.startswith(VGA):
        tree.put(f"{home}/boot_vga", f"{int(ids.boot_vga)}\n")


def hide(tree: Tree, function: Function) -> None:
    """Take the function out of sysfs, as its removal from the bus does."""
    tree.drop(function.home)
    tree.drop(f"sys/bus/pci/devices/{function.address}")
    tree.drop(f"sys/kernel/iommu_groups/{function.group}/devices/{function.address}")


def show_override(tree: Tree, function: Function) -> None:
    """Write `driver_override` as the kernel would print it."""
    tree.put(f"{function.home}/driver_override", f"{function.override}\n" if function.override else NO_OVERRIDE)


def show_driver(tree: Tree, function: Function, *, bound_to: str | None) -> None:
    """Make or remove the links between the function and its driver."""
    if function.driver and function.driver != bound_to:
        tree.drop(f"sys/bus/pci/drivers/{function.driver}/{function.address}")
        tree.drop(f"{function.home}/driver")
    if bound_to:
        tree.link_between(f"sys/bus/pci/drivers/{bound_to}/{function.address}", function.home)
        tree.link_between(f"{function.home}/driver", f"sys/bus/pci/drivers/{bound_to}")


def block_reads(tree: Tree, function: Function) -> None:
    """Let readers of `driver_override` wait: the lab saw that the device's lock is held while an unbind blocks."""
    path = tree.path(f"{function.home}/driver_override")
    path.unlink()
    os.mkfifo(path, 0o644)


def unblock_reads(tree: Tree, function: Function) -> None:
    """Answer the waiting readers, and be a plain attribute again."""
    path = tree.path(f"{function.home}/driver_override")
    # Open both ways, since opening a FIFO for writing alone fails where nobody reads.
    fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(fifo, (f"{function.override}\n" if function.override else NO_OVERRIDE).encode())
        path.unlink()
        show_override(tree, function)
    finally:
        os.close(fifo)


def _attributes(function: Function) -> dict[str, str]:
    ids = function.ids
    modalias = (
        f"pci:v0000{ids.vendor.upper()}d0000{ids.device.upper()}sv0000{ids.subsystem_vendor.upper()}"
        f"sd0000{ids.subsystem_device.upper()}bc{ids.pci_class[:2]}sc{ids.pci_class[2:4]}i{ids.pci_class[4:]}"
    )
    attributes = {
        "vendor": f"0x{ids.vendor}",
        "device": f"0x{ids.device}",
        "subsystem_vendor": f"0x{ids.subsystem_vendor}",
        "subsystem_device": f"0x{ids.subsystem_device}",
        "class": f"0x{ids.pci_class}",
        "numa_node": str(function.numa_node),
        "driver_override": NO_OVERRIDE.strip(),
        "modalias": modalias,
        "resource": _resource(ids.bars),
        "enable": "1",
        "reset_method": "flr bus" if ids.function_level_reset else "bus",
        "uevent": f"PCI_CLASS={ids.pci_class}\nPCI_SLOT_NAME={function.address}\nMODALIAS={modalias}",
        "remove": "",
        "rescan": "",
        "reset": "",
    }
    if function.is_gpu:
        attributes |= {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16", "sriov_numvfs": "0"}
    return {name: f"{value}\n" for name, value in attributes.items()}


def _resource(bars: tuple[int, ...]) -> str:
    # Six BARs and the ROM; a 64-bit BAR takes two places, the second empty.
    start = 0x38000000000
    lines = []
    for size in bars:
        lines += [f"0x{start:016x} 0x{start + size - 1:016x} 0x000000000014220c", f"0x{0:016x} 0x{0:016x} 0x{0:016x}"]
        start += max(size, 1 << 28)
    empty = f"0x{0:016x} 0x{0:016x} 0x{0:016x}"
    return "\n".join((lines + [empty] * 7)[:7])


def _config_space(function: Function) -> bytes:
    if not function.alive:
        return b"\xff" * CONFIG_SIZE  # what a read returns once the card fell off the bus
    ids = function.ids
    words = [ids.vendor, ids.device]
    head = b"".join(int(w, 16).to_bytes(2, "little") for w in words) + b"\x07\x05\x10\x00\xa1"
    head += bytes.fromhex(ids.pci_class)[::-1]
    head = head.ljust(0x2C, b"\0") + b"".join(
        int(w, 16).to_bytes(2, "little") for w in (ids.subsystem_vendor, ids.subsystem_device)
    )
    return head.ljust(CONFIG_SIZE, b"\0")
