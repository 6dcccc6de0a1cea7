"""Containers by pct, and what pct and qm refuse alike."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import run, wait_until
from tests.simulator.host import (
    FIRST,
    UNIT,
    UNIT_FILE,
    free,
    minors_inside,
    output,
    to_vfio,
    write,
)

if TYPE_CHECKING:
    from testbed.simulator import Simulator

CONFIG = "etc/pve/lxc/129.conf"
STATE = "pct exec 129 -- systemctl is-active sglang-qwen"


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


def test_rules_of_the_first_cgroups_are_ignored(simulator: Simulator) -> None:
    """On a host with cgroup2 only, lxc.cgroup.devices.allow allows nothing and keeps nothing from starting."""
    path = simulator.root / CONFIG
    path.write_text(path.read_text().replace("lxc.cgroup2.devices.allow", "lxc.cgroup.devices.allow"))
    output(simulator, "pct reboot 129")
    assert output(simulator, "pct status 129") == "status: running\n"
    assert "No devices were found" in run(simulator, "pct exec 129 -- nvidia-smi -L").stdout


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


def test_container_stop_ends_its_processes_and_nodes(simulator: Simulator) -> None:
    """A stopped container has no init, no holder and no nodes; commands in it are refused."""
    assert output(simulator, "lxc-info -n 129 -p -H").strip().isdigit()
    output(simulator, "pct shutdown 129 --timeout 30")
    assert output(simulator, "lxc-info -n 129 -p -H") == ""
    assert run(simulator, "pct push 129 ./etc/hostname /tmp/x").stderr == "can only push files to a running CT\n"
    assert run(simulator, "pct exec 129 -- true").stderr == "Error: container '129' not running!\n"
    assert not list((simulator.root / "var/lib/lxc/129/rootfs/dev").iterdir())
    assert (simulator.root / UNIT_FILE).exists()
    assert run(simulator, "fuser ./dev/nvidia0").stdout.split() == [
        output(simulator, "systemctl show nvidia-persistenced -p MainPID --value").strip()
    ]


def test_bound_device_list_survives_a_failed_write(simulator: Simulator) -> None:
    """An attribute that the simulated kernel does not offer for writing is refused with EACCES."""
    assert write(simulator, (f"sys/bus/pci/devices/{FIRST}/vendor", "0x1234")) == ["EACCES"]
