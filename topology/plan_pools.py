"""Pools, their bindings and mappings, from configuration and facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from topology.changes import Change, listed
from topology.config import Driver
from topology.presets import resolve_gpu
from topology.revision import revision
from topology.spec import BindingSpec, DeviceSpec, HostSpec, MappingEntry, MappingSpec, PoolSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from topology.address import PciAddress
    from topology.config import Pool, Topology
    from topology.facts import DeviceFacts, Facts

_NO_GROUP = -1
_DISPLAY = "03"
_BRIDGE = "06"


def host_spec(topology: Topology, facts: Facts) -> HostSpec:
    """The hypervisor, as far as rules depend on it."""
    declared = [device for pool in topology.pools.values() for device in _devices(pool, facts)]
    return HostSpec(
        node=topology.host.node,
        snp=facts.snp,
        translated_iommu=translated_iommu(d.iommu_type for d in declared),
        kernel_command_line=facts.host.cmdline,
        numa_nodes=len(facts.numa_nodes),
    )


def translated_iommu(types: Iterable[str | None]) -> bool | None:
    """Whether DMA of any device goes through translation; None where no device has an IOMMU domain that tells.

    The kernel's types are DMA, DMA-FQ and identity (Documentation/ABI/testing/sysfs-kernel-iommu_groups).
    """
    known = {kind for kind in types if kind}
    return any(kind != "identity" for kind in known) if known else None


def pool_spec(name: str, topology: Topology, facts: Facts) -> PoolSpec:
    """One pool with its devices as the host has them."""
    pool = topology.pools[name]
    gpu = resolve_gpu(pool)
    return PoolSpec(
        name=name,
        driver=pool.driver.value,
        devices=tuple(_device_spec(device) for device in _devices(pool, facts)),
        numa_node=pool.numa_node,
        span_numa_nodes=pool.span_numa_nodes,
        gpu=gpu.name,
        memory_mib=gpu.memory_mib,
        owners=tuple(_owners(name, topology)),
    )


def _owners(name: str, topology: Topology) -> Iterator[str]:
    yield from (f"lxc/{vmid}" for vmid, container in sorted(topology.containers.items()) if container.pool == name)
    yield from (f"vm/{vmid}" for vmid, vm in sorted(topology.vms.items()) if vm.pool == name)
    if any(service.pool == name and service.container is None for service in topology.services.values()):
        yield "host"


def _devices(pool: Pool, facts: Facts) -> tuple[DeviceFacts, ...]:
    return tuple(device for address in pool.devices if (device := facts.device(address)))


def _device_spec(device: DeviceFacts) -> DeviceSpec:
    return DeviceSpec(
        address=str(device.address),
        pci_id=device.pci_id,
        subsystem_id=device.subsystem_id,
        numa_node=device.numa_node,
        iommu_group=_NO_GROUP if device.iommu_group is None else device.iommu_group,
        bar_bytes=sum(device.bars),
    )


@dataclass(frozen=True, slots=True)
class PlannedBinding:
    """A binding and what it changes; `moving` says that devices are taken from their holders first."""

    spec: BindingSpec
    changes: tuple[Change, ...]
    moving: bool


def plan_binding(name: str, topology: Topology, facts: Facts) -> PlannedBinding:
    """Plan a pool's devices onto its driver; devices that are there already are left alone."""
    pool = topology.pools[name]
    others = sorted(a for other, p in topology.pools.items() if other != name for a in p.devices)
    functions = _functions(pool.devices, facts)
    moving = [change for function in functions for change in _driver_changes(function, pool.driver)]
    changes = [*moving, *(c for f in functions for c in _boot_changes(f, pool.driver))]
    changes += _left(name, {*pool.devices, *others}, facts)
    desired = {"driver": pool.driver.value, "devices": sorted(map(str, pool.devices))}
    live = [[str(f.address), f.driver] for f in functions]
    persistent = [[str(f.address), f.driver_override, f.persisted] for f in functions]
    spec = BindingSpec(
        pool=name,
        driver=pool.driver.value,
        devices=tuple(map(str, pool.devices)),
        others=tuple(map(str, others)),
        drain_revision=revision(f"drain:{name}", as_wanted=not moving, desired=desired, observed=live, facts=facts),
        revision=revision(
            f"binding:{name}",
            as_wanted=not changes,
            desired=desired,
            observed=[live, persistent, [str(change) for change in changes]],
            facts=facts,
        ),
    )
    return PlannedBinding(spec, (*_membership(name, pool, facts), *changes), bool(moving))


