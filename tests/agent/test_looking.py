"""What the agent sees: holders, devices, processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from host.agent.facts import facts
from host.agent.facts_devices import device_facts, majors, relevant
from host.agent.holders import Holder, find_holders, hide_secrets
from host.agent.pci import Address, Pci
from host.agent.processes import main_processes, process
from host.agent.request import Managed, Request, Service
from host.agent.root import Root

if TYPE_CHECKING:
    from collections.abc import Callable

    from host.agent.result import Json
    from tests.agent.conftest import Files

CARD, OTHER = Address("0000:81:00.0"), Address("0000:91:00.0")


@pytest.fixture
def cards(files: Files) -> Files:
    """Two cards, one on nvidia and one on vfio-pci, and no VM."""
    files.gpu(CARD, "nvidia", minor=4, group=9)
    files.gpu(OTHER, "vfio-pci", group=17)
    return files


def test_a_holder_is_named_by_process_unit_and_container(cards: Files) -> None:
    """The host sees a container's process, and its control group says where it belongs."""
    cards.process(10, "/lxc/129/ns/system.slice/sglang-qwen.service", ["/dev/null", "/dev/nvidia4 (deleted)"])
    (holder,) = find_holders(cards.system, [CARD])
    assert holder == Holder(10, "python3 train.py", "sglang-qwen.service", 129, None, (CARD,))
    assert holder.describe() == (
        "PID 10 (python3 train.py), unit sglang-qwen.service, container 129 holds 0000:81:00.0"
    )
    assert holder.is_managed(Managed((Service("q", "sglang-qwen.service", 129),)))
    assert not holder.is_managed(Managed((Service("q", "sglang-qwen.service", None),)))


@pytest.mark.parametrize("nodes", [["/dev/nvidiactl", "/dev/nvidia-uvm"], ["/dev/nvidia5"], ["/dev/nvidia40"], []])
def test_who_has_only_shared_nodes_or_other_cards_is_no_holder(cards: Files, nodes: list[str]) -> None:
    """Nvidiactl and nvidia-uvm belong to every client of the driver, whichever card it uses."""
    cards.process(10, "/user.slice", nodes)
    assert find_holders(cards.system, [CARD]) == []


def test_a_vm_is_known_by_its_process(cards: Files) -> None:
    """A process that holds the card's IOMMU group is the VM that its command line names."""
    cards.process(10, "/qemu.slice/200.scope", ["/dev/vfio/17"], "/usr/bin/kvm\0-id\x00200\0-name\0x\0")
    (holder,) = find_holders(cards.system, [OTHER])
    assert (holder.vmid, holder.devices) == (200, (OTHER,))
    assert holder.is_managed(Managed(vms=(200,)))
    assert not holder.is_managed(Managed(vms=(201,)))


def test_a_running_vm_counts_although_no_process_was_found(cards: Files, commands: Callable[[str, str], None]) -> None:
    """A VM that is configured with the card and runs holds it, whatever /proc shows."""
    commands("qm", 'echo "VMID NAME STATUS"; echo "200 x running"; echo "201 y stopped"')
    for vmid in (200, 201):
        cards.put(f"/etc/pve/qemu-server/{vmid}.conf", "hostpci0: 91:00,pcie=1\n")
    (holder,) = find_holders(cards.system, [OTHER])
    assert (holder.pid, holder.vmid) == (None, 200)


@pytest.mark.parametrize(
    ("cgroup", "argv", "managed"),
    [
        ("/system.slice/nvidia-persistenced.service", "/usr/bin/nvidia-persistenced\0", True),
        ("/system.slice/nvidia-dcgm.service", "nv-hostengine\0", True),
        ("/", "nv-hostengine\0-n\0", True),
        ("/lxc/129/ns/system.slice/nvidia-dcgm.service", "nv-hostengine\0", False),
        ("/system.slice/ollama.service", "ollama\0", False),
    ],
)
def test_the_driver_s_daemons_on_the_host_may_be_stopped(cards: Files, cgroup: str, argv: str, managed: bool) -> None:
    """Persistence daemon and DCGM, and nobody else without being named; those of a container are the container's."""
    cards.process(10, cgroup, ["/dev/nvidia4"], argv)
    (holder,) = find_holders(cards.system, [CARD])
    assert holder.is_managed(Managed()) is managed


def test_a_holder_s_command_has_no_secret() -> None:
    """Keys are hidden in both forms."""
    given = ["python", "--api-key", "s", "--admin-api-key=s", "--port", "1"]
    assert hide_secrets(given) == ["python", "--api-key", "***", "--admin-api-key=***", "--port", "1"]


def test_relevant_devices_are_cards_and_what_is_bound_to_them(files: Files) -> None:
    """Slot mates and group mates of a card belong to its facts; a distant device only when asked for."""
    files.gpu(CARD, group=1)
    files.gpu("0000:81:00.1", group=1, attributes={"class": "0x040300"})
    files.gpu("0000:82:00.0", group=1, attributes={"class": "0x010802"})
    files.gpu("0000:83:00.0", group=2, attributes={"class": "0x020000"})
    pci = Pci(Root(files.folder))
    assert relevant(pci, []) == ["0000:81:00.0", "0000:81:00.1", "0000:82:00.0"]
    assert Address("0000:83:00.0") in relevant(pci, [Address("0000:83:00.0")])


