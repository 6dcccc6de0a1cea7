"""What writes to the kernel's attributes answer: one table, true of the simulator and of Linux."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from testbed.checks import CONFIDENTIAL, CONTAINER, UNIT
from tests.lab.hosts import check
from tests.lab.operations import Operations

if TYPE_CHECKING:
    from tests.lab.hosts import HostUnderTest

pytestmark = pytest.mark.lab

CARD, OTHER = CONFIDENTIAL[:2]
DEVICE, PCI = f"/sys/bus/pci/devices/{CARD}", "/sys/bus/pci"
READ = "read"
"""Instead of a value to write: read the attribute."""

# In order, on kpro6 as it was found with nothing on its cards: attribute, value, what the kernel answers.
CLAIMS = (
    (f"{DEVICE}/driver_override", READ, "(null)"),
    (f"{PCI}/drivers/nvidia/bind", CARD, "EBUSY"),
    (f"{PCI}/drivers/vfio-pci/bind", CARD, "ENODEV"),
    (f"{PCI}/drivers/vfio-pci/unbind", CARD, "ENODEV"),
    (f"{PCI}/drivers/nvidia/bind", "0000:42:00.0", "ENODEV"),
    (f"{PCI}/drivers_probe", "0000:42:00.0", "ENODEV"),
    (f"{PCI}/drivers_probe", CARD, "ok"),
    (f"{DEVICE}/driver_override", "vfio-pci\n", "ok"),
    (f"{DEVICE}/driver_override", READ, "vfio-pci"),
    (f"{DEVICE}/driver", READ, "nvidia"),
    (f"{PCI}/drivers/nvidia/unbind", CARD, "ok"),
    (f"{PCI}/drivers/nvidia/unbind", CARD, "ENODEV"),
    (f"{PCI}/drivers/nvidia/bind", CARD, "ENODEV"),
    (f"{DEVICE}/driver", READ, "none"),
    (f"{PCI}/drivers_probe", CARD, "ok"),
    (f"{DEVICE}/driver", READ, "vfio-pci"),
    (f"{DEVICE}/driver_override", "\n", "ok"),
    (f"{DEVICE}/driver_override", READ, "(null)"),
    (f"{PCI}/drivers/vfio-pci/unbind", CARD, "ok"),
    (f"{PCI}/drivers/vfio-pci/bind", CARD, "ENODEV"),
    (f"{DEVICE}/driver_override", "no-such-driver", "ok"),
    (f"{PCI}/drivers_probe", CARD, "ok"),
    (f"{DEVICE}/driver", READ, "none"),
    (f"{DEVICE}/driver_override", "\n", "ok"),
    (f"{PCI}/drivers/nvidia/bind", CARD, "ok"),
    (f"{DEVICE}/driver", READ, "nvidia"),
)
PROGRAM = """
import errno, json, os, sys

def answer(path, value):
    try:
        if value == "read":
            if path.endswith("/driver"):
                return os.path.basename(os.readlink(path)) if os.path.islink(path) else "none"
            return open(path).read().strip()
        fd = os.open(path, os.O_WRONLY)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"

