"""Faults on demand that are not covered with their subject."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncssh
import pytest

from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import connection, run, wait_until
from tests.simulator.host import DRIVERS, FIRST, driver_of, free, output

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.simulator import Simulator

_SAVE = """
import errno, os, sys
def said(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
def low():
    fd = os.open("./var/lib/new", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.write(fd, b"text")
    finally:
        os.close(fd)
def high():
    with open("./etc/new", "w") as file:
        file.write("text")
def other():
    with open("./usr/local/new", "w") as file:
        file.write("text")
print(said(low), said(high), said(other))
"""


def test_full_disk_fails_writes_by_every_hand(simulator: Simulator) -> None:
    """With a full disk, writes below /etc and /var give ENOSPC to python3, the host's commands and SFTP."""
    simulator.faults.disk_full()
    before = (simulator.root / "etc/pve/lxc/129.conf").read_text()
    assert output(simulator, f"python3 -c '{_SAVE}'") == "ENOSPC ENOSPC ok\n"
    for command in (
        "pct set 129 --dev0 /dev/nvidia0",
        "qm set 200 --onboot 1",
        "pct push 129 ./etc/hostname /etc/new",
        "pct exec 129 -- cp /etc/hostname /etc/new",
    ):
        done = run(simulator, command)
        assert done.code != 0, command
        assert "No space left on device" in done.stderr
    assert (simulator.root / "etc/pve/lxc/129.conf").read_text() == before

    async def upload() -> None:
        async with connection(simulator) as client, client.start_sftp_client() as sftp:
            file = await sftp.open("/var/lib/upload", "wb")
            await file.close()

    with pytest.raises(asyncssh.SFTPError):
        asyncio.run(upload())
    simulator.faults.clear()
    assert output(simulator, f"python3 -c '{_SAVE}'") == "ok ok ok\n"
    output(simulator, "pct set 129 --dev0 /dev/nvidia0")


def test_driverctl_cannot_persist_on_a_full_disk(simulator: Simulator) -> None:
    """With a full disk, driverctl binds the device but leaves no entry for the next boot, and says so."""
    free(simulator)
    simulator.faults.disk_full()
    assert run(simulator, f"driverctl set-override {FIRST} vfio-pci").code == 1
    assert driver_of(simulator, FIRST) == "vfio-pci"
    assert not list((simulator.root / "etc/driverctl.d").iterdir())


def test_foreign_process_holds_a_gpu(simulator: Simulator) -> None:
    """A process that nobody manages shows in /proc with its cgroup, and keeps an unbind waiting until it ends."""
    free(simulator)
    pid = simulator.faults.foreign_process(FIRST)
    folder = simulator.root / f"proc/{pid}"
    assert (folder / "cgroup").read_text() == "0::/user.slice/user-1000.slice/session-3.scope\n"
    assert "/dev/nvidia4" in [p.readlink().as_posix() for p in (folder / "fd").iterdir()]
    script = f"import os; os.write(os.open('./{DRIVERS}/nvidia/unbind', os.O_WRONLY), b'{FIRST}')"
    assert run(simulator, f'timeout 0.3 python3 -c "{script}" >/dev/null 2>&1').code == 124
    simulator.faults.end_process(pid)
    wait_until(lambda: driver_of(simulator, FIRST) is None)


def test_foreign_process_in_a_container(simulator: Simulator) -> None:
    """In a container it has the container's cgroup, and ends with the container."""
    pid = simulator.faults.foreign_process(FIRST, container=129)
    folder = simulator.root / f"proc/{pid}"
    assert (folder / "cgroup").read_text().startswith("0::/lxc/129/")
    assert "NSpid:\t" in (folder / "status").read_text()
    output(simulator, "pct stop 129")
    assert not folder.exists()


def test_foreign_process_on_a_vfio_group(simulate: Callable[[str], Simulator]) -> None:
    """It can hold a VFIO group too; a device without a node cannot be held."""
    host = simulate("kpro6-split")
    pid = host.faults.foreign_process(FIRST)
    assert str(pid) in output(host, "fuser ./dev/vfio/93").split()
    with pytest.raises(ValueError, match="has no device node"):
        host.faults.foreign_process("0000:00:01.0")


def test_bind_fails_by_one_driver_only(simulator: Simulator) -> None:
    """A probe that fails for vfio-pci leaves the way back to nvidia open."""
    free(simulator)
    simulator.faults.bind_fail(FIRST, "vfio-pci")
    assert run(simulator, f"driverctl set-override {FIRST} vfio-pci").code == 1
    assert driver_of(simulator, FIRST) is None
    output(simulator, f"driverctl unset-override {FIRST}")
    assert driver_of(simulator, FIRST) == "nvidia"


def test_cut_in_the_middle_of_a_rebind(simulator: Simulator) -> None:
    """A cut after an unbind leaves the device without driver: the script that wanted to go on got SIGHUP."""
    free(simulator)
    output(simulator, "modprobe vfio-pci")
    simulator.faults.ssh_cut(after=EventKind.UNBIND)
    script = (
        "import os, time\n"
        f"os.write(os.open('./{DRIVERS}/nvidia/unbind', os.O_WRONLY), b'{FIRST}')\n"
        "time.sleep(20)\n"
        f"os.write(os.open('./{DRIVERS}/nvidia/bind', os.O_WRONLY), b'{FIRST}')\n"
    )
    assert run(simulator, f'python3 -c "{script}"').code is None
    assert driver_of(simulator, FIRST) is None
