"""The two hosts that the same tests run on: the simulator and the lab, with one surface."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from host.ssh import Connection, Finished
from host.target import Target
from testbed.checks import Host
from testbed.lab.host import LabHost

if TYPE_CHECKING:
    from testbed.lab import Lab
    from testbed.simulator import Simulator
    from testbed.stage import Machine

LATE = """\
[Service]
ExecStartPre=/bin/sh -c "for file in $$(grep -l vfio /etc/driverctl.d/*); do \
until [ -e /sys/bus/pci/devices/$${file##*/pci-}/driver ]; do sleep 0.1; done; done; modprobe -a nvidia nvidia-uvm"
"""
SERVED_S = 300.0
"""Seconds until the service is ready on an emulated machine beside much else."""
MOVED_MAJOR = 510
GPU = {"name": "QEMU's bochs-display, as a GPU", "pciId": "1234:1111", "memoryMib": 97887}


class HostUnderTest(Protocol):
    """A hypervisor as tests reach it; paths are absolute on the host."""

    @property
    def target(self) -> Target:
        """How the program reaches it."""

    @property
    def seen(self) -> Host:
        """The host as its administrator sees it."""

    def path(self, path: str) -> str:
        """A path as commands there must name it."""

    def run(self, command: str, *, stdin: bytes = b"") -> Finished:
        """Run a shell command."""

    def read(self, path: str) -> str:
        """A file's text."""

    def write(self, path: str, text: str) -> None:
        """Write a file."""

    def reboot(self) -> None:
        """Reboot, and wait until it has booted."""

    def hold(self, address: str, minor: int) -> int:
        """Start a process that nobody manages on a card; its PID."""

    def end(self, pid: int) -> None:
        """End that process."""

    def move_numbers(self) -> None:
        """Have the next boot give other minors, and nvidia-uvm another major."""

    def leak(self, address: str) -> None:
        """Let the card's usage count never fall to zero: an unbind never returns."""

    slowness: float
    """How many times longer than on a hypervisor things may take."""

    @property
    def machine(self) -> Machine:
        """How a workspace's stack reaches it."""

    def adjust(self, topology: dict[str, Any]) -> None:
        """Change what of kpro6's stack file is not so here."""


def check(host: HostUnderTest, command: str, *, stdin: bytes = b"") -> str:
    """Run a shell command that must succeed; its standard output without white space around it."""
    done = host.run(command, stdin=stdin)
    assert done.status == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()


def wait_served(host: HostUnderTest) -> None:
    """Wait until the container's server generates tokens."""
    deadline = time.monotonic() + SERVED_S
    while True:
        with suppress(ValueError):  # what stands in a token's place is no JSON
            host.seen.token()
            return
        assert time.monotonic() < deadline, "the container's server generates no token"
        time.sleep(0.5)


class OnLab:
    """The lab."""

    slowness = 3.0

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.seen: Host = LabHost(lab)
        self.read, self.write, self.run = lab.read, lab.write, lab.run
        self.reboot = lab.reboot

    @property
    def target(self) -> Target:
        """How the program reaches it."""
        return self.lab.target

    def path(self, path: str) -> str:
        """The path itself."""
        return path

    def hold(self, address: str, minor: int) -> int:
        """Start a process of a unit of its own, which has the card open when this returns."""
        del address
        program = f"import time; held = open('/dev/nvidia{minor}'); time.sleep(1000)"
        self.lab.check(f'systemd-run --quiet --unit=stranger python3 -c "{program}"')
        pid = int(self.lab.check("systemctl show -P MainPID stranger"))
        self.lab.check(f"until ls -l /proc/{pid}/fd | grep -q nvidia{minor}; do sleep 0.2; done")
        return pid

    def end(self, pid: int) -> None:
        """End that process."""
        self.lab.check(f"kill {pid}")

    def move_numbers(self) -> None:
        """Load the driver late, with its daemon: driverctl has taken its cards by then, and minors begin at 0."""
        self.lab.check("rm /etc/modules-load.d/nvidia-uvm.conf; echo blacklist nvidia >> /etc/modprobe.d/lab.conf")
        self.lab.check(f"sed -i s/major=511/major={MOVED_MAJOR}/ /etc/modprobe.d/lab.conf")
        self.lab.write("/etc/systemd/system/nvidia-persistenced.service.d/late.conf", LATE)

    def leak(self, address: str) -> None:
        """Have the stand-in for NVIDIA's driver keep one use of the card for ever."""
        self.lab.check(f"echo -n {address} > /sys/module/nvidia/parameters/leak")

    @property
    def machine(self) -> Machine:
        """How a workspace's stack reaches it."""
        return self.lab

    def adjust(self, topology: dict[str, Any]) -> None:
        """Root is /, the cards have QEMU's ids, and the processor has no SEV-SNP."""
        topology["host"]["root"] = "/"
        for pool in topology["pools"].values():
            pool["gpu"] = GPU
        for vm in topology["vms"].values():
            vm["sevSnp"] = False


class OnSimulator:
    """The simulator."""

    slowness = 1.0

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.seen = Host(simulator)
        self._connection: Connection | None = None
        self._uvm_major: int | None = None

    def close(self) -> None:
        """Close the connections."""
        self._disconnect()
        self.seen.close()

    @property
    def target(self) -> Target:
        """How the program reaches it."""
        return Target(
            address="127.0.0.1",
            port=self.simulator.ssh_port,
            user="root",
            host_key=self.simulator.host_key,
            root=".",
            private_key=self.simulator.identity_file.read_text(),
        )

    def path(self, path: str) -> str:
        """The path from the root folder, which is where commands start."""
        return f".{path}"

    def run(self, command: str, *, stdin: bytes = b"") -> Finished:
        """Run a shell command."""
        self._connection = self._connection or Connection(self.target)
        return self._connection.run(command, stdin, timeout_s=SERVED_S, on_line=lambda _line: None)

    def read(self, path: str) -> str:
        """A file's text."""
        return (self.simulator.root / path.lstrip("/")).read_text()

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        place = self.simulator.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def reboot(self) -> None:
        """Reboot, and wait until it has booted."""
        self._disconnect()
        self.simulator.reboot(uvm_major=self._uvm_major)

    def hold(self, address: str, minor: int) -> int:
        """Start a foreign process."""
        del minor
        return self.simulator.faults.foreign_process(address)

    def end(self, pid: int) -> None:
        """End that process."""
        self.simulator.faults.end_process(pid)

    def move_numbers(self) -> None:
        """Give uvm another major; minors begin at 0, since the simulator's driver always comes after overrides."""
        self._uvm_major = MOVED_MAJOR

    def leak(self, address: str) -> None:
        """Let no unbind of the card end."""
        self.simulator.faults.unbind_hang(address)

    @property
    def machine(self) -> Machine:
        """How a workspace's stack reaches it."""
        return self.simulator

    def adjust(self, topology: dict[str, Any]) -> None:
        """Nothing: the stack file is that of the simulated kpro6."""

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
