"""The boot unit on the simulated hypervisor: containers' GPU lines by the device numbers of this boot."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from host.agent.boot import boot
from host.agent.ledger import FILE
from host.agent.request import Request
from tests.agent.conftest import AGENT, until
from tests.agent.requests import CONTAINER_CONFIG, MANAGED, NODE_0, NODE_1, bind_request, container_request
from tests.agent.test_containers import passed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.conftest import Files, Hypervisor

pytestmark = pytest.mark.simulator

UNIT = "etc/systemd/system/gpu-topology-boot.service"
FIRST = {f"nvidia{minor}" for minor in range(4)}
LAST = {f"nvidia{minor}" for minor in range(4, 8)}


def test_register_installs_the_unit_and_uninstall_removes_it(kpro6: Hypervisor) -> None:
    """The unit is enabled with the agent, found as installed, installed again when it is gone, and removed last."""
    assert kpro6.facts()["host"]["agent_installed"] is False
    assert kpro6.done("register", {"managed": MANAGED})["changed"]
    assert kpro6.facts()["host"]["agent_installed"] is True
    for line in (
        "ConditionPathExists=/var/lib/gpu-topology/ledger.json",
        "After=nvidia-persistenced.service pve-cluster.service",
        "Before=pve-guests.service pve-ha-lrm.service",
    ):
        assert line in (kpro6.root / UNIT).read_text().splitlines()
    assert not kpro6.done("register", {"managed": MANAGED})["changed"]
    asyncio.run(kpro6.run("systemctl disable gpu-topology-boot.service"))
    assert kpro6.facts()["host"]["agent_installed"] is False
    kpro6.done("register", {"managed": MANAGED})
    assert kpro6.facts()["host"]["agent_installed"] is True
    assert f"/{UNIT}" in kpro6.done("uninstall")["removed"]
    assert kpro6.simulator.own_files() == []


def test_what_is_left_of_the_unit_is_removed(kpro6: Hypervisor) -> None:
    """Where somebody deleted the unit's file, its link among what systemd starts goes too."""
    kpro6.done("register", {"managed": MANAGED})
    (kpro6.root / UNIT).unlink()
    kpro6.done("uninstall")
    assert kpro6.simulator.own_files() == []


def test_a_unit_of_another_release_is_replaced(kpro6: Hypervisor) -> None:
    """What stands there is compared as text, and written again where it differs."""
    kpro6.done("register", {"managed": MANAGED})
    text = (kpro6.root / UNIT).read_text()
    (kpro6.root / UNIT).write_text(text.replace("TimeoutStopSec=10", "TimeoutStopSec=1"))
    assert kpro6.facts()["host"]["agent_installed"] is False
    kpro6.done("register", {"managed": MANAGED})
    assert (kpro6.root / UNIT).read_text() == text


@pytest.mark.parametrize("style", ["raw", "dev"])
def test_moved_minors_are_mended_before_the_container_starts(moving: Hypervisor, style: str) -> None:
    """The lines follow the cards' addresses to their new minors, in the style that they were written in."""
    moving.done("container", container_request(NODE_1[:3], style=style))
    moving.done("container", container_request(NODE_1, style=style))
    moving.simulator.reboot()
    assert moving.device(NODE_1[0])["minor"] == 0
    assert moving.done("boot")["changed"]
    assert passed(moving.config()) == FIRST
    assert ("dev0:" in moving.config()) is (style == "dev")
    assert [one["status"] for one in moving.facts()["containers"]] == ["stopped"]
    assert not moving.done("boot")["changed"]


def test_the_host_mends_them_by_itself(moving: Hypervisor) -> None:
    """The unit runs before guests start, so that the container comes up with its cards."""
    moving.done("register", {"managed": MANAGED})
    (moving.root / CONTAINER_CONFIG).write_text(moving.config().replace("onboot: 0", "onboot: 1"))
    moving.simulator.reboot()
    assert passed(moving.config()) == FIRST
    inside = asyncio.run(moving.run("pct exec 129 -- ls /dev")).stdout.split()
    assert set(inside) >= FIRST
    assert not LAST & set(inside)
    assert not moving.done("container", container_request(NODE_1))["changed"]


def test_a_card_that_is_missing_leaves_the_lines_alone(moving: Hypervisor) -> None:
    """Where a card did not come up and no line names another's, nothing is changed, and the unit fails visibly."""
    for address in NODE_1:
        moving.simulator.faults.bind_fail(address, "nvidia")
    moving.simulator.reboot()
    before = moving.config()
    answer = moving.agent("boot")
    assert answer.code == 3
    assert NODE_1[0] in answer["message"]
    assert moving.config() == before


def test_a_container_never_gets_anothers_card(kpro6: Hypervisor) -> None:
    """Where a card did not come up, and its minor is another pool's now, the container gets only its own."""
    kpro6.done("bind", bind_request("one", NODE_0, "nvidia", others=NODE_1))
    kpro6.done("container", container_request(NODE_0))
    assert passed(kpro6.config()) == FIRST
    (kpro6.root / CONTAINER_CONFIG).write_text(kpro6.config().replace("onboot: 1", "onboot: 0"))
    kpro6.simulator.faults.bind_fail(NODE_0[1], "nvidia")
    kpro6.simulator.reboot()
    assert kpro6.device(NODE_1[0])["minor"] == 3
    answer = kpro6.agent("boot")
    assert (answer.code, answer["outcome"]) == (5, "not-undone")
    assert NODE_0[1] in answer["message"]
    assert passed(kpro6.config()) == {"nvidia0", "nvidia1", "nvidia2"}


