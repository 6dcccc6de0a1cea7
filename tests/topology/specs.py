"""A sound hypervisor, split into a serving and a confidential half, as specs, stack file and facts to take apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from topology.facts import Facts
from topology.load import load_topology
from topology.presets import model_preset
from topology.spec import (
    BindingSpec,
    ContainerSpec,
    DeviceSpec,
    HostSpec,
    MappingEntry,
    MappingSpec,
    PoolSpec,
    ServiceSpec,
    TopologySpec,
    VmSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from topology.config import Topology
    from topology.problem import Problem

GIB = 1 << 30
BARS = (64 << 20, 128 * GIB, 32 << 20)
SERVING = ("0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0")
CONFIDENTIAL = ("0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0")
NODES = dict.fromkeys(SERVING, 0) | dict.fromkeys(CONFIDENTIAL, 1)
GROUPS = {address: 20 + index for index, address in enumerate(NODES)}
QUIET = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_MIN_NCHANNELS": "16",
    "NCCL_MAX_NCHANNELS": "32",
    "NCCL_BUFFSIZE": "33554432",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""An environment in which NCCL leaves P2P alone and has what it needs instead."""

HOST = HostSpec(
    node="kpro6", snp=True, translated_iommu=True, kernel_command_line="ro quiet pcie_aspm=off", numa_nodes=2
)


@dataclass(frozen=True)
class Case:
    """A rule with judgements in which it must fire, by what its message must say, and in which it must not."""

    rule: str
    fires: dict[str, Callable[[], tuple[Problem, ...]]]
    calm: tuple[Callable[[], tuple[Problem, ...]], ...]


def device(address: str, **changes: Any) -> DeviceSpec:
    """One card of kpro6."""
    sound = DeviceSpec(
        address=address,
        pci_id="10de:2bb5",
        subsystem_id="10de:204e",
        numa_node=NODES.get(address, 0),
        iommu_group=GROUPS.get(address, 90),
        bar_bytes=sum(BARS),
    )
    return replace(sound, **changes)


def pool(**changes: Any) -> PoolSpec:
    """The serving pool on NUMA node 0."""
    sound = PoolSpec(
        name="serving",
        driver="nvidia",
        devices=tuple(map(device, SERVING)),
        numa_node=0,
        span_numa_nodes=False,
        gpu="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        memory_mib=97887,
        owners=("lxc/129",),
    )
    return replace(sound, **changes)


def vm_pool(**changes: Any) -> PoolSpec:
    """The confidential pool on NUMA node 1."""
    sound = pool(
        name="confidential",
        driver="vfio-pci",
        devices=tuple(map(device, CONFIDENTIAL)),
        numa_node=1,
        owners=("vm/200",),
    )
    return replace(sound, **changes)


def binding(**changes: Any) -> BindingSpec:
    """The serving pool's binding."""
    sound = BindingSpec(
        pool="serving",
        driver="nvidia",
        devices=SERVING,
        others=CONFIDENTIAL,
        drain_revision="adopted",
        revision="adopted",
    )
    return replace(sound, **changes)


def mapping(addresses: tuple[str, ...] = CONFIDENTIAL) -> MappingSpec:
    """The confidential pool's PCI mapping."""
    entries = [
        MappingEntry(path=a, id="10de:2bb5", subsystem_id="10de:204e", iommu_group=GROUPS.get(a, 90)) for a in addresses
    ]
    return MappingSpec(name="gpu-confidential", node="kpro6", pool="confidential", entries=tuple(entries))


def container(**changes: Any) -> ContainerSpec:
    """LXC 129."""
    sound = ContainerSpec(
        vmid=129,
        pool="serving",
        driver="nvidia",
        devices=SERVING,
        passthrough="raw",
        units=("sglang-qwen.service",),
        revision="adopted",
    )
    return replace(sound, **changes)


def vm(**changes: Any) -> VmSpec:
    """VM 200."""
    sound = VmSpec(
        vmid=200,
        pool="confidential",
        driver="vfio-pci",
        mapping="gpu-confidential",
        devices=CONFIDENTIAL,
        bar_bytes=4 * sum(BARS),
        sev_snp=True,
        start=True,
        cpu="host",
        args="",
        whole=None,
        revision="adopted",
    )
    return replace(sound, **changes)


def unit(flags: str = "--tp 4") -> str:
    """A unit that starts SGLang with these flags."""
    return f"[Service]\nExecStart=/usr/bin/python3 -m sglang.launch_server --model-path /models/qwen {flags}\n"