def _functions(addresses: Iterable[PciAddress], facts: Facts) -> list[DeviceFacts]:
    """All functions of the cards: a card's audio function moves with its GPU."""
    slots = {address.slot for address in addresses}
    found = [d for d in facts.devices if d.address.slot in slots and not d.pci_class.startswith(_BRIDGE)]
    return sorted(found, key=lambda device: device.address)


def _follows_gpu(function: DeviceFacts, driver: Driver) -> bool:
    """Every function goes to vfio-pci; only the GPU itself goes to nvidia, the rest back to the kernel's choice."""
    return driver is Driver.VFIO or function.pci_class.startswith(_DISPLAY)


def _driver_changes(function: DeviceFacts, driver: Driver) -> Iterator[Change]:
    before = function.driver or "no driver"
    if not _follows_gpu(function, driver):
        if function.driver == Driver.VFIO:
            yield Change(str(function.address), "driver", before, "as found")
    elif function.driver != driver:
        yield Change(str(function.address), "driver", before, driver.value)


def _boot_changes(function: DeviceFacts, driver: Driver) -> Iterator[Change]:
    """The persistent half where the live one is right; for nvidia no override is as good, for vfio-pci nothing else."""
    if not _follows_gpu(function, driver) or function.driver != driver:
        return
    wanted = {driver.value} if driver is Driver.VFIO else {None, driver.value}
    if function.persisted not in wanted or function.driver_override not in {None, driver.value}:
        before = function.persisted or function.driver_override or "the kernel's choice"
        yield Change(str(function.address), "driver at boot", before, driver.value)


def _left(name: str, owned: set[PciAddress], facts: Facts) -> Iterator[Change]:
    """Devices that the host's book has in this pool and the configuration in none; a card taken out is not there."""
    slots = {address.slot for address in owned}
    for address, entry in sorted(facts.ledger.devices.items()):
        if entry.pool == name and address.slot not in slots and facts.device(address):
            yield Change(str(address), "owner", f"pool {name}", "handed back as found")


def _membership(name: str, pool: Pool, facts: Facts) -> Iterator[Change]:
    known = [facts.device(a) for a, entry in sorted(facts.ledger.devices.items()) if entry.pool == name]
    before = {d.address for d in known if d and d.pci_class.startswith(_DISPLAY)}
    after = set(pool.devices)
    if before and before != after:
        yield Change(f"pool {name}", "devices", _counted(before), _counted(after))


def _counted(addresses: set[PciAddress]) -> str:
    return f"{len(addresses)} ({listed(a.short for a in sorted(addresses))})"


def mapping_specs(topology: Topology, facts: Facts) -> tuple[MappingSpec, ...]:
    """The PCI resource mappings that VMs use, one entry per card."""
    pools = {vm.mapping: vm.pool for _, vm in sorted(topology.vms.items())}
    return tuple(
        MappingSpec(
            name=name,
            node=topology.host.node,
            pool=pool,
            entries=tuple(_mapping_entry(d, facts) for d in _devices(topology.pools[pool], facts)),
        )
        for name, pool in sorted(pools.items())
    )


def _mapping_entry(device: DeviceFacts, facts: Facts) -> MappingEntry:
    """An entry as Proxmox checks it at VM start; a path without a function passes all of a card's functions."""
    several = len(_functions([device.address], facts)) > 1
    return MappingEntry(
        path=device.address.slot if several else str(device.address),
        id=device.pci_id,
        subsystem_id=device.subsystem_id,
        iommu_group=_NO_GROUP if device.iommu_group is None else device.iommu_group,
    )