def test_a_running_container_is_left_alone(moving: Hypervisor) -> None:
    """Started by hand on a host that is up, the unit changes nothing under a container that runs."""
    before = moving.config()
    answer = moving.done("boot")
    assert not answer["changed"]
    assert "runs already" in answer["steps"][0]
    assert moving.config() == before


def test_a_released_container_is_no_longer_mended(moving: Hypervisor) -> None:
    """After its release the container is its owner's again."""
    moving.done("container-release", {"vmid": 129})
    moving.simulator.reboot()
    before = moving.config()
    assert not moving.done("boot")["changed"]
    assert moving.config() == before


def test_it_waits_for_the_clusters_quorum(moving: Hypervisor) -> None:
    """Without quorum /etc/pve is read-only, which Proxmox shows by the mode of /etc/pve/local; then it goes on."""
    moving.simulator.reboot()
    local = moving.root / "etc/pve/local"
    local.unlink()
    local.touch(mode=0o400)

    async def wait() -> int:
        running = asyncio.ensure_future(moving.run(f"python3 ./{AGENT} --root . --format text boot > ./tmp/told", "{}"))
        told = moving.root / "tmp/told"
        await until(lambda: told.exists() and "quorum" in told.read_text(), "it says what it waits for")
        assert passed(moving.config()) == LAST
        local.chmod(0o600)
        return (await running).code

    assert asyncio.run(wait()) == 0
    assert passed(moving.config()) == FIRST


def test_leftovers_of_proxmox_keep_nobody_from_being_safe(moving: Hypervisor) -> None:
    """A lock or a pending device is no reason to leave a container with another's card."""
    moving.simulator.reboot()
    path = moving.root / CONTAINER_CONFIG
    path.write_text(f"lock: backup\n{moving.config()}\n[pve:pending]\ndev9: /dev/dri/renderD128\n")
    answer = moving.agent("boot")
    assert (answer.code, answer["outcome"]) == (5, "not-undone")
    assert "pct pending 129" in answer["message"]
    assert passed(moving.config()) == FIRST
    assert moving.config().endswith("[pve:pending]\ndev9: /dev/dri/renderD128\n")


def test_a_container_whose_lines_were_taken_away_gets_none(moving: Hypervisor) -> None:
    """Another container may have its VMID by now: without any GPU line left it is none of ours."""
    moving.simulator.reboot()
    text = "arch: amd64\nhostname: mail\nrootfs: local:129/vm-129-disk-0.raw\n"
    (moving.root / CONTAINER_CONFIG).write_text(text)
    assert not moving.done("boot")["changed"]
    assert moving.config() == text


def test_a_host_without_pve_is_no_host_whose_containers_left(moving: Hypervisor) -> None:
    """Where Proxmox's file system is not mounted, nothing can be known of containers, and the unit fails."""
    moving.simulator.reboot()
    (moving.root / "etc/pve").rename(moving.root / "etc/pve.away")
    (moving.root / "etc/pve").mkdir()
    answer = moving.agent("boot")
    assert answer.code == 3
    assert "pve-cluster" in answer["message"]


def test_a_node_that_nobody_made_is_told_and_the_cards_are_right(moving: Hypervisor) -> None:
    """Without /dev/nvidia-uvm the container can't compute; it still gets its own cards and no other."""
    moving.simulator.reboot()
    (moving.root / "dev/nvidia-uvm").unlink()
    answer = moving.agent("boot")
    assert (answer.code, answer["outcome"]) == (5, "not-undone")
    assert "/dev/nvidia-uvm" in answer["message"]
    assert passed(moving.config()) == FIRST


def test_a_container_that_left_this_node_is_no_failure(moving: Hypervisor) -> None:
    """Destroyed or migrated by hand: there is nothing to mend, and no reason for a failed unit at every boot."""
    moving.simulator.reboot()
    (moving.root / CONTAINER_CONFIG).unlink()
    assert not moving.done("boot")["changed"]


def test_cards_that_leave_for_another_driver_go_before_nvidia_is_loaded(
    files: Files, commands: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for driverctl's cards, loads nvidia, and waits for the cards that driverctl gives to nvidia."""
    told: list[str] = []
    for address, driver in ((NODE_0[0], "vfio-pci"), (NODE_0[1], "nvidia"), (NODE_0[2], "none")):
        files.gpu(address)
        files.put(f"/etc/driverctl.d/pci-{address}", f"{driver}\n")
    loaded = files.folder / "loaded"
    commands("modprobe", f"echo $* > {loaded}")
    files.put("/etc/pve/local/pve")
    files.put(FILE, json.dumps({"version": "v1", "passed": {"129": {"devices": []}}}))

    def bind_next(_seconds: float) -> None:
        driver = "nvidia" if loaded.exists() else "vfio-pci"
        told.append(driver)
        files.link(f"/sys/bus/pci/devices/{NODE_0[driver == 'nvidia']}/driver", f"../drivers/{driver}")

    monkeypatch.setattr("host.agent.boot.time", SimpleNamespace(monotonic=time.monotonic, sleep=bind_next))
    assert boot(files.system, Request({}))["changed"] is False
    assert told == ["vfio-pci", "nvidia"]
    assert loaded.read_text() == "-a nvidia nvidia-uvm\n"


def test_a_broken_ledger_is_a_message(kpro6: Hypervisor) -> None:
    """A ledger that is no JSON is refused with the file's name, for the journal."""
    kpro6.done("register", {"managed": MANAGED})
    (kpro6.root / "var/lib/gpu-topology/ledger.json").write_text("{")
    answer = kpro6.agent("boot", None, "--format", "text")
    assert answer.code == 3
    assert "ledger.json" in answer.stderr
    assert "Traceback" not in answer.stderr
