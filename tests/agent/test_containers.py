"""Containers on the simulated hypervisor: exactly a pool's GPUs, restarted only when they differ."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.agent.requests import CONTAINER_CONFIG, NODE_0, NODE_1, SERVICE, UNIT, bind_request, container_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.conftest import Hypervisor

pytestmark = pytest.mark.simulator

FOREIGN = re.compile(r"nvidia|c 195:|c 511:|c 236:")


@pytest.fixture
def split(kpro6: Hypervisor) -> Hypervisor:
    """Node 1's cards are on vfio-pci, and the container is not told yet."""
    kpro6.done("bind", bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0))
    return kpro6


def foreign_lines(config: str) -> list[str]:
    """Lines that are none of ours."""
    return [line for line in config.split("\n[", maxsplit=1)[0].splitlines() if not FOREIGN.search(line)]


def passed(config: str) -> set[str]:
    """GPU nodes of the main section."""
    return set(re.findall(r"/dev/(nvidia\d+)\b", config.split("\n[", maxsplit=1)[0]))


def test_a_container_that_passes_these_gpus_is_adopted(kpro6: Hypervisor) -> None:
    """Hand-written lines that pass exactly the wanted cards stay, and nothing is restarted."""
    before = kpro6.host_state()
    result = kpro6.done("container", container_request(NODE_0 + NODE_1, style="dev"))
    assert not result["changed"]
    assert kpro6.host_state() == before
    assert kpro6.ledger()["found"]["container:129"]["status"] == "running"


def test_the_wildcard_rule_counts_as_all_eight_cards(kpro6: Hypervisor) -> None:
    """While the driver has eight cards and four are wanted, a wildcard rule is not as wanted."""
    kpro6.done("container", container_request(NODE_0))
    assert "c 195:*" not in kpro6.config().split("\n[")[0]
    assert "lxc.cgroup2.devices.allow: c 195:3 rwm" in kpro6.config()


def test_raw_lines_shrink_to_the_pool(split: Hypervisor) -> None:
    """Only GPU lines change: foreign lines, the description and the snapshot are as they were."""
    before = split.config()
    result = split.done("container", container_request(NODE_0))
    after = split.config()
    assert result["changed"]
    assert result["minors"] == [0, 1, 2, 3]
    assert passed(after) == {"nvidia0", "nvidia1", "nvidia2", "nvidia3"}
    assert foreign_lines(after) == foreign_lines(before)
    assert after.split("\n[")[1] == before.split("\n[")[1]
    starts = split.simulator.events("container.start")  # type: ignore[arg-type]
    assert str(starts[-1].detail["gpus"]).split(",") == NODE_0


def test_a_second_run_changes_nothing(split: Hypervisor) -> None:
    """What was rewritten is as wanted afterwards."""
    split.done("container", container_request(NODE_0))
    before = split.host_state()
    assert not split.done("container", container_request(NODE_0))["changed"]
    assert split.host_state() == before


def test_the_old_unit_does_not_come_up_with_the_container(split: Hypervisor) -> None:
    """An enabled unit is disabled over the restart: its parallelism is for cards that are gone."""
    starts = split.kinds().count("service.start")
    split.done("container", container_request(NODE_0))
    assert split.kinds().count("service.start") == starts
    service = split.facts(services=[SERVICE])["services"][0]
    assert (service["enabled"], service["active"]) == (False, "inactive")


def test_a_unit_for_as_many_cards_as_before_comes_up_by_itself(kpro6: Hypervisor) -> None:
    """When only minors moved, nothing else will start the service again: it stays enabled over the restart."""
    place = kpro6.root / CONTAINER_CONFIG
    swapped = place.read_text().replace("/dev/nvidia7 dev/nvidia7", "/dev/nvidia9 dev/nvidia9", 1)
    place.write_text(swapped)
    assert kpro6.done("container", container_request(NODE_0 + NODE_1))["changed"]
    service = kpro6.facts(services=[SERVICE])["services"][0]
    assert (service["enabled"], service["active"]) == (True, "active")


def test_dev_style_goes_through_pct(split: Hypervisor) -> None:
    """Raw lines leave the file, and devN entries come, by address and not by the order of minors."""
    result = split.done("container", container_request(NODE_0[1:3], style="dev"))
    config = split.config().split("\n[")[0]
    assert result["minors"] == [1, 2]
    assert re.findall(r"^dev\d+: (\S+)$", config, re.MULTILINE) == [
        f"/dev/{name},mode=0666" for name in ("nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm")
    ]
    assert "lxc.mount.entry: /dev/nvidia" not in config
    assert "lxc.mount.entry: /dev/net/tun" in config
    assert not split.done("container", container_request(NODE_0[1:3], style="dev"))["changed"]


def test_minors_are_resolved_when_they_are_needed(kpro6: Hypervisor) -> None:
    """A card whose minor changed is passed by its new node."""
    kpro6.done("bind", bind_request("vm", NODE_0, "vfio-pci", others=NODE_1))
    kpro6.simulator.reboot()
    assert kpro6.device(NODE_1[0])["minor"] == 0
    kpro6.done("container", container_request(NODE_1))
    assert passed(kpro6.config()) == {"nvidia0", "nvidia1", "nvidia2", "nvidia3"}


