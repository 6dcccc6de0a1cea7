"""Rules on pools, bindings and PCI mappings."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from topology.config import Driver
from topology.rules.catalogue import broken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from topology.problem import Problem
    from topology.spec import BindingSpec, DeviceSpec, HostSpec, MappingSpec, PoolSpec

MAX_HOSTPCI = 16
"""hostpci0 to hostpci15 (proxmox/pve-docs qm-pci-passthrough.adoc)."""

_SLOT_LENGTH = len("0000:81:00")
_UNKNOWN_NODE = -1


def slot(address: str) -> str:
    """The slot of an address with or without its function: all functions of a card move together."""
    return address[:_SLOT_LENGTH]


def check_pool(pool: PoolSpec, host: HostSpec | None = None) -> tuple[Problem, ...]:
    """Judge one pool; without `host` a NUMA node of -1 is refused, since one node or several is then unknown."""
    subject = f"pool {pool.name}"
    return (
        *each_once(subject, pool.addresses),
        *_driver(subject, pool.driver),
        *_owners(subject, pool),
        *_numa(subject, pool, single_node=host is not None and host.numa_nodes == 1),
        *(no_group(subject, d.address) for d in pool.devices if pool.driver == Driver.VFIO and d.iommu_group < 0),
    )


def check_pools(pools: Sequence[PoolSpec]) -> tuple[Problem, ...]:
    """Judge pools together: one device, one owner, and no IOMMU group torn between a VM and another."""
    return (*shared_devices((pool.name, pool.addresses) for pool in pools), *_torn_groups(pools))


def shared_devices(pools: Iterable[tuple[str, Iterable[str]]]) -> Iterator[Problem]:
    """Refuse a card that stands in two pools, given as name and addresses."""
    owner: dict[str, str] = {}
    for name, addresses in pools:
        for device in dict.fromkeys(slot(address) for address in addresses):
            if device in owner:
                yield broken(
                    "one-device-one-owner",
                    f"pools {owner[device]} and {name}",
                    f"both have {device}",
                    "a GPU has one driver and one owner",
                    "remove it from one of them",
                )
            owner.setdefault(device, name)


def check_binding(binding: BindingSpec) -> tuple[Problem, ...]:
    """Judge a binding: devices, driver, and none of them another pool's."""
    subject = f"binding of pool {binding.pool}"
    shared = sorted({slot(d) for d in binding.devices} & {slot(d) for d in binding.others})
    return (
        *each_once(subject, binding.devices),
        *_driver(subject, binding.driver),
        *(
            broken(
                "one-device-one-owner",
                subject,
                f"binds {device}, which another pool has too",
                "two owners would take it from each other",
                "keep the device in one pool",
            )
            for device in shared
        ),
    )


def check_mapping(mapping: MappingSpec) -> tuple[Problem, ...]:
    """Judge a PCI mapping: at least one device, each once, at most what a VM can have."""
    subject = f"PCI mapping {mapping.name}"
    return (*each_once(subject, [e.path for e in mapping.entries]), *hostpci_count(subject, len(mapping.entries)))


def hostpci_count(subject: str, count: int) -> tuple[Problem, ...]:
    """Refuse more hostpci entries than a VM can have."""
    if count <= MAX_HOSTPCI:
        return ()
    why = f"Proxmox VE has hostpci0 to hostpci{MAX_HOSTPCI - 1}"
    return (broken("hostpci-count", subject, f"has {count} devices", why, f"give it {MAX_HOSTPCI} at most"),)


def no_group(subject: str, address: str) -> Problem:
    """Refuse a VM's device for which the kernel made no IOMMU group."""
    return broken(
        "iommu-group",
        subject,
        f"has {address}, which is in no IOMMU group",
        "without an IOMMU nothing keeps a VM's device from the host's memory, and vfio-pci refuses it",
        "turn the IOMMU on in the BIOS, remove iommu=off and amd_iommu=off, and reboot",
    )


