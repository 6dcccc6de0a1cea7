"""Drain, bind and release on the simulated hypervisor: GPUs handed over, or everything left as it was."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.agent.requests import MANAGED, NODE_0, NODE_1, SERVICE, bind_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.conftest import Hypervisor

pytestmark = pytest.mark.simulator

SPLIT = dict.fromkeys(NODE_0, "nvidia") | dict.fromkeys(NODE_1, "vfio-pci")
ALL_NVIDIA = dict.fromkeys(NODE_0 + NODE_1, "nvidia")


def to_vfio(**more: object) -> dict[str, object]:
    """The bind of the split."""
    return bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0, **more)


def test_drain_stops_what_is_managed_and_holds_the_devices(kpro6: Hypervisor) -> None:
    """A drain stops the managed service and the persistence daemon, and says so in the ledger."""
    result = kpro6.done("drain", to_vfio())
    assert result["changed"]
    assert {event.subject for event in kpro6.simulator.events("service.stop")} == {  # type: ignore[arg-type]
        "nvidia-persistenced.service",
        "sglang-qwen.service",
    }
    drained = [entry.get("unit") for entry in kpro6.ledger()["drained"]]
    assert sorted(drained) == ["nvidia-persistenced.service", "sglang-qwen.service"]


def test_drain_of_devices_on_their_driver_does_nothing(kpro6: Hypervisor) -> None:
    """An unchanged pool pays nothing for its drain."""
    before = kpro6.host_state()
    result = kpro6.done("drain", bind_request("serving", NODE_0 + NODE_1, "nvidia"))
    assert not result["changed"]
    assert kpro6.host_state() == before


def test_drain_knows_what_was_registered_before(kpro6: Hypervisor) -> None:
    """A holder that an earlier operation registered may be stopped by a request that doesn't name it."""
    kpro6.done("register", {"managed": MANAGED, "revision": "r1"})
    sequence = kpro6.ledger()["sequence"]
    assert not kpro6.done("register", {"managed": MANAGED, "revision": "r2"})["changed"]
    assert kpro6.ledger()["sequence"] == sequence
    assert kpro6.facts()["ledger"]["revisions"]["register"] == "r2"
    assert kpro6.facts()["ledger"]["managed"] == MANAGED
    assert kpro6.done("drain", to_vfio(managed={}))["changed"]


def test_a_holder_that_is_not_ours_is_refused_before_anything_is_stopped(kpro6: Hypervisor) -> None:
    """A foreign process makes drain and bind refuse, naming PID and command, with nothing stopped."""
    pid = kpro6.simulator.faults.foreign_process(NODE_1[0])
    before = kpro6.host_state()
    for operation in ("drain", "bind"):
        answer = kpro6.agent(operation, to_vfio())
        assert answer.code == 3
        assert answer["outcome"] == "refused"
        assert f"PID {pid}" in answer["message"]
        assert NODE_1[0] in answer["message"]
    assert kpro6.host_state() == before
    assert not kpro6.simulator.events("service.stop")  # type: ignore[arg-type]


def test_a_binding_that_is_refused_starts_again_what_was_drained_for_it(kpro6: Hypervisor) -> None:
    """A foreign process that came after the drain leaves no dead service: the drain is undone with the binding."""
    kpro6.done("drain", to_vfio())
    kpro6.simulator.faults.foreign_process(NODE_1[0])
    answer = kpro6.agent("bind", to_vfio())
    assert (answer.code, answer["outcome"]) == (4, "undone")
    assert "this program does not manage it" in answer["message"]
    assert kpro6.drivers() == ALL_NVIDIA
    assert kpro6.ledger()["drained"] == []
    assert kpro6.facts()["nvidia"]["persistenced"] == "active"
    assert kpro6.facts(services=[SERVICE])["services"][0]["active"] == "active"


def test_a_foreign_process_in_a_container_is_named_with_its_guest(kpro6: Hypervisor) -> None:
    """The refusal says in which container the holder is."""
    kpro6.simulator.faults.foreign_process(NODE_1[1], container=129)
    assert "container 129" in kpro6.agent("drain", to_vfio())["message"]


