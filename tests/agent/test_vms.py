"""Virtual machines on the simulated hypervisor: their GPU entries, and nothing else of theirs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.agent.requests import NODE_0, NODE_1, bind_request, vm_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.conftest import Hypervisor

pytestmark = pytest.mark.simulator

VM_CONFIG = "etc/pve/qemu-server/200.conf"


@pytest.fixture
def split(kpro6: Hypervisor) -> Hypervisor:
    """Node 1's cards are on vfio-pci and in a mapping."""
    kpro6.done("bind", bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0))
    kpro6.map_pci("gpu-confidential", NODE_1)
    return kpro6


def entries(host: Hypervisor) -> dict[str, str]:
    """The VM's hostpci entries."""
    return dict(re.findall(r"^(hostpci\d+): (.*)$", (host.root / VM_CONFIG).read_text(), re.MULTILINE))


def running(host: Hypervisor) -> bool:
    """Whether the VM runs."""
    return [vm["status"] for vm in host.facts(vms=[200])["vms"]] == ["running"]


def test_a_vm_gets_one_entry_per_card_and_runs_with_them(split: Hypervisor) -> None:
    """Four entries of one mapping, and the VM's process holds all four groups."""
    result = split.done("vm", vm_request(NODE_1))
    assert result["changed"]
    assert entries(split) == {f"hostpci{n}": "mapping=gpu-confidential,pcie=1,rombar=0" for n in range(4)}
    start = split.simulator.events("vm.start")[-1]  # type: ignore[arg-type]
    assert str(start.detail["devices"]).split(",") == NODE_1
    assert split.ledger()["managed"]["vms"] == [200]


def test_a_second_run_changes_nothing(split: Hypervisor) -> None:
    """A VM that has its cards is not restarted."""
    split.done("vm", vm_request(NODE_1))
    before = split.host_state()
    assert not split.done("vm", vm_request(NODE_1))["changed"]
    assert split.host_state() == before


def test_a_vm_that_need_not_run_is_left_as_found(split: Hypervisor) -> None:
    """Without `start` a stopped VM stays stopped."""
    split.done("vm", vm_request(NODE_1, start=False))
    assert len(entries(split)) == 4
    assert not running(split)


def test_a_vm_that_a_drain_stopped_runs_again(split: Hypervisor) -> None:
    """Without `start` its power state is left alone: what ran before its cards moved runs afterwards."""
    split.done("vm", vm_request(NODE_1))
    assert split.done("drain", bind_request("confidential", NODE_1, "nvidia"))["drained"] == ["VM 200"]
    assert not running(split)
    split.done("vm", vm_request(NODE_1, start=False))
    assert running(split)
    assert {"kind": "vm", "vmid": 200} not in split.ledger()["drained"]


def test_foreign_entries_stay(split: Hypervisor) -> None:
    """A network card that somebody passes keeps its entry, and ours take the free ones."""
    place = split.root / VM_CONFIG
    place.write_text(place.read_text() + "hostpci1: 0000:00:01.0\n")
    split.done("vm", vm_request(NODE_1[:2], start=False, count=2))
    assert entries(split) == {
        "hostpci0": "mapping=gpu-confidential,pcie=1,rombar=0",
        "hostpci1": "0000:00:01.0",
        "hostpci2": "mapping=gpu-confidential,pcie=1,rombar=0",
    }
    split.done("vm-release", {"vmid": 200})
    assert entries(split) == {"hostpci1": "0000:00:01.0"}


def test_a_vm_with_fewer_cards_is_restarted_with_them(split: Hypervisor) -> None:
    """A running VM is shut down for a change, since its entries would only be pending."""
    split.done("vm", vm_request(NODE_1))
    split.map_pci("gpu-confidential", NODE_1[:2])
    split.done("vm", vm_request(NODE_1[:2]))
    assert sorted(entries(split)) == ["hostpci0", "hostpci1"]
    assert running(split)


def test_more_entries_than_proxmox_has_are_a_bad_request(split: Hypervisor) -> None:
    """Sixteen is Proxmox's limit, foreign entries included."""
    answer = split.agent("vm", vm_request(NODE_1, count=17))
    assert answer.code == 2
    assert "16" in answer["message"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"vmid": 999}, "VM 999 does not exist"),
        ({"mapping": "none"}, "mapping none does not exist"),
        ({"devices": [*NODE_1, NODE_0[0]]}, f"has no entry for {NODE_0[0]}"),
    ],
)
def test_what_does_not_fit_is_refused_untouched(split: Hypervisor, more: dict[str, object], words: str) -> None:
    """A missing VM, mapping or mapping entry is named, and nothing is changed."""
    before = split.host_state()
    answer = split.agent("vm", vm_request(NODE_1) | more)
    assert answer.code == 3
    assert words in answer["message"]
    assert split.host_state() == before


