"""Containers and virtual machines, by pct and qm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import run, wait_until
from tests.simulator.host import (
    FIRST,
    NODE_0,
    NODE_1,
    UNIT,
    UNIT_FILE,
    driver_of,
    free,
    minors_inside,
    output,
    to_vfio,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.simulator import Simulator

CONFIG = "etc/pve/lxc/129.conf"
MAPPINGS = "etc/pve/mapping/pci.cfg"
STATE = "pct exec 129 -- systemctl is-active sglang-qwen"
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


def count(simulator: Simulator) -> int:
    """How often the service became ready."""
    return len(simulator.events(EventKind.SERVICE_READY))


def test_container_has_the_nodes_it_is_given(simulator: Simulator) -> None:
    """Mount entries bring nodes into the container, and nvidia-smi in it lists those it may open."""
    assert minors_inside(simulator) == [f"nvidia{n}" for n in range(8)]
    assert len(output(simulator, "pct exec 129 -- nvidia-smi -L").splitlines()) == 8


def test_missing_node_is_skipped_or_fatal_as_the_line_says(simulator: Simulator) -> None:
    """A node that is gone is skipped for an optional mount entry, and refuses the start for a dev[n] entry."""
    free(simulator)
    to_vfio(simulator, FIRST)
    output(simulator, "pct reboot 129")
    assert "nvidia4" not in minors_inside(simulator)
    output(simulator, "pct stop 129; pct set 129 --dev0 /dev/nvidia4,mode=0666")
    done = run(simulator, "pct start 129")
    assert done.code == 255
    assert "Device /dev/nvidia4 does not exist" in done.stderr
    assert output(simulator, "pct status 129") == "status: stopped\n"


def test_cgroup_rules_decide_what_nvidia_smi_sees(simulator: Simulator) -> None:
    """A node without a cgroup rule for its minor cannot be opened, though it is there."""
    path = simulator.root / CONFIG
    path.write_text(path.read_text().replace("devices.allow: c 195:* rwm", "devices.allow: c 195:0 rwm", 1))
    output(simulator, "pct reboot 129")
    assert len(minors_inside(simulator)) == 8
    assert run(simulator, "pct exec 129 -- nvidia-smi -L").stdout == "No devices were found\n"
    text = path.read_text().replace(
        "allow: c 195:0 rwm", "allow: c 195:0 rwm\nlxc.cgroup2.devices.allow: c 195:255 rwm", 1
    )
    path.write_text(text)
    output(simulator, "pct reboot 129")
    assert len(output(simulator, "pct exec 129 -- nvidia-smi -L").splitlines()) == 1


@pytest.mark.parametrize(
    ("rule", "cards", "serves"),
    [("a", 8, True), ("c *:* rwm", 8, True), ("c *:* m", 0, False), ("c 195:* rw", 8, False)],
)
def test_rules_are_the_kernels(simulator: Simulator, rule: str, cards: int, *, serves: bool) -> None:
    """Everything may be allowed at once; to make a node is not to open it; without uvm CUDA has no card."""
    path = simulator.root / CONFIG
    head, *rest = re.split(r"lxc\.cgroup2\.devices\.allow: .*\n", path.read_text())
    path.write_text("".join((head, f"lxc.cgroup2.devices.allow: {rule}\n", *rest)))
    before = len(simulator.events(EventKind.SERVICE_READY))
    output(simulator, "pct reboot 129")
    gpus = str(simulator.events(EventKind.CONTAINER_START)[-1].detail["gpus"])
    assert len(gpus.split(",") if gpus else []) == cards
    wait_until(lambda: run(simulator, STATE).stdout == "failed\n" or count(simulator) > before)
    assert (count(simulator) > before) is serves


def test_container_keeps_what_it_was_started_with(simulator: Simulator) -> None:
    """Later edits of its file neither give nor take a card before its next start."""
    path = simulator.root / CONFIG
    text = path.read_text()
    path.write_text(
        text.replace("c 195:* rwm", "c 195:255 rwm", 1).replace("/dev/nvidia7 dev/nvidia7", "/dev/none dev/none", 1)
    )
    assert len(output(simulator, "pct exec 129 -- nvidia-smi -L").splitlines()) == 8
    output(simulator, f"pct exec 129 -- systemctl restart {UNIT}")
    wait_until(lambda: count(simulator) == 2)
    output(simulator, "pct reboot 129")
    path.write_text(text)
    assert run(simulator, "pct exec 129 -- nvidia-smi -L").stdout == "No devices were found\n"


def test_pct_set_keeps_foreign_lines_and_sections(simulator: Simulator) -> None:
    """`pct set` on a stopped container changes its keys only: description, raw lines and snapshots stay."""
    before = (simulator.root / CONFIG).read_text()
    output(simulator, "pct stop 129; pct set 129 --dev0 /dev/nvidia0,mode=0666 --dev1 /dev/nvidia1")
    after = (simulator.root / CONFIG).read_text()
    added = ["dev0: /dev/nvidia0,mode=0666", "dev1: /dev/nvidia1"]
    assert [line for line in after.splitlines() if line not in added] == before.splitlines()
    assert "cores: 96\ndev0: /dev/nvidia0,mode=0666\ndev1: /dev/nvidia1\nfeatures" in after
    output(simulator, "pct set 129 -delete dev0,dev1")
    assert (simulator.root / CONFIG).read_text() == before


def test_changes_of_a_running_container_wait_for_its_start(simulator: Simulator) -> None:
    """Devices are not hot-plugged: `pct set` on a running container is pending, and its next start applies it."""
    output(simulator, "pct set 129 --dev0 /dev/nvidia0")
    assert "[pve:pending]\ndev0: /dev/nvidia0\n" in (simulator.root / CONFIG).read_text()
    assert "dev0" in output(simulator, "pct config 129")
    assert "dev0" not in output(simulator, "pct config 129 --current 1")
    output(simulator, "pct reboot 129")
    text = (simulator.root / CONFIG).read_text()
    assert "pve:pending" not in text
    assert "dev0: /dev/nvidia0\n" in text


def test_held_lock_makes_pct_wait_and_give_up(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pct set` under someone else's lock on the configuration fails and changes nothing."""
    monkeypatch.setattr("testbed.simulator.guests.TIMEOUT_S", 0.2)
    before = (simulator.root / CONFIG).read_text()
    script = (
        "import fcntl, subprocess; lock = open('./var/lock/lxc/pve-config-129.lock', 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print(subprocess.run(['pct', 'set', '129', '--dev0', '/dev/nvidia0'], stderr=subprocess.PIPE).stderr.decode())"
    )
    assert "got timeout" in output(simulator, f'python3 -c "{script}"')
    assert (simulator.root / CONFIG).read_text() == before


