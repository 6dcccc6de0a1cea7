"""The hand-over by the agent's operations, in the program's order: on the simulator, and on a real kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from host.errors import OperationError
from testbed.checks import CONFIDENTIAL, CONTAINER, SERVING, UNIT, VM
from tests.lab.hosts import check
from tests.lab.operations import ALL, MANAGED, MAPPING, Operations, merge

if TYPE_CHECKING:
    from tests.lab.hosts import HostUnderTest

pytestmark = pytest.mark.lab

VISIBLE = f"pct exec {CONTAINER} -- nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader"


def visible(host: HostUnderTest) -> list[str]:
    """The addresses of the cards that nvidia-smi shows in the container."""
    listed = check(host, VISIBLE).splitlines()
    return [f"0000:{line.partition(':')[2].lower()}" for line in listed if ":" in line]


def test_the_split_gives_each_guest_exactly_its_cards(halves: HostUnderTest) -> None:
    """Four cards and a token for the container, four groups held by the VM's process, both halves of each binding."""
    with Operations(halves) as operations:
        cards = {device["address"]: device for device in operations.facts()["devices"]}
    now = {address: (cards[address]["driver"], cards[address]["persisted"]) for address in ALL}
    serving, confidential = ("nvidia", None), ("vfio-pci", "vfio-pci")
    assert now == {**dict.fromkeys(SERVING, serving), **dict.fromkeys(CONFIDENTIAL, confidential)}
    assert visible(halves) == list(SERVING)
    assert halves.seen.container_gpus() == ["nvidia0", "nvidia1", "nvidia2", "nvidia3"]
    assert halves.seen.token()
    assert halves.seen.server_info()["tp_size"] == len(SERVING)
    assert halves.seen.hostpci() == [MAPPING] * len(CONFIDENTIAL)
    pid = check(halves, f"cat {halves.path(f'/run/qemu-server/{VM}.pid')}")
    held = check(halves, f"ls -l {halves.path(f'/proc/{pid}/fd')}")
    assert all(f"/dev/vfio/{cards[address]['iommu_group']}" in held for address in CONFIDENTIAL)


def test_the_split_done_again_changes_nothing(halves: HostUnderTest) -> None:
    """Each operation finds all as it is wanted, and restarts nothing."""
    main = f"pct exec {CONTAINER} -- systemctl show {UNIT} -p MainPID"
    before = check(halves, main)
    with Operations(halves) as operations:
        answers = [
            operations.bind("confidential", CONFIDENTIAL, "vfio-pci", SERVING),
            operations.bind("serving", SERVING, "nvidia", CONFIDENTIAL),
            operations.container(SERVING),
            operations.unit(len(SERVING)),
            operations.serve(SERVING),
            operations.vm(CONFIDENTIAL),
        ]
    assert [answer["steps"] for answer in answers if answer["changed"]] == []
    assert check(halves, main) == before


def test_the_merge_gives_everything_back(halves: HostUnderTest) -> None:
    """The VM is stopped first, the container gets all eight cards, and the server answers with tp 8."""
    with Operations(halves) as operations:
        merge(operations)
        facts = operations.facts()
    drivers = {device["address"]: device["driver"] for device in facts["devices"]}
    assert {address: drivers[address] for address in ALL} == dict.fromkeys(ALL, "nvidia")
    assert visible(halves) == list(ALL)
    assert (halves.seen.vm_status(), halves.seen.hostpci()) == ("stopped", [])
    assert halves.seen.server_info()["tp_size"] == len(ALL)


def test_a_stranger_on_a_card_is_named_and_nothing_is_touched(host: HostUnderTest, operations: Operations) -> None:
    """A process that nobody manages keeps its card: the drain is refused before it stops anything."""
    held = CONFIDENTIAL[2]
    pid = host.hold(held, operations.device(held)["minor"])
    with pytest.raises(OperationError) as raised:
        operations.call("drain", pool="confidential", devices=[*CONFIDENTIAL], driver="vfio-pci", managed=MANAGED)
    assert raised.value.outcome == "refused"
    assert f"PID {pid}" in str(raised.value)
    assert held in str(raised.value)
    assert host.seen.unit_active() == "active"
    assert check(host, "systemctl is-active nvidia-persistenced") == "active"


def test_a_hanging_service_is_diagnosed_and_undone(host: HostUnderTest, operations: Operations) -> None:
    """With P2P on under a translated IOMMU no token comes: the cause is named, and the old unit serves again."""
    text = operations.unit_text()
    hanging = text.replace("NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE=0")
    operations.deploy(hanging)
    with pytest.raises(OperationError, match="NCCL") as raised:
        operations.serve(ALL, environment={}, deadline_s=15 * host.slowness, token_timeout_s=5)
    assert raised.value.outcome == "undone"
    assert operations.unit_text() == text
    assert operations.serve(ALL)["tp"] == len(ALL)


def test_a_leaked_usage_count_is_reported_and_frees_the_lock(host: HostUnderTest, operations: Operations) -> None:
    """An unbind that never returns ends as «not undone» within its limit, says why, and lets others work on."""
    check(host, f"pct exec {CONTAINER} -- systemctl stop {UNIT}")
    check(host, "systemctl stop nvidia-persistenced")
    host.leak(CONFIDENTIAL[-1])
    with pytest.raises(OperationError, match="reboot") as raised:
        operations.bind("confidential", CONFIDENTIAL, "vfio-pci", SERVING, unbind_timeout_s=5)
    assert raised.value.outcome == "not-undone"
    drivers = {card["address"]: card["driver"] for card in operations.facts(commands_limit_s=5)["devices"]}
    assert {drivers[address] for address in (*SERVING, *CONFIDENTIAL[:-1])} == {"nvidia"}
    assert check(host, f"ls {host.path('/etc/driverctl.d')}") == ""
    assert operations.bind("serving", SERVING, "nvidia", CONFIDENTIAL)["changed"] is False