def each_once(subject: str, addresses: Iterable[str]) -> Iterator[Problem]:
    """Refuse an entry without a device, or with a card twice."""
    counted = Counter(slot(address) for address in addresses)
    if not counted:
        why = "an entry without a GPU has no meaning"
        yield broken("pool-has-devices", subject, "has no device", why, "list its devices, or remove it")
    for twice in sorted(device for device, count in counted.items() if count > 1):
        why = "a card is listed once, and all its functions move together"
        yield broken("one-device-one-owner", subject, f"has {twice} twice", why, "list the card's .0 only")


def _driver(subject: str, driver: str) -> Iterator[Problem]:
    if driver not in list(Driver):
        known = " or ".join(Driver)
        yield broken("driver-known", subject, f"has driver {driver!r}", f"it must be {known}", f"set it to {known}")


def _owners(subject: str, pool: PoolSpec) -> Iterator[Problem]:
    if len(pool.owners) > 1:
        yield broken(
            "one-pool-one-owner",
            subject,
            f"belongs to {', '.join(pool.owners)}",
            "two guests would use the same GPUs",
            "split its devices into one pool per owner",
        )
    for owner in pool.owners:
        if owner.startswith("vm/"):
            yield from wrong_driver("vm-on-vfio", subject, owner, pool.driver)
            yield from hostpci_count(subject, len(pool.devices))
        else:
            rule = "container-on-nvidia" if owner.startswith("lxc/") else "service-on-nvidia"
            yield from wrong_driver(rule, subject, owner, pool.driver)


def wrong_driver(rule: str, subject: str, owner: str, driver: str) -> Iterator[Problem]:
    """Refuse a driver under which the owner could not use the devices."""
    wanted, why = (
        (Driver.VFIO, "only vfio-pci hands a whole device to a VM")
        if rule == "vm-on-vfio"
        else (Driver.NVIDIA, "/dev/nvidia* exists only for GPUs of the nvidia driver")
    )
    if driver != wanted:
        value = f"gives devices on driver {driver} to {owner}"
        yield broken(rule, subject, value, why, f"set the pool's driver to {wanted}, or use another pool")


def _numa(subject: str, pool: PoolSpec, *, single_node: bool) -> Iterator[Problem]:
    if pool.numa_node is None and not pool.span_numa_nodes:
        why = "traffic between NUMA nodes halves a service's speed without anyone noticing"
        yield broken("numa-node", subject, "names no NUMA node", why, "set numaNode, or spanNumaNodes: true")
    for device in pool.devices:
        yield from _device_numa(subject, pool, device, single_node=single_node)


def _device_numa(subject: str, pool: PoolSpec, device: DeviceSpec, *, single_node: bool) -> Iterator[Problem]:
    if device.numa_node == _UNKNOWN_NODE:
        if not single_node:
            yield broken(
                "numa-node",
                subject,
                f"has {device.address} on NUMA node -1",
                "-1 is unknown, which only a host with a single node may ignore",
                "set the NUMA options in the BIOS so that the kernel learns the slot's node",
            )
    elif not pool.span_numa_nodes and pool.numa_node is not None and device.numa_node != pool.numa_node:
        yield broken(
            "numa-node",
            subject,
            f"has {device.address} on NUMA node {device.numa_node}, and declares node {pool.numa_node}",
            "a pool does not span NUMA nodes unless it says so",
            f"move the device to a pool of node {device.numa_node}, correct numaNode, or set spanNumaNodes: true "
            "instead of it",
        )


def _torn_groups(pools: Sequence[PoolSpec]) -> Iterator[Problem]:
    members: dict[int, list[PoolSpec]] = {}
    for pool in pools:
        for group in dict.fromkeys(device.iommu_group for device in pool.devices):
            members.setdefault(group, []).append(pool)
    for group, users in members.items():
        if group >= 0 and len(users) > 1 and any(pool.driver == Driver.VFIO for pool in users):
            yield broken(
                "iommu-group",
                f"pools {' and '.join(pool.name for pool in users)}",
                f"share IOMMU group {group}",
                "VFIO hands a group to a VM whole: a device of it on another driver makes the group unusable",
                "put the group's devices into one pool, or move a card to another slot",
            )