def test_files_go_in_and_out_of_a_container(simulator: Simulator) -> None:
    """`pct push`, `mv` inside and `pct pull` move a file; the new unit is an event."""
    script = (
        "set -e; printf '[Service]\\n' > ./tmp/unit; pct push 129 ./tmp/unit /etc/systemd/system/.new --perms 0644;"
        "pct exec 129 -- mv -f /etc/systemd/system/.new /etc/systemd/system/other.service;"
        "pct pull 129 /etc/systemd/system/other.service ./tmp/back; cat ./tmp/back"
    )
    assert output(simulator, script) == "[Service]\n"
    event = simulator.events(EventKind.UNIT_WRITE)[0]
    assert (event.subject, event.detail["container"]) == ("other.service", 129)


def test_paths_inside_are_the_containers(simulator: Simulator) -> None:
    """File tools in a container work on its files, and their messages name its paths."""
    assert output(simulator, "pct exec 129 -- cat /etc/hostname") == "sglang\n"
    done = run(simulator, "pct exec 129 -- cat /etc/none")
    assert (done.code, done.stderr) == (1, "cat: /etc/none: No such file or directory\n")
    pid = output(simulator, "pct exec 129 -- systemctl show sglang-qwen -p MainPID --value").strip()
    assert "sglang.launch_server" in output(simulator, f"pct exec 129 -- cat /proc/{pid}/cmdline")


def test_unknown_guests_and_arguments_are_refused(simulator: Simulator) -> None:
    """A VMID that does not exist is Proxmox's error; what the simulator cannot do exits 2 and says so."""
    done = run(simulator, "pct status 999; qm status 999")
    assert done.stderr.count("does not exist") == 2
    for command in ("pct clone 129 130", "qm migrate 200 other", "pct exec 129 -- sh -c true", "reboot", "lspci"):
        done = run(simulator, command)
        assert done.code == 2, command
        assert "simulator" in done.stderr


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
    assert "no free device left" in done.stderr
    assert output(simulator, "qm status 200") == "status: stopped\n"


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
        ("0000:81:00.0", "0000:42:00.0"): "no PCI device found for '0000:42:00.0'",
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


def test_container_stop_ends_its_processes_and_nodes(simulator: Simulator) -> None:
    """A stopped container has no init, no holder and no nodes; commands in it are refused."""
    assert output(simulator, "lxc-info -n 129 -p -H").strip().isdigit()
    output(simulator, "pct shutdown 129 --timeout 30")
    assert output(simulator, "lxc-info -n 129 -p -H") == ""
    assert run(simulator, "pct exec 129 -- true").stderr == "Error: container '129' not running!\n"
    assert not list((simulator.root / "var/lib/lxc/129/rootfs/dev").iterdir())
    assert (simulator.root / UNIT_FILE).exists()
    assert run(simulator, "fuser ./dev/nvidia0").stdout.split() == [
        output(simulator, "systemctl show nvidia-persistenced -p MainPID --value").strip()
    ]


def test_bound_device_list_survives_a_failed_write(simulator: Simulator) -> None:
    """An attribute that the simulated kernel does not offer for writing is refused with EACCES."""
    assert write(simulator, (f"sys/bus/pci/devices/{FIRST}/vendor", "0x1234")) == ["EACCES"]
