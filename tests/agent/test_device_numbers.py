"""What a container's lines are known to mean over boots that give other minors and majors."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

import pytest

from host.agent.device_numbers import found_lines
from host.agent.request import Request
from tests.agent.conftest import AGENT, until
from tests.agent.requests import CONTAINER_CONFIG, NODE_0, NODE_1, bind_request, container_request
from tests.agent.test_containers import passed

if TYPE_CHECKING:
    from tests.agent.conftest import Files, Hypervisor

pytestmark = pytest.mark.simulator

LAST = {f"nvidia{minor}" for minor in range(4, 8)}


def test_another_major_of_uvm_replaces_the_old_rule(moving: Hypervisor) -> None:
    """A dynamic major may be another driver's by now: its rule goes, and the new one stands in its place."""
    moving.simulator.reboot(uvm_major=509)
    moving.done("boot")
    assert "c 509:* rwm" in moving.config()
    assert "c 511:* rwm" not in moving.config()


def test_a_rule_for_each_boots_major(moving: Hypervisor) -> None:
    """Every boot's major replaces the one before, also one that only an earlier boot's mending had written."""
    for major in (509, 507):
        moving.simulator.reboot(uvm_major=major)
        moving.done("boot")
    assert re.findall(r"c (5\d\d):", moving.config()) == ["507"]


@pytest.mark.parametrize("numbers", [{"uvm_major": 509}, {"caps_major": 400}])
def test_a_rule_comes_back_with_its_number(moving: Hypervisor, numbers: dict[str, int]) -> None:
    """A rule is renumbered where it stands: once the first numbers are back, the lines are the first lines."""
    moving.simulator.reboot()
    moving.done("boot")
    first = moving.config()
    moving.simulator.reboot(**numbers)
    moving.done("boot")
    assert moving.config() != first
    moving.simulator.reboot()
    moving.done("boot")
    assert moving.config() == first


def test_lines_are_given_back_in_the_numbers_of_this_boot(moving: Hypervisor) -> None:
    """What was found named cards and drivers: the lines that a release gives back name the same ones."""
    moving.simulator.reboot(uvm_major=509)
    moving.done("boot")
    found = moving.ledger()["found"]["container:129"]["config"]
    moving.done("release", {"pool": "vm", "managed": {}})
    (moving.root / CONTAINER_CONFIG).write_text(moving.config().replace("onboot: 0", "onboot: 1"))
    moving.done("container-release", {"vmid": 129})
    assert moving.config() == found.replace("511:*", "509:*")


@pytest.mark.parametrize("gone", [False, True])
def test_found_lines_name_the_cards_that_they_named(files: Files, *, gone: bool) -> None:
    """By this boot's minors where all of them have one; else nobody knows what they come back with."""
    files.put("/proc/devices", "Character devices:\n195 nvidia\n511 nvidia-uvm\n")
    for address, minor in ((NODE_0[1], 0), (NODE_0[2], 1)):
        files.gpu(address, driver=None if gone and minor else "nvidia", minor=None if gone and minor else minor)
    text = "lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind\nlxc.mount.entry: /dev/nvidia2 dev/nvidia2 none bind\n"
    found = Request.of({"config": text, "minors": {str(minor): NODE_0[minor] for minor in range(4)}})
    minors = found_lines(files.system, found).minors
    assert minors == (frozenset({1, 2}) if gone else frozenset({0, 1}))


def test_what_a_container_is_to_get_is_noted_before_its_lines_are_written(kpro6: Hypervisor) -> None:
    """A power cut between the lines and the end of the operation leaves a boot that knows what was meant."""
    kpro6.done("bind", bind_request("vm", NODE_0, "vfio-pci", others=NODE_1))

    async def cut() -> None:
        agent = f"echo $$ > ./tmp/pid; exec python3 ./{AGENT} --root . container"
        running = asyncio.ensure_future(kpro6.run(agent, json.dumps(container_request(NODE_1))))
        await until(lambda: passed(kpro6.config()) == LAST, "the lines are written")
        await kpro6.run("kill -KILL $(cat ./tmp/pid)")
        await running

    asyncio.run(cut())
    noted = kpro6.ledger()["passed"]["129"]
    assert (noted["devices"], noted["style"]) == (NODE_1, "raw")
    assert noted["majors"]["nvidia-uvm"] == [511]
