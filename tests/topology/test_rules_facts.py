"""Facts first: what a host must be like before anything changes, each rule firing and not firing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.topology.specs import CONFIDENTIAL, SERVING, Case, facts, raw_device, stack
from topology.problem import Level
from topology.rules import check_facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from topology.problem import Problem


def judged(edit: Callable[[dict[str, Any]], object] = dict, config: Callable[[dict[str, Any]], object] = dict) -> Any:
    """The problems of the facts and the stack file after an edit of each."""
    return check_facts(stack(config), facts(edit))


def _device(address: str, **changes: Any) -> Callable[[], tuple[Problem, ...]]:
    def edit(raw: dict[str, Any]) -> None:
        next(d for d in raw["devices"] if d["address"] == address).update(changes)

    return lambda: judged(edit)


def _beside(address: str, group: int, **changes: Any) -> Callable[[], tuple[Problem, ...]]:
    return lambda: judged(lambda raw: raw["devices"].append(raw_device(address, iommu_group=group, **changes)))


def _gone(raw: dict[str, Any]) -> None:
    raw["devices"] = [d for d in raw["devices"] if d["address"] != SERVING[0]]
    raw["missing"] = [SERVING[0]]


def _nvme(raw: dict[str, Any]) -> None:
    raw["devices"].append(raw_device("0000:05:00.0", **{"class": "010802", "vendor": "144d", "device": "a80a"}))


def _one_node(raw: dict[str, Any]) -> None:
    raw["numa_nodes"] = [0]
    for device in raw["devices"]:
        device["numa_node"] = -1


def _spanning(raw: dict[str, Any]) -> None:
    for pool in raw["pools"].values():
        del pool["numaNode"]
        pool["spanNumaNodes"] = True


def _on_node_zero(raw: dict[str, Any]) -> None:
    for pool in raw["pools"].values():
        pool["numaNode"] = 0


NODE_0 = "dev0: /dev/nvidia0\n"
HOSTPCI = "hostpci0: 81:00,pcie=1\nhostpci1: host=0000:91:00.0\n"


def _beside_guests(
    *, container: str = "", vm: str = "", managed: dict[str, list[int]] | None = None
) -> Callable[[], tuple[Problem, ...]]:
    """Guests that the stack file does not name, with these configurations."""

    def edit(raw: dict[str, Any]) -> None:
        raw["containers"].append({"vmid": 130, "exists": True, "status": "stopped", "config": container})
        raw["vms"].append({"vmid": 300, "exists": True, "status": "running", "config": vm})
        raw["ledger"] = {"managed": managed or {}}

    return lambda: judged(edit)


def _set(key: str, value: Any) -> Callable[[], tuple[Problem, ...]]:
    return lambda: judged(lambda raw: raw.update({key: value}))


def _whole_vm(raw: dict[str, Any]) -> None:
    raw["vms"]["200"]["whole"] = {
        "name": "cc",
        "cores": 8,
        "memoryMib": 65536,
        "diskStorage": "local-zfs",
        "diskGib": 64,
    }


GROUP = 24
"""IOMMU group of the first confidential card."""

CASES = (
    Case(
        "host-name",
        {"is 'kpro7' at 192.0.2.6": lambda: judged(lambda raw: raw["host"].update(hostname="kpro7"))},
        (judged, lambda: judged(lambda raw: raw["host"].update(hostname="kpro6.example.org"))),
    ),
    Case(
        "facts-complete",
        {
            SERVING[1]: _set("errors", [f"{SERVING[1]}: numa_node took longer than 2 s"]),
            "pct is not on the host's PATH": _set("errors", ["pct is not on the host's PATH"]),
            "`qm list` did not answer": _set("errors", ["`qm list` did not answer within 20 s"]),
        },
        (judged, _set("errors", ["nvidia-smi took longer than 2 s"])),
    ),
    Case(
        "facts-partial",
        {"nvidia-smi took": _set("errors", ["nvidia-smi took longer than 2 s"])},
        (judged, _set("errors", [f"{SERVING[1]}: numa_node took longer than 2 s"])),
    ),
    Case(
        "device-exists",
        {"correct 01:00.0; GPUs there: 11:00.0": lambda: judged(_gone)},
        (judged,),
    ),
    Case("device-answers", {"ffffffff": _device(SERVING[0], alive=False)}, (judged,)),
    Case(
        "device-is-gpu",
        {
            "an NVMe disk (class 0108, 144d:a80a)": lambda: judged(
                _nvme, lambda raw: raw["pools"]["serving"]["devices"].append("05:00.0")
            ),
            "10de:2bb1": _device(SERVING[0], device="2bb1"),
            "an audio function": _device(CONFIDENTIAL[0], **{"class": "040300"}),
            "a device (class ff00": _device(CONFIDENTIAL[0], **{"class": "ff0000"}),
        },
        (judged, _device(SERVING[0], **{"class": "030000"})),
    ),
    Case(
        "device-memory",
        {"has 49,140 MiB": _device(SERVING[0], memory_mib=49140)},
        (judged, _device(SERVING[0], memory_mib=97250), _device(SERVING[0], memory_mib=None)),
    ),
    Case(
        "numa-node",
        {
            "is on NUMA node 1, and the pool declares 0": _device(SERVING[0], numa_node=1),
            "is on NUMA node -1": _device(SERVING[0], numa_node=-1),
            "is on NUMA node -1. Rule": lambda: judged(
                lambda raw: raw["devices"][0].update(numa_node=-1), config=_spanning
            ),
            "is declared on NUMA node 1": lambda: judged(_one_node),
        },
        (judged, lambda: judged(_one_node, _on_node_zero), lambda: judged(config=_spanning)),
    ),
    Case(
        "iommu-group",
        {
            "with 0000:82:00.0, an NVMe disk": _beside("0000:82:00.0", GROUP, **{"class": "010802"}),
            "an NVSwitch": _beside("0000:82:00.0", GROUP, **{"class": "068000"}),
            "is in no IOMMU group": _device(CONFIDENTIAL[0], iommu_group=None),
            "a display controller": _device(CONFIDENTIAL[1], iommu_group=20),
        },
        (
            judged,
            _beside("0000:81:00.1", GROUP, **{"class": "040300"}),
            _beside("0000:82:00.0", GROUP, **{"class": "060400"}),
            _device(CONFIDENTIAL[1], iommu_group=GROUP),
            _device(SERVING[0], iommu_group=None),
        ),
    ),
    Case(
        "iommu-group-mixed",
        {"shares IOMMU group 20 with 0000:02:00.0": _beside("0000:02:00.0", 20, **{"class": "010802"})},
        (judged, _beside("0000:82:00.0", GROUP, **{"class": "010802"})),
    ),
    Case(
        "device-whole",
        {
            "has 4 SR-IOV functions": _device(CONFIDENTIAL[0], sriov_vfs=4),
            "nvidia-smi -i 0000:01:00.0 -mig 0": _device(SERVING[0], mig=True),
        },
        (judged,),
    ),
    Case("boot-vga", {"is the boot console": _device(CONFIDENTIAL[0], boot_vga=True)}, (judged,)),
    Case(
        "boot-vga-shared",
        {"is the boot console": _device(SERVING[0], boot_vga=True)},
        (judged, _device(CONFIDENTIAL[0], boot_vga=True)),
    ),
    Case(
        "guest-exists",
        {
            "containers there: 101, 130": _set(
                "containers", [{"vmid": v, "exists": v != 129} for v in (129, 130, 101)]
            ),
            "VM 200: does not exist": _set("vms", [{"vmid": 200, "exists": False}]),
            "record the host again": lambda: judged(
                lambda raw: raw.update(vms=[]), lambda raw: raw["host"].update(facts="recorded")
            ),
            "VM 200: is a container": lambda: judged(
                lambda raw: raw.update(vms=[], containers=[*raw["containers"], {"vmid": 200, "exists": True}])
            ),
            "container 129: is a VM": lambda: judged(
                lambda raw: raw.update(containers=[], vms=[*raw["vms"], {"vmid": 129, "exists": True}])
            ),
        },
        (judged, lambda: judged(lambda raw: raw.update(vms=[]), _whole_vm)),
    ),
    Case(
        "guest-undeclared",
        {
            "container 130: is given 01:00.0 by its configuration and is stopped": _beside_guests(container=NODE_0),
            "VM 300: is given 81:00.0, 91:00.0 by its configuration and is running": _beside_guests(vm=HOSTPCI),
        },
        (
            judged,
            _beside_guests(container="lxc.mount.entry: /dev/nvidia7 dev/nvidia7 none bind\n", vm="hostpci0: 05:00\n"),
            _beside_guests(container=NODE_0, vm=HOSTPCI, managed={"containers": [130], "vms": [300]}),
        ),
    ),
    Case(
        "vfio-ids",
        {"has GPUs of id 10de:2bb5": _set("vfio_ids", ["10de:2bb5"])},
        (judged, _set("vfio_ids", ["10de:1234"])),
    ),
)


def test_kpro6_after_the_split_is_sound() -> None:
    """A host that is as the stack file says breaks no rule."""
    assert judged() == ()


def test_a_device_that_does_not_answer_is_told_once() -> None:
    """What reads ffffffff says nothing of ids, memory or NUMA node, so nothing of that is held against it."""
    (problem,) = _device(SERVING[0], alive=False, device="ffff", numa_node=-1)()
    assert problem.rule == "device-answers"


def test_an_unknown_gpu_preset_does_not_hide_what_the_host_says() -> None:
    """The preset is check_config's to refuse; here it leads to no traceback."""
    assert judged(config=lambda raw: raw["pools"]["serving"].update(gpu="abacus")) == ()


def test_a_shared_group_is_no_matter_for_a_container() -> None:
    """On the nvidia driver nothing depends on the IOMMU group, so what works is not refused."""
    (problem,) = _beside("0000:02:00.0", 20, **{"class": "010802"})()
    assert problem.level is Level.WARN
