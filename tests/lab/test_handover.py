"""The hand-over on a real kernel, with real systemd, udev, driverctl and LXC, in the program's order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from host.errors import OperationError
from testbed.checks import CONFIDENTIAL, CONTAINER, SERVING, UNIT
from tests.lab.operations import ALL, MANAGED, Operations, merge

if TYPE_CHECKING:
    from testbed.lab import Lab

pytestmark = pytest.mark.lab

ASK = """
import json, urllib.request
body = json.dumps({"text": "?", "sampling_params": {"max_new_tokens": 1}}).encode()
print(json.load(urllib.request.urlopen("http://127.0.0.1:30000/generate", body, timeout=60))["text"])
"""


def _cards_in_container(lab: Lab) -> list[str]:
    listed = lab.check(f"pct exec {CONTAINER} -- nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader")
    return [f"0000:{line.partition(':')[2].lower()}" for line in listed.splitlines()]


def _nodes_in_container(lab: Lab) -> list[str]:
    return lab.check(f"pct exec {CONTAINER} -- sh -c 'ls -d /dev/nvidia[0-9]*'").split()


def _drivers(lab: Lab) -> dict[str, tuple[str, str | None]]:
    with Operations(lab) as operations:
        return {d["address"]: (d["driver"], d["persisted"]) for d in operations.facts()["devices"]}


HALVES = {
    **dict.fromkeys(SERVING, ("nvidia", None)),
    **dict.fromkeys(CONFIDENTIAL, ("vfio-pci", "vfio-pci")),
}


def test_the_split_gives_each_guest_exactly_its_cards(halves: Lab) -> None:
    """Four cards for the container, enforced by its cgroup, a token from them, and four groups held by the VM."""
    assert _drivers(halves) == HALVES
    assert _cards_in_container(halves) == list(SERVING)
    assert _nodes_in_container(halves) == [f"/dev/nvidia{minor}" for minor in range(4)]
    foreign = halves.run(f"pct exec {CONTAINER} -- sh -c 'mknod /tmp/card c 195 4 && (: < /tmp/card)'")
    assert "Operation not permitted" in foreign.stderr
    assert halves.check(f"pct exec {CONTAINER} -- python3 -c '{ASK}'")
    held = halves.check("ls -l /proc/$(cat /run/qemu-server/200.pid)/fd")
    groups = halves.check(
        f"for a in {' '.join(CONFIDENTIAL)}; do basename $(readlink /sys/bus/pci/devices/$a/iommu_group); done"
    ).split()
    assert all(f"/dev/vfio/{group}" in held for group in groups)


def test_the_split_done_again_changes_nothing(halves: Lab) -> None:
    """Each operation finds all as it is wanted, and restarts nothing."""
    started = halves.check(f"pct exec {CONTAINER} -- systemctl show {UNIT} -p ActiveEnterTimestamp")
    with Operations(halves) as operations:
        answers = [
            operations.bind("confidential", CONFIDENTIAL, "vfio-pci", SERVING),
            operations.bind("serving", SERVING, "nvidia", CONFIDENTIAL),
            operations.container(SERVING),
            operations.unit(len(SERVING)),
            operations.serve(SERVING),
            operations.vm(CONFIDENTIAL),
        ]
    assert not any(answer["changed"] for answer in answers)
    assert halves.check(f"pct exec {CONTAINER} -- systemctl show {UNIT} -p ActiveEnterTimestamp") == started


def test_the_merge_gives_everything_back(halves: Lab) -> None:
    """The VM is stopped first, the container gets all eight cards, and the server answers with tp 8."""
    with Operations(halves) as operations:
        merge(operations)
        facts = operations.facts()
    assert {d["address"]: d["driver"] for d in facts["devices"]} == dict.fromkeys(ALL, "nvidia")
    assert _cards_in_container(halves) == list(ALL)
    assert halves.check("qm status 200") == "status: stopped"
    assert "hostpci" not in halves.check("qm config 200")
    assert "--tp 8" in facts["services"][0]["text"]


def test_a_stranger_on_a_card_is_named_and_nothing_is_touched(lab: Lab, operations: Operations) -> None:
    """A process that nobody manages keeps its card: the drain is refused before it stops anything."""
    lab.check("cat > /root/train.py", stdin=b"import time\nheld = open('/dev/nvidia6')\ntime.sleep(1000)\n")
    lab.check("systemd-run --quiet --unit=training python3 /root/train.py")
    pid = lab.check("systemctl show -P MainPID training")
    lab.check(f"until ls -l /proc/{pid}/fd | grep -q nvidia6; do sleep 0.2; done")
    with pytest.raises(OperationError) as raised:
        operations.call("drain", pool="confidential", devices=[*CONFIDENTIAL], driver="vfio-pci", managed=MANAGED)
    assert raised.value.outcome == "refused"
    for said in (f"PID {pid}", "train.py", "training.service", "0000:e1:00.0"):
        assert said in str(raised.value)
    assert lab.check(f"pct exec {CONTAINER} -- systemctl is-active {UNIT}") == "active"
    assert lab.check("systemctl is-active nvidia-persistenced") == "active"
    assert lab.check("systemctl is-active training") == "active"
