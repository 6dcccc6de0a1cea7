"""The way back on the simulated hypervisor: merges, releases, and cards that leave every pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.agent.requests import MANAGED, NODE_0, NODE_1, SERVICE, bind_request

if TYPE_CHECKING:
    from tests.agent.conftest import Hypervisor

pytestmark = pytest.mark.simulator

SPLIT = dict.fromkeys(NODE_0, "nvidia") | dict.fromkeys(NODE_1, "vfio-pci")
ALL_NVIDIA = dict.fromkeys(NODE_0 + NODE_1, "nvidia")


def to_vfio(**more: object) -> dict[str, object]:
    """The bind of the split."""
    return bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0, **more)


def test_the_merge_takes_cards_from_a_vm_that_the_configuration_no_longer_has(kpro6: Hypervisor) -> None:
    """The ledger remembers that the VM is ours, so the merge may stop it."""
    kpro6.give_to_vm()
    request = bind_request("serving", NODE_0 + NODE_1, "nvidia", managed={"services": [SERVICE], "vms": []})
    kpro6.done("drain", request)
    kpro6.done("bind", request)
    assert kpro6.drivers() == ALL_NVIDIA
    assert kpro6.simulator.events("vm.stop")  # type: ignore[arg-type]
    assert {entry["pool"] for entry in kpro6.ledger()["devices"].values()} == {"serving"}


def test_a_running_vm_that_is_not_ours_is_refused(kpro6: Hypervisor) -> None:
    """A VM that holds the cards and that nobody registered keeps them."""
    kpro6.give_to_vm()
    ledger = kpro6.root / "var/lib/gpu-topology/ledger.json"
    ledger.unlink()
    answer = kpro6.agent("drain", bind_request("serving", NODE_0 + NODE_1, "nvidia", managed={"services": [SERVICE]}))
    assert answer.code == 3
    assert "VM 200" in answer["message"]


def test_a_failed_merge_gives_the_cards_back_to_the_vm(kpro6: Hypervisor) -> None:
    """An undone merge ends with the VM running again on its cards."""
    kpro6.give_to_vm()
    request = bind_request("serving", NODE_0 + NODE_1, "nvidia")
    kpro6.done("drain", request)
    kpro6.simulator.faults.bind_fail(NODE_1[3], "nvidia")
    assert kpro6.agent("bind", request).code == 4
    assert kpro6.drivers() == SPLIT
    assert [vm["status"] for vm in kpro6.facts()["vms"]] == ["running"]


def test_release_hands_back_what_still_belongs_to_the_pool(kpro6: Hypervisor) -> None:
    """A deleted pool's cards go back to where they were found; the ledger forgets them."""
    before = kpro6.host_state()
    kpro6.done("bind", to_vfio())
    assert kpro6.done("release", {"pool": "confidential", "managed": MANAGED})["changed"]
    assert kpro6.drivers() == ALL_NVIDIA
    assert kpro6.ledger()["devices"] == {}
    after = kpro6.host_state()
    assert {
        key for key in before if key.startswith(("sys/bus", "etc/driverctl")) and before[key] != after[key]
    } == set()
    assert not kpro6.done("release", {"pool": "confidential", "managed": MANAGED})["changed"]


def test_release_keeps_its_hands_off_what_another_pool_owns_by_now(kpro6: Hypervisor) -> None:
    """After a merge, the deletion of the old pool's binding releases nothing."""
    kpro6.done("bind", to_vfio())
    kpro6.done("bind", bind_request("serving", NODE_0 + NODE_1, "nvidia"))
    before = kpro6.host_state()
    assert not kpro6.done("release", {"pool": "confidential", "managed": {}})["changed"]
    assert kpro6.host_state() == before


def test_a_card_that_leaves_every_pool_is_handed_back_by_bind(kpro6: Hypervisor) -> None:
    """A card taken out of a pool, and into no other, goes back to its found driver."""
    kpro6.done("bind", to_vfio())
    result = kpro6.done("bind", bind_request("confidential", NODE_1[:2], "vfio-pci", others=NODE_0))
    assert result["handed_back"] == NODE_1[2:]
    assert kpro6.drivers()[NODE_1[3]] == "nvidia"
    assert not (kpro6.root / f"etc/driverctl.d/pci-{NODE_1[3]}").exists()


def test_cards_of_a_pool_that_was_given_up_are_handed_back_by_the_next_bind(kpro6: Hypervisor) -> None:
    """A pool whose bind was killed has no resource that would release it: the next bind of any pool does."""
    kpro6.done("bind", to_vfio())
    result = kpro6.done("bind", bind_request("serving", NODE_0, "nvidia"))
    assert result["handed_back"] == NODE_1
    assert kpro6.drivers() == ALL_NVIDIA
    assert sorted(kpro6.ledger()["devices"]) == NODE_0


def test_a_card_that_was_taken_out_of_the_machine_is_forgotten(kpro6: Hypervisor) -> None:
    """The ledger answers for no card that isn't there."""
    ledger = kpro6.root / "var/lib/gpu-topology/ledger.json"
    kpro6.done("bind", bind_request("serving", NODE_0, "nvidia"))
    ledger.write_text(ledger.read_text().replace(NODE_0[3], "0000:99:00.0"))
    kpro6.done("bind", bind_request("serving", NODE_0[:3], "nvidia"))
    assert sorted(kpro6.ledger()["devices"]) == NODE_0[:3]
