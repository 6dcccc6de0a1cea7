"""Stand-in for `nvidia-smi`: the GPUs whose nodes can be opened here, on the host or in a container."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from .proxmox import unknown

GPUS = Path("/proc/driver/nvidia/gpus")
MEMORY_MIB, IDLE_MIB = 97887, 4
IDLE_W, BUSY_W = 30.0, 130.0
"""Power of an idle card, and of one that spins in NCCL at full utilisation without computing."""


@dataclass(frozen=True)
class Gpu:
    """One visible card."""

    address: str
    name: str
    uuid: str
    utilization: int

    def value(self, index: int, field: str) -> tuple[str, str]:
        """A queried field's value and unit."""
        domain, _, rest = self.address.upper().partition(":")
        values = {
            "index": (str(index), ""),
            "mig.mode.current": ("[N/A]", ""),
            "memory.total": (str(MEMORY_MIB), " MiB"),
            "memory.used": (str(IDLE_MIB), " MiB"),
            "name": (self.name, ""),
            "pci.bus_id": (f"0000{domain}:{rest}", ""),
            "power.draw": (f"{BUSY_W if self.utilization else IDLE_W:.2f}", " W"),
            "utilization.gpu": (str(self.utilization), " %"),
            "uuid": (self.uuid, ""),
        }
        return values[field] if field in values else unknown("nvidia-smi", [f"--query-gpu={field}"])


def main() -> None:
    """List the cards, or answer a query."""
    arguments = sys.argv[1:]
    if not Path("/proc/driver/nvidia/version").exists():
        sys.stdout.write(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n"
        )
        sys.exit(9)
    gpus = visible()
    match arguments:
        case [] | ["-L"]:
            lines = [f"GPU {index}: {gpu.name} (UUID: {gpu.uuid})" for index, gpu in enumerate(gpus)]
        case [query, how] if query.startswith("--query-gpu=") and how.startswith("--format=csv"):
            fields = query.partition("=")[2].split(",")
            bare = "nounits" in how
            answers = [[gpu.value(index, field) for field in fields] for index, gpu in enumerate(gpus)]
            lines = [", ".join(value + ("" if bare else unit) for value, unit in answer) for answer in answers]
            lines = lines if "noheader" in how else [", ".join(fields), *lines]
        case _:
            unknown("nvidia-smi", arguments)
    sys.stdout.write("\n".join(lines) + "\n" if lines else "No devices were found\n")


def visible() -> list[Gpu]:
    """The cards in the order of their addresses; one whose node is missing or forbidden here is not among them."""
    found = []
    for folder in sorted(GPUS.iterdir()):
        text = (folder / "information").read_text()
        told = dict(re.findall(r"^([^:]+):\s*(.*?)\s*$", text, re.MULTILINE))
        try:
            os.close(os.open(f"/dev/nvidia{told['Device Minor']}", os.O_RDWR))
        except OSError:
            continue
        found.append(Gpu(folder.name, told["Model"], told["GPU UUID"], int((folder / "load").read_text())))
    return found
