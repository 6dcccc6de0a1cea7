"""After a reboot: what stands by itself, what shows as drift, and what the next run repairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.checks import CONFIDENTIAL, SERVING, VM
from tests.lab.hosts import OnLab, check, wait_served
from tests.lab.operations import Operations
from tests.lab.test_handover import visible

if TYPE_CHECKING:
    from testbed.lab import Lab
    from tests.lab.hosts import HostUnderTest

pytestmark = pytest.mark.lab


def test_the_split_stands_after_a_reboot(halves: HostUnderTest) -> None:
    """Every card is on its driver by no process of ours, the service answers by itself, and the VM's stop shows."""
    halves.reboot()
    with Operations(halves) as operations:
        facts = operations.facts()
        drivers = {device["address"]: device["driver"] for device in facts["devices"]}
        assert {address: drivers[address] for address in SERVING} == dict.fromkeys(SERVING, "nvidia")
        assert {address: drivers[address] for address in CONFIDENTIAL} == dict.fromkeys(CONFIDENTIAL, "vfio-pci")
        assert visible(halves) == list(SERVING)
        wait_served(halves)
        assert operations.serve(SERVING)["restarted"] is False
        assert next(vm for vm in facts["vms"] if vm["vmid"] == VM)["status"] == "stopped"
        assert operations.vm(CONFIDENTIAL)["changed"] is True
    assert halves.seen.vm_status() == "running"
    if isinstance(halves, OnLab):
        _assert_done_by_the_boot(halves.lab)


def _assert_done_by_the_boot(lab: Lab) -> None:
    """By driverctl's units, before guests started; nothing of ours is installed on this host at all."""
    assert lab.run("test -e /usr/local/lib/gpu-topology-agent.pyz").status == 1
    guests = int(lab.check("systemctl show pve-guests.service -P ExecMainStartTimestampMonotonic"))
    for address in CONFIDENTIAL:
        unit = f"driverctl@pci-{address}.service"
        assert 0 < int(lab.check(f"systemctl show {unit} -P ActiveEnterTimestampMonotonic")) < guests


def test_a_lost_override_shows_after_the_reboot_and_is_repaired(halves: HostUnderTest) -> None:
    """A card whose entry was deleted comes up on nvidia: facts say so, no container gets it, and bind mends it."""
    lost = CONFIDENTIAL[0]
    check(halves, f"rm {halves.path(f'/etc/driverctl.d/pci-{lost}')}")
    halves.reboot()
    with Operations(halves) as operations:
        card = operations.device(lost)
        assert (card["driver"], card["persisted"]) == ("nvidia", None)
        assert visible(halves) == list(SERVING)
        operations.bind("confidential", CONFIDENTIAL, "vfio-pci", SERVING)
        card = operations.device(lost)
        assert (card["driver"], card["persisted"]) == ("vfio-pci", "vfio-pci")
    wait_served(halves)
