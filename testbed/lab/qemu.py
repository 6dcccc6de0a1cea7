"""The QEMU machine that stands in for kpro6's hardware: its command line, and its monitor."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self

from testbed.engine.progress import SetupError
from testbed.lab.shape import SLOTS, Iommu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.lab.image import Image
    from testbed.lab.shape import Shape

MEMORY_MIB = 2048
START_LIMIT_S = 30.0
MONITOR_LIMIT_S = 300.0
"""Writing or reading a machine's memory takes a second or two, and minutes on a machine that does much else."""
KERNEL_PARAMETERS = (
    "console=ttyS0 quiet root=/dev/vda rw net.ifnames=0 intel_iommu=on apparmor=0 audit=0 mitigations=off nokaslr "
    "nowatchdog cryptomgr.notests raid=noautodetect random.trust_cpu=on tsc=reliable"
)


class Qemu:
    """One running machine; `folder` holds its disk layer, console log and monitor socket."""

    def __init__(self, image: Image, shape: Shape, folder: Path, ssh_port: int, snapshot: str = "") -> None:
        self._monitor = folder / "monitor"
        self._log = folder / "qemu.log"
        self.console = folder / "console.log"
        command = [*hardware(image, shape), *_parts(folder, ssh_port)]
        command += ["-loadvm", snapshot] if snapshot else []
        # The machine must not outlive a test run that was killed.
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._connect()

    def stop(self) -> None:
        """Switch the machine off."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process.poll() is None

    def save(self, name: str) -> None:
        """Keep the machine's whole state, disk and memory, in its disk layer."""
        self._human(f"savevm {name}")

    def load(self, name: str) -> None:
        """Go back to a kept state."""
        self._human(f"loadvm {name}")

    def _human(self, line: str) -> None:
        """Run one line of the human monitor, which answers nothing but complaints to what is asked of it here."""
        answer = self._call("human-monitor-command", {"command-line": line})
        if answer.strip():
            raise SetupError(f"QEMU's monitor answered {line!r} with: {answer.strip()}")

    def _connect(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        self._socket = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self._socket.connect(str(self._monitor))
                break
            except OSError as error:
                if not self.running or time.monotonic() > deadline:
                    self.stop()
                    raise SetupError(f"QEMU did not start: {self._log.read_text().strip()[-800:]}") from error
                time.sleep(0.05)
        self._socket.settimeout(MONITOR_LIMIT_S)
        self._lines = self._socket.makefile("r")
        self._call("qmp_capabilities", {})

    def _call(self, command: str, arguments: dict[str, str]) -> str:
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        for line in self._lines:
            answer: dict[str, Any] = json.loads(line)
            if "return" in answer:
                return str(answer["return"] or "")
            if "error" in answer:
                raise SetupError(f"QEMU's monitor refused {command}: {answer['error']['desc']}")
        raise SetupError(f"QEMU ended: {self._log.read_text().strip()[-800:]}")


def hardware(image: Image, shape: Shape) -> list[str]:
    """The command line as far as a snapshot depends on it: only with the same one can it be loaded."""
    return [*_machine(), *_boot(image, shape), *_bridges(shape), *_cards(shape)]


def _machine() -> Iterator[str]:
    # Emulated: /dev/kvm may be there and useless. intel-iommu is the one of QEMU's IOMMUs that can be snapshotted.
    yield from ("qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem")
    yield from ("-machine", "q35,kernel-irqchip=split,smm=off,hpet=off,vmport=off")
    yield from ("-device", "intel-iommu,intremap=on,caching-mode=on")
    yield from ("-nodefaults", "-no-user-config", "-display", "none", "-smp", "2", "-m", str(MEMORY_MIB))
    for node in range(2):
        yield from ("-object", f"memory-backend-ram,id=memory{node},size={MEMORY_MIB // 2}M")
        yield from ("-numa", f"node,nodeid={node},memdev=memory{node},cpus={node}")
    yield from ("-numa", "dist,src=0,dst=1,val=32")


def _boot(image: Image, shape: Shape) -> Iterator[str]:
    mode = "pt" if shape.iommu is Iommu.PASSTHROUGH else "nopt"
    yield from ("-kernel", str(image.kernel), "-initrd", str(image.initrd), "-acpitable", f"file={image.acpi_table}")
    yield from ("-append", f"{KERNEL_PARAMETERS} iommu={mode}")


def _parts(folder: Path, ssh_port: int) -> Iterator[str]:
    yield from ("-drive", f"if=none,id=disk,file={folder / 'disk.qcow2'},format=qcow2,cache=unsafe,discard=unmap")
    yield from ("-device", "virtio-blk-pci,bus=pcie.0,drive=disk,addr=3")
    yield from ("-netdev", f"user,id=net,ipv6=off,restrict=on,hostfwd=tcp:127.0.0.1:{ssh_port}-:22")
    yield from ("-device", "virtio-net-pci,bus=pcie.0,netdev=net,romfile=,addr=4")
    yield from ("-device", "virtio-rng-pci,bus=pcie.0,addr=5")
    yield from ("-serial", f"file:{folder / 'console.log'}", "-qmp", f"unix:{folder / 'monitor'},server=on,wait=off")


def _bridges(shape: Shape) -> Iterator[str]:
    """A host bridge for each card but the first, with the card's NUMA node; the kernel scans the last one first."""
    first, *others = SLOTS
    yield from ("-device", f"pcie-root-port,id=port{first.bus:02x},bus=pcie.0,addr=6,chassis=1,slot=1")
    order = others if shape.reversed_minors else reversed(others)
    for number, slot in enumerate(order, start=2):
        bridge, port = f"bridge{slot.bus:02x}", f"port{slot.bus:02x}"
        numbers = f"bus_nr={slot.bus - 1},numa_node={slot.numa_node}"
        yield from ("-device", f"pxb-pcie,id={bridge},bus=pcie.0,addr={number + 6:x},{numbers}")
        yield from ("-device", f"pcie-root-port,id={port},bus={bridge},addr=1,chassis={number},slot={number}")


def _cards(shape: Shape) -> Iterator[str]:
    several = ",multifunction=on" if shape.audio else ""
    for slot in SLOTS:
        yield from ("-device", f"bochs-display,bus=port{slot.bus:02x},addr=0.0,romfile={several}")
        if shape.audio:
            yield from ("-device", f"pvpanic-pci,bus=port{slot.bus:02x},addr=0.1")
