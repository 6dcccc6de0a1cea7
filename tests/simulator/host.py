"""What tests do on the simulated host, over SSH."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.simulator.fixtures import run
from testbed.simulator.janitor import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.simulator import Simulator

FIRST, NEXT = "0000:81:00.0", "0000:91:00.0"
NODE_0 = tuple(f"0000:{bus}:00.0" for bus in ("01", "11", "61", "71"))
NODE_1 = tuple(f"0000:{bus}:00.0" for bus in ("81", "91", "e1", "f1"))
DEVICES = "sys/bus/pci/devices"
DRIVERS = "sys/bus/pci/drivers"
UNIT = "sglang-qwen.service"
UNIT_FILE = "var/lib/lxc/129/rootfs/etc/systemd/system/sglang-qwen.service"

_WRITE = """
import errno, json, os, sys
answers = []
for path, text in json.load(sys.stdin):
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
        answers.append("ok")
    except OSError as error:
        answers.append(errno.errorcode[error.errno])
    finally:
        os.close(fd)
print(" ".join(answers))
"""


def write(simulator: Simulator, *writes: tuple[str, str]) -> list[str]:
    """Write kernel attributes one after the other; gives `ok` or the errno's name for each."""
    done = run(simulator, f"python3 -c '{_WRITE}'", json.dumps([(f"./{path}", text) for path, text in writes]))
    assert done.code == 0, done.stderr
    return done.stdout.split()


def driver_of(simulator: Simulator, address: str) -> str | None:
    """The driver that sysfs shows for a device."""
    link = simulator.root / DEVICES / address / "driver"
    return link.resolve().name if link.exists() else None


def free(simulator: Simulator) -> None:
    """Stop what holds GPUs on kpro6."""
    done = run(simulator, f"pct exec 129 -- systemctl stop {UNIT}; systemctl stop nvidia-persistenced")
    assert done.code == 0, done.stderr


def to_vfio(simulator: Simulator, *addresses: str) -> None:
    """Hand devices to vfio-pci, live and persisted."""
    commands = "; ".join(f"driverctl set-override {a} vfio-pci" for a in addresses)
    done = run(simulator, f"set -e; {commands}")
    assert done.code == 0, done.stderr


def output(simulator: Simulator, command: str) -> str:
    """What a command prints, which must succeed."""
    done = run(simulator, command)
    assert done.code == 0, done.stderr + done.stdout
    return done.stdout


def minors_inside(simulator: Simulator) -> list[str]:
    """The GPU nodes in container 129."""
    nodes = output(simulator, "pct exec 129 -- ls /dev").split()
    return sorted(n for n in nodes if n.removeprefix("nvidia").isdigit())


def marker_of(simulator: Simulator) -> bytes:
    """The value by which this simulator's real processes are known."""
    return run(simulator, f"echo ${VARIABLE}").stdout.strip().encode()


def marked(marker: bytes) -> Iterator[int]:
    """The PIDs of real processes that a simulator started."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (entry / "environ").read_bytes():
                yield int(entry.name)
        except OSError:
            continue


def command_line(pid: int) -> bytes:
    """A real process's command line, empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
