"""After a real reboot: what stands by itself, what shows as drift, and what the next run repairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.checks import CONFIDENTIAL, CONTAINER, SERVING, UNIT, VM
from tests.lab.operations import Operations

if TYPE_CHECKING:
    from testbed.lab import Lab

pytestmark = pytest.mark.lab

VISIBLE = f"pct exec {CONTAINER} -- nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader"


def _visible(lab: Lab) -> list[str]:
    listed = lab.check(VISIBLE).splitlines()
    return [f"0000:{line.partition(':')[2].lower()}" for line in listed if ":" in line]


def _monotonic(lab: Lab, unit: str, name: str) -> int:
    return int(lab.check(f"systemctl show '{unit}' -P {name}TimestampMonotonic"))


def test_the_split_stands_after_a_reboot(halves: Lab) -> None:
    """Every card is on its driver before guests start, by no process of ours, and the service answers by itself."""
    halves.reboot()
    assert "gpu-topology" not in halves.check("ps -eo args")
    with Operations(halves) as operations:
        facts = operations.facts()
        drivers = {device["address"]: device["driver"] for device in facts["devices"]}
        assert drivers == {**dict.fromkeys(SERVING, "nvidia"), **dict.fromkeys(CONFIDENTIAL, "vfio-pci")}
        guests = _monotonic(halves, "pve-guests.service", "ExecMainStart")
        for address in CONFIDENTIAL:
            assert 0 < _monotonic(halves, f"driverctl@pci-{address}.service", "ActiveEnter") < guests
        assert _visible(halves) == list(SERVING)
        halves.wait_served()
        assert operations.serve(SERVING)["restarted"] is False
        assert next(vm for vm in facts["vms"] if vm["vmid"] == VM)["status"] == "stopped"
        assert operations.vm(CONFIDENTIAL)["changed"] is True
        assert halves.check(f"qm status {VM}") == "status: running"


def test_a_lost_override_shows_after_the_reboot_and_is_repaired(halves: Lab) -> None:
    """A card whose entry was deleted comes up on nvidia: facts say so, no container gets it, and bind mends it."""
    lost = CONFIDENTIAL[0]
    halves.check(f"rm /etc/driverctl.d/pci-{lost}")
    halves.reboot()
    with Operations(halves) as operations:
        card = operations.device(lost)
        assert (card["driver"], card["persisted"]) == ("nvidia", None)
        assert _visible(halves) == list(SERVING)
        operations.bind("confidential", CONFIDENTIAL, "vfio-pci", SERVING)
        card = operations.device(lost)
        assert (card["driver"], card["persisted"]) == ("vfio-pci", "vfio-pci")
    assert halves.check(f"pct exec {CONTAINER} -- systemctl is-active {UNIT}") == "active"


def test_moved_numbers_are_found_and_mended(lab: Lab) -> None:
    """Where a boot gives other minors and another uvm major, the container gets its cards again, by their addresses."""
    with Operations(lab) as operations:
        operations.bind("confidential", SERVING, "vfio-pci", CONFIDENTIAL)
        operations.bind("serving", CONFIDENTIAL, "nvidia", SERVING)
        assert operations.container(CONFIDENTIAL)["minors"] == [4, 5, 6, 7]
    # The driver comes late, with its daemon: driverctl has taken four cards away by then, and minors begin at 0.
    lab.check("rm /etc/modules-load.d/nvidia-uvm.conf; echo blacklist nvidia >> /etc/modprobe.d/lab.conf")
    lab.check("sed -i s/major=511/major=510/ /etc/modprobe.d/lab.conf")
    load = "[Service]\nExecStartPre=/sbin/modprobe -a nvidia nvidia-uvm\n"
    lab.write("/etc/systemd/system/nvidia-persistenced.service.d/late.conf", load)
    lab.reboot()
    with Operations(lab) as operations:
        cards = {device["address"]: device for device in operations.facts()["devices"]}
        assert [cards[address]["minor"] for address in CONFIDENTIAL] == [0, 1, 2, 3]
        assert operations.container(CONFIDENTIAL)["minors"] == [0, 1, 2, 3]
    assert _visible(lab) == list(CONFIDENTIAL)
    opened = lab.run(f"pct exec {CONTAINER} -- sh -c ': < /dev/nvidia-uvm'")
    assert opened.status == 0, opened.stderr