def test_cards_on_another_driver_are_refused(kpro6: Hypervisor) -> None:
    """Proxmox would take cards from nvidia by itself; the VM waits for its pool's binding instead."""
    kpro6.map_pci("gpu-confidential", NODE_1)
    before = kpro6.host_state()
    answer = kpro6.agent("vm", vm_request(NODE_1))
    assert answer.code == 3
    assert f"{NODE_1[0]}" in answer["message"]
    assert "is not on vfio-pci" in answer["message"]
    assert kpro6.host_state() == before


def test_a_vm_that_does_not_start_is_put_back(split: Hypervisor) -> None:
    """Its entries are as before when Proxmox refuses to start it."""
    mapping = split.root / "etc/pve/mapping/pci.cfg"
    mapping.write_text(re.sub(r"iommugroup=\d+", "iommugroup=1", mapping.read_text()))
    before = (split.root / VM_CONFIG).read_text()
    answer = split.agent("vm", vm_request(NODE_1))
    assert answer.code == 4
    assert (split.root / VM_CONFIG).read_text() == before
    assert not running(split)


def test_release_takes_our_entries_away(split: Hypervisor) -> None:
    """The VM is stopped, has no card any more, and stays stopped as it was found; a second release does nothing."""
    before = (split.root / VM_CONFIG).read_text()
    split.done("vm", vm_request(NODE_1))
    assert split.done("vm-release", {"vmid": 200})["changed"]
    assert (split.root / VM_CONFIG).read_text() == before
    assert not running(split)
    assert split.ledger()["managed"]["vms"] == []
    assert not split.done("vm-release", {"vmid": 200})["changed"]


def test_release_gives_found_entries_back(split: Hypervisor) -> None:
    """A GPU entry that was there before us comes back."""
    place = split.root / VM_CONFIG
    place.write_text(place.read_text() + "hostpci0: 0000:f1:00.0,pcie=1\n")
    split.done("vm", vm_request(NODE_1))
    split.done("vm-release", {"vmid": 200})
    assert entries(split) == {"hostpci0": "0000:f1:00.0,pcie=1"}


def test_release_knows_our_entries_when_their_mapping_is_gone(split: Hypervisor) -> None:
    """A mapping that somebody deleted leaves no entry of ours behind."""
    split.done("vm", vm_request(NODE_1, start=False))
    (split.root / "etc/pve/mapping/pci.cfg").write_text("")
    split.done("vm-release", {"vmid": 200})
    assert entries(split) == {}


def test_cards_of_one_iommu_group_are_held_together(start: Callable[[str], Hypervisor]) -> None:
    """Two cards behind one VFIO group node: the VM is seen with both, and is not restarted."""
    host = start("shared-group")
    host.done("bind", bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0))
    host.map_pci("gpu-confidential", NODE_1)
    host.done("vm", vm_request(NODE_1))
    assert not host.done("vm", vm_request(NODE_1))["changed"]
    assert running(host)


def test_release_gives_no_entry_back_whose_cards_serve_elsewhere(split: Hypervisor) -> None:
    """Found entries of cards that a container's pool has by now would let two guests hold them: they wait."""
    found = {f"hostpci{n}": "mapping=gpu-confidential,pcie=1" for n in range(4)}
    place = split.root / VM_CONFIG
    text = place.read_text()
    place.write_text(text + "".join(f"{key}: {value}\n" for key, value in found.items()))
    split.done("vm", vm_request(NODE_1))
    split.done("bind", bind_request("serving", NODE_0 + NODE_1, "nvidia"))
    split.done("vm-release", {"vmid": 200})
    assert entries(split) == {}
    split.done("bind", bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0))
    split.done("vm", vm_request(NODE_1))
    split.done("vm-release", {"vmid": 200})
    assert entries(split) == found


def test_an_entry_that_was_not_given_back_keeps_nothing_from_being_uninstalled(split: Hypervisor) -> None:
    """Once no device is ours there is no later release: what the VM was found with is told, and nothing is left."""
    place = split.root / VM_CONFIG
    place.write_text(place.read_text() + "hostpci0: mapping=gpu-confidential,pcie=1\n")
    split.done("vm", vm_request(NODE_1))
    split.done("bind", bind_request("serving", NODE_0 + NODE_1, "nvidia"))
    split.done("vm-release", {"vmid": 200})
    split.done("release", bind_request("serving", [], "nvidia"))
    told = split.done("uninstall")["not_given_back"]
    assert told["vm:200"]["hostpci"] == {"hostpci0": "mapping=gpu-confidential,pcie=1"}
    assert split.simulator.own_files() == []


def test_a_vm_takes_over_the_cards_of_one_that_is_left_out(split: Hypervisor) -> None:
    """A pool that moves to another VM: the first, released only later, is stopped, or the second could not start."""
    (split.root / "etc/pve/qemu-server/201.conf").write_text((split.root / VM_CONFIG).read_text())
    split.done("vm", vm_request(NODE_1))
    split.done("vm", vm_request(NODE_1, vmid=201))
    states = {vm["vmid"]: vm["status"] for vm in split.facts(vms=[200, 201])["vms"]}
    assert states == {200: "stopped", 201: "running"}
    assert not split.done("vm", vm_request(NODE_1, vmid=201))["changed"]
