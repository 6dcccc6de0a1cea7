"""The digest by which tests show that nothing was touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.simulator.fixtures import run
from tests.simulator.host import DEVICES, FIRST, UNIT_FILE, free, output, write

if TYPE_CHECKING:
    from testbed.simulator import Simulator

READS = (
    "nvidia-smi -L; driverctl list-devices; pct list; qm list; pct config 129; qm config 200; pveversion;"
    "pct exec 129 -- systemctl show sglang-qwen; pct exec 129 -- cat /etc/hostname;"
    "systemctl status nvidia-persistenced;"
    "cat ./sys/bus/pci/devices/*/driver_override ./proc/*/cmdline; fuser ./dev/nvidia0; dmesg; lxc-info -n 129 -p;"
    "pct exec 129 -- journalctl -u sglang-qwen -n 5; nsenter --net=./proc/$(lxc-info -n 129 -p -H)/ns/net -- python3 -c"
    " 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:30000/server_info\").read()'"
)


def test_reading_changes_nothing(simulator: Simulator) -> None:
    """Every reading command leaves the digest as it was."""
    before = simulator.contents()
    assert run(simulator, READS).code == 0
    assert simulator.contents() == before


CHANGES = {
    "override": f"python3 -c \"import os; os.write(os.open('./{DEVICES}/{FIRST}/driver_override', 1), b'none')\"",
    "persisted": f"echo vfio-pci > ./etc/driverctl.d/pci-{FIRST}",
    "container configuration": "pct set 129 --dev0 /dev/nvidia0",
    "container state": "pct stop 129",
    "vm configuration": "qm set 200 --onboot 1",
    "vm state": "qm start 200",
    "unit text": f"echo '# x' >> ./{UNIT_FILE}",
    "unit restarted": "pct exec 129 -- systemctl restart sglang-qwen",
    "unit stopped": "systemctl stop nvidia-persistenced",
    "unit disabled": "pct exec 129 -- systemctl disable sglang-qwen",
    "mapping": "echo gpus > ./etc/pve/mapping/pci.cfg",
    "file mode": f"chmod 600 ./{UNIT_FILE}",
    "module": "modprobe vfio-pci",
    "stray file": "touch ./usr/local/sbin/left-behind",
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows(simulator: Simulator, change: str) -> None:
    """Each kind of change to the host changes the digest."""
    before = simulator.snapshot()
    output(simulator, CHANGES[change])
    assert simulator.snapshot() != before


def test_change_taken_back_gives_the_old_digest(simulator: Simulator) -> None:
    """A device that left and came home, and a file written anew with the same text, are no difference."""
    free(simulator)
    output(simulator, "modprobe vfio-pci")
    before = simulator.contents()
    drivers = "sys/bus/pci/drivers"
    override = f"{DEVICES}/{FIRST}/driver_override"
    write(simulator, (override, "vfio-pci"), (f"{drivers}/nvidia/unbind", FIRST), (f"{drivers}/vfio-pci/bind", FIRST))
    assert simulator.contents() != before
    write(simulator, (override, "\n"), (f"{drivers}/vfio-pci/unbind", FIRST), (f"{drivers}/nvidia/bind", FIRST))
    path = simulator.root / "etc/pve/lxc/129.conf"
    path.write_text(path.read_text())
    assert simulator.contents() == before


def test_own_files_do_not_count(simulator: Simulator) -> None:
    """Agent, ledger and lock are the program's own: listed apart, and not in the digest."""
    before = simulator.snapshot()
    output(
        simulator,
        "mkdir -p -m 700 ./var/lib/gpu-topology; echo x | tee ./var/lib/gpu-topology/ledger.json"
        " ./usr/local/lib/gpu-topology-agent.pyz ./run/lock/gpu-topology.lock",
    )
    assert simulator.snapshot() == before
    assert sorted(simulator.own_files()) == [
        "run/lock/gpu-topology.lock",
        "usr/local/lib/gpu-topology-agent.pyz",
        "var/lib/gpu-topology",
        "var/lib/gpu-topology/ledger.json",
    ]
