"""Virtual machines by qm, and the PCI mappings that they are started with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import run
from testbed.simulator.pveconf import GuestError, choose_devices
from tests.simulator.host import FIRST, NODE_0, NODE_1, driver_of, free, output, to_vfio

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.simulator import Simulator

MAPPINGS = "etc/pve/mapping/pci.cfg"
GROUPS = {"81": 93, "91": 82, "e1": 105, "f1": 66}


def map_devices(simulator: Simulator, *changes: tuple[str, str]) -> None:
    """Write a mapping of NUMA 1's four, with changes of its text."""
    rows = "".join(
        f"\tmap id=10de:2bb5,iommugroup={group},node=kpro6,path=0000:{bus}:00.0,subsystem-id=10de:204e\n"
        for bus, group in GROUPS.items()
    )
    text = f"gpu-confidential\n{rows}"
    for old, new in changes:
        text = text.replace(old, new)
    (simulator.root / MAPPINGS).write_text(text)


def give(simulator: Simulator, count: int) -> None:
    """Give VM 200 some devices of the mapping."""
    entries = " ".join(f"--hostpci{n} mapping=gpu-confidential,pcie=1" for n in range(count))
    output(simulator, f"qm set 200 {entries}")


def test_vm_gets_one_device_for_each_entry(simulator: Simulator) -> None:
    """Entries of one mapping are alternatives: every hostpci entry takes the first free device."""
    free(simulator)
    to_vfio(simulator, *NODE_1)
    map_devices(simulator)
    give(simulator, 2)
    output(simulator, "qm start 200")
    assert simulator.events(EventKind.VM_START)[0].detail["devices"] == f"{NODE_1[0]},{NODE_1[1]}"
    pid = output(simulator, "cat ./var/run/qemu-server/200.pid").strip()
    fds = {p.readlink().as_posix() for p in (simulator.root / "proc" / pid / "fd").iterdir()}
    assert {"/dev/vfio/93", "/dev/vfio/82"} <= fds
    assert "kvm\0-id\x00200\0" in (simulator.root / "proc" / pid / "cmdline").read_text()


def test_vm_with_more_entries_than_devices_does_not_start(simulator: Simulator) -> None:
    """A fifth entry of a mapping of four devices finds none free."""
    free(simulator)
    to_vfio(simulator, *NODE_1)
    map_devices(simulator)
    give(simulator, 5)
    done = run(simulator, "qm start 200")
    assert done.code == 255
    assert done.stderr == "could not find a free device for 'hostpci4'\n"
    assert output(simulator, "qm status 200") == "status: stopped\n"


def test_device_of_a_running_vm_is_not_chosen() -> None:
    """The next alternative is taken, and where there is only the one that another VM has, the start is refused."""
    assert choose_devices([("hostpci0", [["a", "b"], ["c"]]), ("hostpci1", [["d"]])], {"b": 200}) == ["c", "d"]
    with pytest.raises(GuestError, match="PCI device 'b' already in use by VMID '200'"):
        choose_devices([("hostpci0", [["a", "b"]])], {"b": 200})


def test_mapping_that_does_not_fit_the_hardware_stops_the_start(simulator: Simulator) -> None:
    """A wrong or missing IOMMU group, id or subsystem id, or a path without device, refuses the start by name."""
    free(simulator)
    to_vfio(simulator, *NODE_1)
    map_devices(simulator)
    give(simulator, 1)
    expectations = {
        ("iommugroup=93", "iommugroup=94"): "'iommugroup' does not match for 'gpu-confidential' (93 != 94)",
        ("iommugroup=93,", ""): "missing expected property 'iommugroup'",
        (",subsystem-id=10de:204e", ""): "missing expected property 'subsystem-id'",
        ("id=10de:2bb5", "id=10de:2bb1"): "'id' does not match",
        ("0000:81:00.0", "0000:42:00.0"): "pci device '0000:42:00.0' not found",
    }
    for change, message in expectations.items():
        map_devices(simulator, change)
        done = run(simulator, "qm start 200")
        assert message in done.stderr
        assert "hardware probably changed" in done.stderr


def test_vm_start_drives_free_devices_to_vfio(simulator: Simulator) -> None:
    """Without a binding beforehand, the start moves the device by its ids, and no other card that is in use."""
    free(simulator)
    map_devices(simulator)
    give(simulator, 1)
    output(simulator, "qm start 200")
    assert [driver_of(simulator, a) for a in (NODE_1[0], NODE_1[1], NODE_0[0])] == ["vfio-pci", "nvidia", "nvidia"]


def test_shared_group_must_be_whole(simulate: Callable[[str], Simulator]) -> None:
    """A group with a member on another driver is not viable; a bridge in it does not matter."""
    host = simulate("shared-group")
    free(host)
    to_vfio(host, NODE_1[0])
    map_devices(host, ("iommugroup=93", "iommugroup=82"))
    give(host, 1)
    assert "group 82 is not viable" in run(host, "qm start 200").stderr
    to_vfio(host, NODE_1[1])
    output(host, "qm start 200")


def test_unbind_from_vfio_waits_for_the_vm(simulate: Callable[[str], Simulator]) -> None:
    """A device that a running VM holds leaves vfio-pci when the VM stops, not before."""
    host = simulate("kpro6-split")
    unbind = f"import os; os.write(os.open('./sys/bus/pci/drivers/vfio-pci/unbind', os.O_WRONLY), b'{FIRST}')"
    assert run(host, f'timeout 0.5 python3 -c "{unbind}" >/dev/null 2>&1').code == 124
    assert driver_of(host, FIRST) == "vfio-pci"
    output(host, "qm shutdown 200 --timeout 10")
    assert driver_of(host, FIRST) is None
    kinds = [e.kind for e in host.events(EventKind.VM_STOP, EventKind.HOLDER_GONE, EventKind.UNBIND)]
    assert kinds == [EventKind.VM_STOP, *[EventKind.HOLDER_GONE] * 4, EventKind.UNBIND]


def test_hostpci_of_a_running_vm_is_pending(simulate: Callable[[str], Simulator]) -> None:
    """`qm set` on a running VM waits for its next start, and hostpci16 or an unknown mapping is refused."""
    host = simulate("kpro6-split")
    output(host, "qm set 200 -delete hostpci3")
    assert "[PENDING]\ndelete: hostpci3\n" in (host.root / "etc/pve/qemu-server/200.conf").read_text()
    output(host, "qm shutdown 200; qm start 200")
    assert "hostpci3" not in (host.root / "etc/pve/qemu-server/200.conf").read_text()
    assert run(host, "qm set 200 --hostpci16 mapping=gpu-confidential").code == 255
    assert "'none' does not exist" in run(host, "qm set 200 --hostpci5 mapping=none").stderr