def test_an_unmanaged_service_is_refused(kpro6: Hypervisor) -> None:
    """The running service is not stopped by a configuration that doesn't have it."""
    answer = kpro6.agent("drain", to_vfio(managed={}))
    assert answer.code == 3
    assert "unit sglang-qwen.service" in answer["message"]


def test_bind_moves_persists_and_records(kpro6: Hypervisor) -> None:
    """Devices go to vfio-pci live and for the next boot, in this order, and the ledger knows what was found."""
    result = kpro6.done("bind", to_vfio())
    assert result["changed"]
    assert kpro6.drivers() == SPLIT
    for address in NODE_1:
        assert (kpro6.root / f"etc/driverctl.d/pci-{address}").read_text() == "vfio-pci\n"
        assert kpro6.ledger()["devices"][address] == {
            "pool": "confidential",
            "driver": "vfio-pci",
            "found": {"driver": "nvidia", "override": None, "persisted": None},
        }
    kinds = kpro6.kinds()
    steps = ["service.stop", "holder.gone", "unbind", "persist"]
    assert [kinds.index(kind) for kind in steps] == sorted(kinds.index(kind) for kind in steps)
    assert kinds.index("persist") > max(i for i, kind in enumerate(kinds) if kind == "bind")
    assert kpro6.ledger()["revisions"]["binding:confidential"] == "r"
    assert kpro6.ledger()["operation"] is None


def test_the_persistence_daemon_runs_again_after_the_rebind(kpro6: Hypervisor) -> None:
    """A daemon that a drain stopped is started for the cards that stay."""
    kpro6.done("drain", to_vfio())
    kpro6.done("bind", to_vfio())
    assert kpro6.facts()["nvidia"]["persistenced"] == "active"
    assert [entry["kind"] for entry in kpro6.ledger()["drained"]] == ["service"]


def test_a_daemon_waits_for_the_binding_that_it_was_stopped_for(kpro6: Hypervisor) -> None:
    """Another pool's binding in between doesn't start it: it would hold the cards that are about to move."""
    kpro6.done("drain", to_vfio())
    assert not kpro6.done("bind", bind_request("serving", NODE_0, "nvidia", others=NODE_1))["changed"]
    assert kpro6.facts()["nvidia"]["persistenced"] == "inactive"
    kpro6.done("bind", to_vfio())
    assert kpro6.facts()["nvidia"]["persistenced"] == "active"


def test_a_daemon_whose_binding_never_comes_is_started_by_the_last_pool(kpro6: Hypervisor) -> None:
    """A drain that was given up, and a configuration that has one pool again: the daemon runs."""
    kpro6.done("drain", to_vfio())
    assert kpro6.done("bind", bind_request("serving", NODE_0 + NODE_1, "nvidia"))["changed"]
    assert kpro6.facts()["nvidia"]["persistenced"] == "active"


def test_a_second_bind_changes_nothing(kpro6: Hypervisor) -> None:
    """What is as wanted is left alone."""
    kpro6.done("bind", to_vfio())
    before, sequence = kpro6.host_state(), kpro6.ledger()["sequence"]
    assert not kpro6.done("bind", to_vfio())["changed"]
    assert kpro6.host_state() == before
    assert kpro6.ledger()["sequence"] == sequence


def test_adopting_a_host_that_is_as_wanted_only_fills_the_ledger(kpro6: Hypervisor) -> None:
    """Eight cards that are on nvidia already are owned afterwards, and untouched."""
    before = kpro6.host_state()
    result = kpro6.done("bind", bind_request("serving", NODE_0 + NODE_1, "nvidia"))
    assert not result["changed"]
    assert kpro6.host_state() == before
    assert sorted(kpro6.ledger()["devices"]) == sorted(NODE_0 + NODE_1)