def service(**changes: Any) -> ServiceSpec:
    """The Qwen service on the serving pool; `arguments` may be a mapping."""
    if isinstance(given := changes.get("arguments"), dict):
        changes["arguments"] = tuple((name, str(value)) for name, value in given.items())
    sound = ServiceSpec(
        **_present(
            name="sglang-qwen",
            unit="sglang-qwen.service",
            container=129,
            pool="serving",
            devices=SERVING,
            driver="nvidia",
            memory_mib=97887,
            tp=4,
            pipeline=1,
            data=1,
            port=30000,
            address="0.0.0.0",  # noqa: S104  SGLang's own choice of bind
            served_name="qwen",
            model=model_preset("qwen3.5-397b-a17b-nvfp4"),
            arguments=(("kv-cache-dtype", "fp8_e4m3"),),
            environment=QUIET,
            effective_environment=QUIET,
            translated_iommu=True,
            text=unit(),
            previous_text=None,
            adopted=True,
            path="/etc/systemd/system/sglang-qwen.service",
            canonical_unit="units/sglang-qwen.service",
            enabled=True,
            deadline_s=1200,
            token_timeout_s=120,
            unit_revision="adopted",
            revision="adopted",
        )
    )
    return replace(sound, **changes)


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ServiceSpec.__dataclass_fields__}


def sized(gpus: int, **changes: Any) -> ServiceSpec:
    """The service on so many GPUs, TP and unit following."""
    devices = tuple(f"0000:{index:02x}:00.0" for index in range(1, gpus + 1))
    return service(devices=devices, **{"tp": gpus, "text": unit(f"--tp {gpus}")} | changes)


def whole(**changes: Any) -> TopologySpec:
    """All of it."""
    sound = TopologySpec(
        host=HOST,
        pools=(pool(), vm_pool()),
        bindings=(binding(),),
        mappings=(mapping(),),
        containers=(container(),),
        vms=(vm(),),
        services=(service(),),
    )
    return replace(sound, **changes)


def raw_stack() -> dict[str, Any]:
    """The stack file's topology."""
    return {
        "version": "v1",
        "host": {"node": "kpro6", "address": "192.0.2.6", "hostKey": "ssh-ed25519 AAAA"},
        "proxmox": {"endpoint": "https://192.0.2.6:8006/"},
        "pools": {
            "serving": {
                "devices": ["01:00.0", "11:00.0", "61:00.0", "71:00.0"],
                "driver": "nvidia",
                "gpu": "rtx-pro-6000-blackwell-server",
                "numaNode": 0,
            },
            "confidential": {
                "devices": ["81:00.0", "91:00.0", "e1:00.0", "f1:00.0"],
                "driver": "vfio-pci",
                "gpu": "rtx-pro-6000-blackwell-server",
                "numaNode": 1,
            },
        },
        "containers": {"129": {"pool": "serving", "passthrough": "raw"}},
        "vms": {"200": {"pool": "confidential", "mapping": "gpu-confidential", "sevSnp": True}},
        "services": {
            "sglang-qwen": {
                "pool": "serving",
                "container": 129,
                "model": {"path": "/models/qwen", "preset": "qwen3.5-397b-a17b-nvfp4"},
                "arguments": {"kv-cache-dtype": "fp8_e4m3", "trust-remote-code": True},
                "canonicalUnit": "units/sglang-qwen.service",
            }
        },
    }


def stack(edit: Callable[[dict[str, Any]], object] = dict) -> Topology:
    """The stack file's topology after an edit in place, loaded."""
    raw = raw_stack()
    edit(raw)
    return load_topology(raw)


def raw_facts() -> dict[str, Any]:
    """The host's facts after the split, as the agent prints them."""
    return {
        "version": "v1",
        "host": {"hostname": "kpro6", "kernel": "6.14.8-2-pve", "boot_id": "b", "cmdline": HOST.kernel_command_line},
        "numa_nodes": [0, 1],
        "snp": True,
        "nvidia": {"version": "580.95.05", "persistenced": "active", "uvm_major": 511},
        "devices": [raw_device(address) for address in NODES] + [raw_device("0000:80:01.1", **_BRIDGE)],
        "containers": [{"vmid": 129, "exists": True, "status": "running", "config": ""}],
        "vms": [{"vmid": 200, "exists": True, "status": "stopped", "config": ""}],
    }


_BRIDGE = {
    "vendor": "1022",
    "device": "1483",
    "class": "060400",
    "iommu_group": GROUPS[CONFIDENTIAL[0]],
    "driver": None,
}


def raw_device(address: str, **changes: Any) -> dict[str, Any]:
    """One PCI function's facts."""
    serving = address in SERVING
    return {
        "address": address,
        "vendor": "10de",
        "device": "2bb5",
        "subsystem_vendor": "10de",
        "subsystem_device": "204e",
        "class": "030200",
        "numa_node": NODES.get(address, 0),
        "driver": "nvidia" if serving else "vfio-pci",
        "driver_override": None,
        "persisted": None if serving else "vfio-pci",
        "iommu_group": GROUPS.get(address),
        "iommu_type": "DMA-FQ",
        "boot_vga": False,
        "alive": True,
        "sriov_vfs": 0,
        "mig": False if serving else None,
        "bars": list(BARS),
        "minor": SERVING.index(address) if serving else None,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition" if serving else None,
        "memory_mib": 97887 if serving else None,
    } | changes


def facts(edit: Callable[[dict[str, Any]], object] = dict) -> Facts:
    """The host's facts after an edit in place."""
    raw = raw_facts()
    edit(raw)
    return Facts.model_validate(raw)
