"""What the simulator claims of Linux, shown on Linux."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from host.errors import OperationError
from testbed.checks import CONFIDENTIAL, CONTAINER, SERVING, UNIT, VM
from testbed.simulator import load_state
from tests.lab.hosts import OnLab
from tests.lab.operations import ALL, Operations
from tests.lab.test_numbers import assert_right, give_the_upper_cards

if TYPE_CHECKING:
    from testbed.lab import Lab

pytestmark = pytest.mark.lab

LAST = CONFIDENTIAL[-1]
QUIET = f"pct exec {CONTAINER} -- systemctl stop {UNIT} && systemctl stop nvidia-persistenced"
UNBIND = f"echo {LAST} > /sys/bus/pci/drivers/nvidia/unbind"


def test_the_cards_are_where_kpro6_has_them(lab: Lab) -> None:
    """Addresses, NUMA nodes, a group for each card, translation, and minors in the order of addresses."""
    with Operations(OnLab(lab)) as operations:
        facts = operations.facts()
    expected = {f"{slot}.0": card.numa_node for slot, card in load_state("kpro6").cards.items() if f"{slot}.0" in ALL}
    cards = {device["address"]: device for device in facts["devices"]}
    assert {address: card["numa_node"] for address, card in cards.items()} == expected
    assert len({card["iommu_group"] for card in cards.values()}) == len(ALL)
    assert {card["iommu_type"] for card in cards.values()} <= {"DMA", "DMA-FQ"}
    assert [cards[address]["minor"] for address in ALL] == list(range(8))
    assert all(card["alive"] and card["driver"] == "nvidia" for card in cards.values())
    assert facts["numa_nodes"] == [0, 1]
    assert facts["errors"] == []


def test_an_unbind_in_use_waits_for_the_last_close(lab: Lab) -> None:
    """The writer sleeps in the kernel and survives SIGKILL; facts name the card and hide no other; close ends it."""
    lab.check(QUIET)
    lab.check("nohup sleep 1000 < /dev/nvidia7 > /dev/null 2>&1 & echo $! > /tmp/holder")
    lab.check(f"nohup sh -c 'echo $$ > /tmp/writer; {UNBIND}' > /dev/null 2>&1 &")
    state = "awk '/^State/{print $2}' /proc/$(cat /tmp/writer)/status"
    told = "dmesg | grep -q 'non-zero usage count'"
    lab.check(f"until {told} && [ $({state}) = D ]; do sleep 0.2; done")
    lab.check("kill -KILL $(cat /tmp/writer)")
    assert lab.check(state) == "D"
    with Operations(OnLab(lab)) as operations:
        facts = operations.facts()
    assert any(LAST in error for error in facts["errors"])
    assert {device["address"] for device in facts["devices"] if device["alive"]} == set(ALL) - {LAST}
    lab.check("kill $(cat /tmp/holder); while [ -e /proc/$(cat /tmp/writer) ]; do sleep 0.1; done")
    assert lab.run(f"readlink /sys/bus/pci/devices/{LAST}/driver").stdout == ""
    assert lab.run("test -e /dev/nvidia7").status == 1


def test_a_held_vfio_device_is_not_unbound(lab: Lab) -> None:
    """The VM's cards wait in an unbind until its process ends, as the nvidia driver's do."""
    address = CONFIDENTIAL[0]
    lab.check(QUIET)
    with Operations(OnLab(lab)) as operations:
        operations.bind("confidential", CONFIDENTIAL, "vfio-pci", SERVING)
        operations.map(CONFIDENTIAL)
        operations.vm(CONFIDENTIAL)
    unbind = f"echo {address} > /sys/bus/pci/drivers/vfio-pci/unbind"
    lab.check(f"nohup sh -c '{unbind}; touch /tmp/unbound' > /dev/null 2>&1 & sleep 2")
    assert lab.run("test -e /tmp/unbound").status == 1
    lab.check(f"qm stop {VM}")
    lab.check("while ! test -e /tmp/unbound; do sleep 0.1; done")
    assert lab.run(f"readlink /sys/bus/pci/devices/{address}/driver").stdout == ""


def test_an_override_keeps_a_card_from_anothers_new_id(lab: Lab) -> None:
    """Ids given to vfio-pci, as Proxmox gives them at a VM's start, take a free card unless an override holds it."""
    lab.check(f"{QUIET}; modprobe vfio-pci")
    free, held = CONFIDENTIAL[:2]
    devices = "/sys/bus/pci/devices"
    lab.check(f"echo nvidia > {devices}/{held}/driver_override")
    for address in (free, held):
        lab.check(f"echo {address} > {devices}/{address}/driver/unbind")
    lab.check("echo 1234 1111 > /sys/bus/pci/drivers/vfio-pci/new_id")
    assert lab.check(f"basename $(readlink {devices}/{free}/driver)") == "vfio-pci"
    assert lab.run(f"readlink {devices}/{held}/driver").stdout == ""
    lab.check(f"echo {held} > /sys/bus/pci/drivers_probe")
    assert lab.check(f"basename $(readlink {devices}/{held}/driver)") == "nvidia"


def test_a_card_that_a_driver_refuses_goes_back(lab: Lab) -> None:
    """A probe that fails undoes the whole handing back: every card is where it was, and says so at boot too."""
    lab.check(QUIET)
    with Operations(OnLab(lab)) as operations:
        operations.bind("confidential", CONFIDENTIAL, "vfio-pci", SERVING)
        lab.check(f"echo -n {LAST} > /sys/module/nvidia/parameters/refuse")
        with pytest.raises(OperationError) as raised:
            operations.bind("serving", ALL, "nvidia")
        assert raised.value.outcome == "undone"
        drivers = {device["address"]: device for device in operations.facts()["devices"]}
    for address in CONFIDENTIAL:
        now = drivers[address]
        assert (now["driver"], now["driver_override"], now["persisted"]) == ("vfio-pci",) * 3


def test_a_cgroup_keeps_a_container_from_anothers_card(lab: Lab) -> None:
    """A container may make a node of a card that it was not given, and still can't open it; dev[n] and raw alike."""
    with Operations(OnLab(lab)) as operations:
        for style in ("raw", "dev"):
            operations.container(SERVING, style)
            for minor, refused in ((3, False), (4, True)):
                node = f"/root/{style}{minor}"
                opened = lab.run(f"pct exec {CONTAINER} -- sh -c 'mknod {node} c 195 {minor} && : < {node}'")
                assert ("Operation not permitted" in opened.stderr) is refused, opened.stderr


def test_nothing_else_need_wait_for_udev(lab: Lab) -> None:
    """Where guests, driverctl and nvidia come up side by side, the boot unit waits for all and the lines are right."""
    host = OnLab(lab)
    give_the_upper_cards(host, "raw")
    lab.check("systemctl mask systemd-udev-settle.service")
    lab.reboot()
    assert_right(host, "raw")
