"""Kernel drivers as far as a binding shows: device nodes, minors, /proc entries, and what keeps an unbind waiting."""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.simulator.state import NvidiaState
    from testbed.simulator.sysfs import Function
    from testbed.simulator.tree import Tree

NVIDIA_MAJOR = 195
CONTROL, UVM = "/dev/nvidiactl", "/dev/nvidia-uvm"
CONTROL_NODES = (CONTROL, UVM, "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
CAPS_NODES = ("/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2")
GPUS = "proc/driver/nvidia/gpus"
FIXED_MINORS = {CONTROL: 255, "/dev/nvidia-modeset": 254, UVM: 0, "/dev/nvidia-uvm-tools": 1}
_NUMBERED = re.compile(r"/dev/nvidia(?:-caps/nvidia-cap)?(\d+)")


class Driver:
    """A driver that shows nothing beyond its links in sysfs."""

    def __init__(self, name: str, tree: Tree) -> None:
        self.name = name
        self.tree = tree
        self.bound: dict[str, Function] = {}

    def attach(self, function: Function) -> None:
        """Take the function."""
        self.bound[function.address] = function

    def detach(self, function: Function) -> None:
        """Give the function up."""
        del self.bound[function.address]

    def node(self, function: Function) -> str | None:
        """The device node whose holders keep an unbind waiting."""
        del function
        return None


class NvidiaDriver(Driver):
    """The nvidia driver: the lowest free minor in probe order, /dev/nvidiaN and /proc/driver/nvidia."""

    def __init__(self, tree: Tree, versions: NvidiaState) -> None:
        super().__init__("nvidia", tree)
        self.versions = versions
        tree.put(
            "proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
            f"{versions.version}  Release Build\nGCC version:  gcc version 14.2.0\n",
        )
        tree.put("sys/module/nvidia/version", f"{versions.version}\n")
        tree.path(GPUS).mkdir(parents=True, exist_ok=True)
        for node in CONTROL_NODES + CAPS_NODES:
            tree.put(node)

    def attach(self, function: Function) -> None:
        """Take the function and give it a minor."""
        super().attach(function)
        taken = {f.minor for f in self.bound.values()}
        function.minor = next(n for n in range(len(taken) + 1) if n not in taken)
        self.tree.put(f"/dev/nvidia{function.minor}")
        self.tree.put(f"{GPUS}/{function.address}/information", self._information(function))

    def detach(self, function: Function) -> None:
        """Give the function up; its minor is free again."""
        self.tree.drop(f"/dev/nvidia{function.minor}")
        self.tree.drop(f"{GPUS}/{function.address}")
        function.minor = None
        super().detach(function)

    def node(self, function: Function) -> str | None:
        """`/dev/nvidiaN` of the function."""
        return f"/dev/nvidia{function.minor}"

    def _information(self, function: Function) -> str:
        fields = {
            "Model": function.model.name,
            "IRQ": "418",
            "GPU UUID": gpu_uuid(function.address),
            "Video BIOS": "98.02.55.00.01",
            "Bus Type": "PCIe",
            "DMA Size": "52 bits",
            "DMA Mask": "0xfffffffffffff",
            "Bus Location": function.address,
            "Device Minor": str(function.minor),
            "GPU Firmware": self.versions.version,
            "GPU Excluded": "No",
        }
        return "".join(f"{name}: \t {value}\n" for name, value in fields.items())


class VfioDriver(Driver):
    """vfio-pci: /dev/vfio/GROUP while a function of the group is bound."""

    def __init__(self, tree: Tree) -> None:
        super().__init__("vfio-pci", tree)
        tree.put("/dev/vfio/vfio")

    def attach(self, function: Function) -> None:
        """Take the function; its group gets a node."""
        super().attach(function)
        self.tree.put(f"/dev/vfio/{function.group}")

    def detach(self, function: Function) -> None:
        """Give the function up; the group's node goes with the last one."""
        super().detach(function)
        if not any(f.group == function.group for f in self.bound.values()):
            self.tree.drop(f"/dev/vfio/{function.group}")

    def node(self, function: Function) -> str | None:
        """`/dev/vfio/GROUP` of the function."""
        return f"/dev/vfio/{function.group}"


def device_number(tree: Tree, node: str) -> tuple[int, int] | None:
    """Major and minor of one of nvidia's nodes: uvm and caps have whatever major this boot gave them."""
    numbered = _NUMBERED.fullmatch(node)
    minor = int(numbered[1]) if numbered else FIXED_MINORS.get(node)
    if minor is None:
        return None
    driver = next((name for name in ("nvidia-uvm", "nvidia-caps") if node.startswith(f"/dev/{name}")), "nvidia")
    rows = (line.split() for line in (tree.read("proc/devices") or "").splitlines())
    return next(((int(row[0]), minor) for row in rows if row[1:] == [driver]), None)


def make_driver(name: str, tree: Tree, versions: NvidiaState) -> Driver:
    """Load a driver's module."""
    if name == "nvidia":
        return NvidiaDriver(tree, versions)
    return VfioDriver(tree) if name == "vfio-pci" else Driver(name, tree)


def gpu_uuid(address: str) -> str:
    """The UUID of the GPU at an address, the same in every run."""
    return f"GPU-{uuid.UUID(bytes=hashlib.md5(address.encode(), usedforsecurity=False).digest())}"