def test_a_missing_persistent_half_is_repaired_without_a_drain(kpro6: Hypervisor) -> None:
    """A card that is on vfio-pci now and would be on nvidia after a boot is persisted, with no driver changed."""
    kpro6.done("bind", to_vfio())
    (kpro6.root / f"etc/driverctl.d/pci-{NODE_1[0]}").unlink()
    unbinds = kpro6.kinds().count("unbind")
    assert kpro6.done("bind", to_vfio())["changed"]
    assert kpro6.device(NODE_1[0])["persisted"] == "vfio-pci"
    assert kpro6.kinds().count("unbind") == unbinds


def test_the_split_survives_a_reboot(kpro6: Hypervisor) -> None:
    """What was persisted is what the next boot brings."""
    kpro6.done("bind", to_vfio())
    kpro6.simulator.reboot()
    assert kpro6.drivers() == SPLIT


def test_a_failed_bind_is_undone(kpro6: Hypervisor) -> None:
    """When one card can't be bound, the others go back, and the drained service starts again."""
    kpro6.done("drain", to_vfio())
    kpro6.simulator.faults.bind_fail(NODE_1[2], "vfio-pci")
    answer = kpro6.agent("bind", to_vfio())
    assert answer.code == 4
    assert answer["outcome"] == "undone"
    assert NODE_1[2] in answer["message"]
    assert kpro6.drivers() == ALL_NVIDIA
    assert {kpro6.device(address)["driver_override"] for address in NODE_1} == {None}
    assert not list((kpro6.root / "etc/driverctl.d").glob("pci-*"))
    ledger = kpro6.ledger()
    assert (ledger["devices"], ledger["drained"], ledger["operation"]) == ({}, [], None)
    service = kpro6.facts(services=[SERVICE])["services"][0]
    assert service["active"] == "active"
    assert kpro6.facts()["nvidia"]["persistenced"] == "active"


def test_a_failed_bind_succeeds_when_it_is_run_again(kpro6: Hypervisor) -> None:
    """A bind that is retried without its drain drains by itself."""
    kpro6.simulator.faults.bind_fail(NODE_1[2], "vfio-pci")
    assert kpro6.agent("bind", to_vfio()).code == 4
    kpro6.simulator.faults.clear()
    kpro6.done("bind", to_vfio())
    assert kpro6.drivers() == SPLIT


def test_an_unbind_that_hangs_ends_with_advice(kpro6: Hypervisor) -> None:
    """A removal that never returns is given up at its limit; the message names the kernel's line and the reboot."""
    kpro6.simulator.faults.unbind_hang(NODE_1[1])
    answer = kpro6.agent("bind", to_vfio(unbind_timeout_s=1))
    assert answer.code == 5
    assert answer["outcome"] == "not-undone"
    for words in ("non-zero usage count", "reboot", NODE_1[1], "NOT undone"):
        assert words in answer["message"]
    drivers = kpro6.drivers()
    assert drivers[NODE_1[0]] == "nvidia"
    assert drivers[NODE_1[2]] == "nvidia"


def test_a_hung_unbind_is_finished_by_the_next_run(kpro6: Hypervisor) -> None:
    """Once the kernel lets go, the same bind reaches the wanted topology."""
    kpro6.simulator.faults.unbind_hang(NODE_1[1])
    kpro6.agent("bind", to_vfio(unbind_timeout_s=1))
    kpro6.simulator.faults.clear()
    kpro6.done("bind", to_vfio())
    assert kpro6.drivers() == SPLIT


def test_a_full_disk_leaves_the_host_as_it_was(kpro6: Hypervisor) -> None:
    """Without room for the ledger nothing is begun."""
    before = kpro6.host_state()
    kpro6.simulator.faults.disk_full()
    answer = kpro6.agent("bind", to_vfio())
    kpro6.simulator.faults.clear()
    assert answer.code == 4
    assert "No space left" in answer["message"]
    assert kpro6.drivers() == ALL_NVIDIA
    assert kpro6.host_state() == before