def test_device_facts_are_read_whole(files: Files) -> None:
    """Ids, class, NUMA node, group type, BARs, minor, override."""
    files.gpu(CARD, "nvidia", minor=4, group=9, attributes={"numa_node": "1", "boot_vga": "1", "sriov_numvfs": "2"})
    files.put("/sys/kernel/iommu_groups/9/type", "DMA-FQ\n")
    base = f"/sys/bus/pci/devices/{CARD}"
    files.put(f"{base}/resource", "0x0000000000000000 0x0000000003ffffff 0x1\n0x0 0x0 0x0\n0x0 0x1fffffffff 0x1\n")
    files.put(f"/etc/driverctl.d/pci-{CARD}", "vfio-pci\n")
    errors: list[Json] = []
    (found,) = device_facts(files.system, [CARD], {}, errors)
    expected = {
        "address": CARD,
        "vendor": "10de",
        "class": "030200",
        "numa_node": 1,
        "driver": "nvidia",
        "driver_override": None,
        "persisted": "vfio-pci",
        "iommu_group": 9,
        "iommu_type": "DMA-FQ",
        "boot_vga": True,
        "alive": True,
        "sriov_vfs": 2,
        "bars": [1 << 26, 1 << 37],
        "minor": 4,
        "mig": None,
        "name": None,
    }
    assert isinstance(found, dict)
    assert {key: found[key] for key in expected} == expected
    assert errors == []


def test_a_card_that_fell_off_the_bus_is_not_alive(files: Files) -> None:
    """Its folder stays, and its configuration space reads all ones."""
    files.gpu(CARD)
    (files.folder / f"sys/bus/pci/devices/{CARD}/config").write_bytes(b"\xff" * 64)
    assert not Pci(Root(files.folder)).alive(CARD)


def test_majors_are_character_devices_only(files: Files) -> None:
    """The block device section of /proc/devices says nothing of them."""
    files.put(
        "/proc/devices", "Character devices:\n195 nvidia-frontend\n511 nvidia-uvm\n\nBlock devices:\n9 nvidia-x\n"
    )
    assert majors(Root(files.folder)) == {"nvidia-frontend": 195, "nvidia-uvm": 511}


def test_facts_of_a_host_without_proxmox_name_what_is_missing(files: Files) -> None:
    """An empty host gives empty facts, and says that its tools are missing."""
    found: dict[str, Any] = facts(
        files.system, Request.of({"containers": [129], "vms": [200], "addresses": ["81:00.0"]})
    )
    assert found["missing"] == ["0000:81:00.0"]
    assert found["containers"] == [
        {"vmid": 129, "exists": False, "status": None, "config": None, "unprivileged": False}
    ]
    assert "pct is not on the host's PATH" in found["errors"]
    assert found["snp"] is None


def test_a_tool_that_fails_is_no_host_whose_guests_stopped(files: Files, commands: Callable[[str, str], None]) -> None:
    """Where Proxmox's file system is down, pct and qm fail at once: that is an error of the facts, not a state."""
    commands("pct", "echo 'ipcc_send_rec[1] failed: Connection refused' >&2; exit 111")
    commands("qm", "echo VMID NAME STATUS")
    found: dict[str, Any] = facts(files.system, Request({}))
    (told,) = [error for error in found["errors"] if "pct" in error]
    assert "`pct list` exited with 111: ipcc_send_rec" in told


def test_facts_do_not_wait_for_a_tool_that_hangs(
    files: Files, commands: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wedged driver lets nvidia-smi hang: that is an error in the facts, and the rest is there."""
    monkeypatch.setattr("host.agent.facts.COMMANDS_LIMIT", 0.5)
    commands("nvidia-smi", "sleep 600")
    files.gpu(CARD, "nvidia")
    found: dict[str, Any] = facts(files.system, Request.of({}))
    assert any("nvidia-smi" in str(error) for error in found["errors"])
    assert [one["address"] for one in found["devices"]] == [CARD]


def test_a_main_process_is_found_by_its_number_inside_the_container(files: Files) -> None:
    """Systemd in a container knows another PID than the host."""
    service = Service("q", "q.service", 129)
    for pid, inner in ((700, 12), (701, 13)):
        files.process(pid, "/lxc/129/ns/system.slice/q.service", [], "python\0--tp\x008\0--api-key\0s\0")
        files.put(f"/proc/{pid}/status", f"Name:\tpython\nNSpid:\t{pid}\t{inner}\n")
    files.put("/proc/701/environ", "NCCL_P2P_DISABLE=1\0HOME=/root\0SGLANG_API_KEY=s\0")
    files.put("/proc/701/stat", "701 (a) b) S " + " ".join(["0"] * 18) + " 500 0\n")
    files.put("/proc/stat", "cpu 0\nbtime 1700000000\n")
    assert main_processes(files.system, {service: 13}) == {service: 701}
    assert process(files.system, 701) == {
        "argv": ["python", "--tp", "8", "--api-key", "***"],
        "environment": {"NCCL_P2P_DISABLE": "1"},
        "started": "2023-11-14T22:13:25+00:00",
    }