print(json.dumps([answer(path, value) for path, value in CLAIMS]))
"""


def _answers(host: HostUnderTest, asked: list[tuple[str, str]]) -> list[str]:
    program = PROGRAM.replace("CLAIMS", repr([(host.path(path), value) for path, value in asked]))
    answers: list[str] = json.loads(check(host, "python3 -", stdin=program.encode()))
    return answers


def _free(host: HostUnderTest) -> None:
    check(host, f"pct exec {CONTAINER} -- systemctl stop {UNIT}")
    check(host, "systemctl stop nvidia-persistenced")
    check(host, "modprobe vfio-pci")


def test_the_kernel_answers_as_claimed(host: HostUnderTest) -> None:
    """Override, bind, unbind and probe answer with these errnos, and leave these drivers."""
    _free(host)
    answers = _answers(host, [(path, value) for path, value, _ in CLAIMS])
    wrong = [(*claim, answer) for claim, answer in zip(CLAIMS, answers, strict=True) if claim[2] != answer]
    assert not wrong


def test_ids_given_to_a_driver_take_what_is_free(host: HostUnderTest) -> None:
    """After new_id the card without driver is on vfio-pci, and one that has a driver keeps it."""
    _free(host)
    ids = check(host, f"cat {host.path(DEVICE)}/vendor {host.path(DEVICE)}/device").replace("0x", "").replace("\n", " ")
    asked = [
        (f"{PCI}/drivers/nvidia/unbind", CARD),
        (f"{PCI}/drivers/vfio-pci/new_id", ids),
        (f"{DEVICE}/driver", READ),
        (f"{PCI}/devices/{OTHER}/driver", READ),
        (f"{PCI}/drivers/vfio-pci/new_id", ids),
    ]
    assert _answers(host, asked) == ["ok", "ok", "vfio-pci", "nvidia", "EEXIST"]


def test_a_card_that_comes_back_takes_the_lowest_free_minor(host: HostUnderTest) -> None:
    """Two cards leave the driver; the one with the higher address comes back first, and gets the lower's minor."""
    _free(host)
    bind, unbind = f"{PCI}/drivers/nvidia/bind", f"{PCI}/drivers/nvidia/unbind"
    _answers(host, [(unbind, CARD), (unbind, OTHER), (bind, OTHER), (bind, CARD)])
    told = f"grep -h 'Device Minor' {host.path('/proc/driver/nvidia/gpus')}/{{CARD}}/information"
    minors = [check(host, told.replace("{CARD}", card)).split()[-1] for card in (CARD, OTHER)]
    assert minors == ["5", "4"]


def test_driverctl_unbinds_even_with_noprobe(host: HostUnderTest) -> None:
    """`--noprobe set-override` leaves a bound card without driver: the agent writes driverctl's file by itself."""
    _free(host)
    check(host, f"driverctl --noprobe set-override {CARD} vfio-pci")
    assert _answers(host, [(f"{DEVICE}/driver", READ)]) == ["none"]
    assert host.read(f"/etc/driverctl.d/pci-{CARD}") == "vfio-pci\n"


def test_a_unit_without_install_is_not_enabled_and_nobody_says_so(host: HostUnderTest) -> None:
    """`systemctl enable` succeeds and the unit stays static: who wants it at boot must give it an [Install] section."""
    host.write("/etc/systemd/system/plain.service", "[Service]\nExecStart=/usr/bin/nvidia-persistenced\n")
    check(host, "systemctl daemon-reload && systemctl enable plain.service")
    assert check(host, "systemctl is-enabled plain.service") == "static"


UNBIND = "import os; os.write(os.open('{unbind}', os.O_WRONLY), b'{card}')"


@pytest.mark.parametrize("apart", [False, True], ids=["with sshd's pipes", "apart from them"])
def test_a_command_is_open_while_its_child_hangs_with_its_pipes(host: HostUnderTest, apart: bool) -> None:
    """A child that hangs in the kernel survives SIGKILL, and what it holds of sshd's pipes keeps the channel open."""
    _free(host)
    with Operations(host) as operations:
        pid = host.hold(CARD, operations.device(CARD)["minor"])
    writer = f'python3 -c "{UNBIND.format(unbind=host.path(f"{PCI}/drivers/nvidia/unbind"), card=CARD)}"'
    elsewhere = "< /dev/null > /dev/null 2>&1" if apart else ""
    with ThreadPoolExecutor(1) as workers:
        command = workers.submit(host.run, f"{writer} {elsewhere} & echo $! > {host.path('/run/writer')}")
        while _reads(host, f"{DEVICE}/driver_override"):
            assert not command.done() or apart
        check(host, f"kill -KILL $(cat {host.path('/run/writer')})")
        assert not _reads(host, f"{DEVICE}/driver_override")
        assert command.done() is apart
        host.end(pid)
        assert command.result(60).status == 0


def _reads(host: HostUnderTest, path: str) -> bool:
    """Whether an attribute can be read within three seconds; reading waits while a removal hangs."""
    read = host.path("/run/read")
    command = f"rm -f {read}; (cat {host.path(path)} > {read} 2> /dev/null < /dev/null &) ; sleep 3; test -s {read}"
    return host.run(command).status == 0