def test_a_device_in_two_pools_is_a_bad_request(kpro6: Hypervisor) -> None:
    """One device has one owner."""
    answer = kpro6.agent("bind", bind_request("confidential", NODE_1, "vfio-pci", others=NODE_1[:1]))
    assert answer.code == 2
    assert "one owner" in answer["message"]


def test_a_device_that_does_not_exist_is_refused(kpro6: Hypervisor) -> None:
    """An address that the kernel doesn't know is named, with how to find the right one."""
    answer = kpro6.agent("bind", bind_request("serving", ["0000:99:00.0"], "nvidia"))
    assert answer.code == 3
    assert "0000:99:00.0" in answer["message"]
    assert "lspci" in answer["message"]


def test_all_functions_of_a_card_go_with_it(start: Callable[..., Hypervisor]) -> None:
    """A card's audio function follows it to vfio-pci, and goes back to the driver that it was found on."""
    host = start("two-functions")
    gpus = [
        one["address"] for one in host.facts()["devices"] if one["class"].startswith("03") and one["minor"] is not None
    ]
    card, audio = gpus[-1], gpus[-1][:-1] + "1"
    found = host.device(audio)["driver"]
    host.done("bind", bind_request("vm", [card], "vfio-pci"))
    assert host.device(audio)["driver"] == "vfio-pci"
    assert host.device(audio)["persisted"] == "vfio-pci"
    assert not host.done("bind", bind_request("vm", [card], "vfio-pci"))["changed"]
    host.done("bind", bind_request("serving", gpus, "nvidia"))
    assert host.device(audio)["driver"] == found
    assert host.device(audio)["persisted"] is None
    assert not host.done("bind", bind_request("serving", gpus, "nvidia"))["changed"]


def test_an_audio_function_that_no_driver_knows_stays_without(start: Callable[..., Hypervisor]) -> None:
    """A function without a driver is as wanted beside a card on nvidia, and no reason to change anything."""
    host = start("two-functions")
    gpus = [one["address"] for one in host.facts()["devices"] if one["minor"] is not None]
    audio = gpus[-1][:-1] + "1"
    asyncio.run(unbind(host, audio))
    assert host.device(audio)["driver"] is None
    assert not host.done("bind", bind_request("serving", gpus, "nvidia"))["changed"]
    host.done("bind", bind_request("vm", [gpus[-1]], "vfio-pci", others=gpus[:-1]))
    host.done("release", {"pool": "vm", "managed": {}})
    assert host.device(audio)["driver"] is None


async def unbind(host: Hypervisor, address: str) -> None:
    """Take a function from its driver, as root's shell does."""
    write = f"import os; os.write(os.open('sys/bus/pci/devices/{address}/driver/unbind', os.O_WRONLY), b'{address}')"
    await host.run(f'python3 -c "{write}"')


def test_an_unknown_driver_is_a_bad_request(kpro6: Hypervisor) -> None:
    """A pool is on nvidia or on vfio-pci."""
    for operation in ("drain", "bind"):
        assert kpro6.agent(operation, bind_request("serving", NODE_0, "nouveau")).code == 2


def test_check_pool_accepts_what_the_plan_saw_and_names_each_difference(kpro6: Hypervisor) -> None:
    """A pool is verified by ids, NUMA node and IOMMU group before anything changes."""
    fact = kpro6.device(NODE_0[0])
    expected = {name: fact[name] for name in ("address", "vendor", "device", "numa_node", "iommu_group")}
    assert kpro6.done("check-pool", {"pool": "serving", "devices": [expected]})["devices"][0]["driver"] == "nvidia"
    answer = kpro6.agent("check-pool", {"pool": "serving", "devices": [expected | {"numa_node": 1, "iommu_group": 5}]})
    assert answer.code == 3
    assert "NUMA node 0, not 1" in answer["message"]
    assert f"IOMMU group {fact['iommu_group']}, not 5" in answer["message"]
    (kpro6.root / f"sys/bus/pci/devices/{NODE_0[0]}/config").write_bytes(b"\xff" * 64)
    assert "fell off the bus" in kpro6.agent("check-pool", {"pool": "serving", "devices": [expected]})["message"]