def test_a_stopped_container_is_started(split: Hypervisor) -> None:
    """Right lines are not enough: the container runs at the end."""
    split.done("container", container_request(NODE_0))
    split.simulator.reboot()
    (split.root / CONTAINER_CONFIG).write_text(split.config().replace("onboot: 1", "onboot: 0"))
    split.simulator.reboot()
    assert [one["status"] for one in split.facts()["containers"]] == ["stopped"]
    assert split.done("container", container_request(NODE_0))["changed"]
    assert [one["status"] for one in split.facts()["containers"]] == ["running"]


def test_a_card_on_another_driver_is_refused(split: Hypervisor) -> None:
    """A container can only be given cards that nvidia has; nothing is changed before that is known."""
    before = split.host_state()
    answer = split.agent("container", container_request(NODE_0 + NODE_1[:1]))
    assert answer.code == 3
    assert f"{NODE_1[0]} is on vfio-pci" in answer["message"]
    assert split.host_state() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lock: backup\n", "locked by Proxmox (backup)"),
        ("[pve:pending]\ndev0: /dev/nvidia1\n", "pending device changes"),
    ],
)
def test_a_container_that_proxmox_is_changing_is_refused(split: Hypervisor, text: str, words: str) -> None:
    """A lock or pending changes are somebody else's work in progress."""
    place = split.root / CONTAINER_CONFIG
    config = place.read_text()
    place.write_text(text + config if text.startswith("lock") else config.replace("\n[", f"\n{text}\n[", 1))
    answer = split.agent("container", container_request(NODE_0))
    assert answer.code == 3
    assert words in answer["message"]


def test_a_container_that_does_not_exist_is_refused(kpro6: Hypervisor) -> None:
    """The message says how to find the right VMID."""
    answer = kpro6.agent("container", container_request(NODE_0, vmid=999))
    assert answer.code == 3
    assert "container 999 does not exist" in answer["message"]
    assert "pct list" in answer["message"]


def test_a_container_that_does_not_come_up_right_is_put_back(split: Hypervisor) -> None:
    """A node that something else passes is found out; the old lines come back, and the container runs on them."""
    place = split.root / CONTAINER_CONFIG
    hook = "lxc.mount.entry: /dev/nvidia-strange dev/nvidia7 none bind,optional,create=file\n"
    place.write_text(place.read_text().replace("\n\n[", f"\n{hook}\n[", 1))
    (split.root / "dev/nvidia-strange").touch()
    before = split.config()
    answer = split.agent("container", container_request(NODE_0))
    assert answer.code == 4, answer.stdout
    assert "something else passes or hides them" in answer["message"]
    assert split.config() == before
    assert [one["status"] for one in split.facts()["containers"]] == ["running"]
    assert split.facts(services=[SERVICE])["services"][0]["enabled"]


def test_release_gives_the_found_lines_back(split: Hypervisor) -> None:
    """The file is as it was found, byte for byte; a second release changes nothing."""
    before = split.config()
    split.done("container", container_request(NODE_0))
    assert split.done("container-release", {"vmid": 129})["changed"]
    assert split.config() == before
    assert "container:129" not in split.ledger()["found"]
    assert not split.done("container-release", {"vmid": 129})["changed"]


def test_a_released_container_is_restarted_when_its_cards_are_back(split: Hypervisor) -> None:
    """While some of its found cards are away it runs on; the last release restarts it, quietly, with all eight."""
    split.done("bind", bind_request("serving", NODE_0, "nvidia", others=NODE_1))
    split.done("container", container_request(NODE_0))
    stops = split.kinds().count("container.stop")
    split.done("unit-release", {**SERVICE})
    split.done("container-release", {"vmid": 129})
    assert split.kinds().count("container.stop") == stops
    split.done("release", {"pool": "serving", "managed": {}})
    assert split.kinds().count("container.stop") == stops
    services = split.kinds().count("service.start")
    split.done("release", {"pool": "confidential", "managed": {}})
    start = split.simulator.events("container.start")[-1]  # type: ignore[arg-type]
    assert str(start.detail["gpus"]).split(",") == NODE_0 + NODE_1
    started = [event.subject for event in split.simulator.events("service.start")]  # type: ignore[arg-type]
    assert UNIT not in started[services:]
    assert split.ledger()["pending"] == []


def test_release_does_not_give_a_card_back_that_another_container_has(start: Callable[..., Hypervisor]) -> None:
    """A GPU is never handed to two containers, whatever was found."""
    host = start("kpro6")
    host.done("container", container_request(NODE_0[:2]))
    other = host.root / "etc/pve/lxc/130.conf"
    other.write_text("arch: amd64\nhostname: other\nlxc.mount.entry: /dev/nvidia3 dev/nvidia3 none bind\n")
    host.done("container-release", {"vmid": 129})
    assert passed(host.config()) == {f"nvidia{n}" for n in (0, 1, 2, 4, 5, 6, 7)}
