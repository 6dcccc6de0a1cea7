"""Containers and virtual machines with the GPUs of their pools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from topology.changes import ABSENT, Change
from topology.compare import hostpci, hostpci_changes, same_devices
from topology.lxc import container_changes
from topology.plan_pools import pool_spec
from topology.revision import revision
from topology.spec import ContainerSpec, VmSpec, WholeVmSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.config import Topology, WholeVm
    from topology.facts import Facts
    from topology.spec import MappingSpec


@dataclass(frozen=True, slots=True)
class PlannedContainer:
    """A container and what it changes."""

    spec: ContainerSpec
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class PlannedVm:
    """A VM and what it changes."""

    spec: VmSpec
    changes: tuple[Change, ...]


def unit_name(name: str, topology: Topology) -> str:
    """A service's unit: as configured, else after the service."""
    return topology.services[name].unit or f"{name}.service"


def plan_container(vmid: int, topology: Topology, facts: Facts) -> PlannedContainer:
    """Plan a container's GPU lines; lines that already pass exactly these GPUs are left as they are."""
    container = topology.containers[vmid]
    pool = topology.pools[container.pool]
    units = tuple(unit_name(n, topology) for n, s in sorted(topology.services.items()) if s.container == vmid)
    found = facts.container(vmid)
    changes: tuple[Change, ...] = (Change(f"lxc {vmid}", "container", ABSENT, "present"),)
    if found is not None:
        changes = container_changes(found, pool.devices, facts)
        if units and found.status != "running":
            changes = (*changes, Change(f"lxc {vmid}", "state", found.status or "unknown", "running"))
    spec = ContainerSpec(
        vmid=vmid,
        pool=container.pool,
        driver=pool.driver.value,
        devices=tuple(map(str, pool.devices)),
        passthrough=container.passthrough.value,
        units=units,
        revision=revision(
            f"container:{vmid}",
            as_wanted=not changes,
            desired={"devices": sorted(map(str, pool.devices)), "style": container.passthrough.value},
            observed=[found and found.config, found and found.status, [str(change) for change in changes]],
            facts=facts,
        ),
    )
    return PlannedContainer(spec, changes)


def plan_vm(vmid: int, topology: Topology, facts: Facts, mapping: MappingSpec) -> PlannedVm:
    """Plan a VM's hostpci entries and power state; Proxmox's API compares the rest of one that is created whole."""
    vm = topology.vms[vmid]
    pool = pool_spec(vm.pool, topology, facts)
    found = facts.vm(vmid)
    config = (found and found.config) or ""
    changes = tuple(_vm_changes(vmid, topology, facts, mapping))
    observed = [hostpci(config), found and found.status, [str(change) for change in changes]]
    spec = VmSpec(
        vmid=vmid,
        pool=vm.pool,
        driver=pool.driver,
        mapping=vm.mapping,
        devices=pool.addresses,
        bar_bytes=sum(device.bar_bytes for device in pool.devices),
        sev_snp=vm.sev_snp,
        start=vm.start,
        cpu=vm.whole.cpu_type if vm.whole else _value(config, "cpu"),
        args="" if vm.whole else _value(config, "args"),
        whole=_whole(vm.whole),
        revision=revision(
            f"vm:{vmid}",
            as_wanted=not changes,
            desired={"mapping": vm.mapping, "devices": sorted(pool.addresses), "start": vm.start},
            observed=observed,
            facts=facts,
        ),
    )
    return PlannedVm(spec, changes)


def _vm_changes(vmid: int, topology: Topology, facts: Facts, mapping: MappingSpec) -> Iterator[Change]:
    vm, found = topology.vms[vmid], facts.vm(vmid)
    if found is None:
        yield Change(f"vm {vmid}", "machine", ABSENT, "created" if vm.whole else "present")
        return
    yield from hostpci_changes(found, mapping, facts)
    have = next((m for m in facts.mappings if m.id == mapping.name), None)
    if found.status == "running" and have is not None and not same_devices(have, mapping):
        # Its entries stay the same words, but a running machine keeps the devices that it was started with.
        yield Change(f"vm {vmid}", "devices", "those of the mapping before", "those of the mapping after a restart")
    drained = any((e.get("kind"), e.get("vmid")) == ("vm", vmid) for e in facts.ledger.drained)
    if (vm.start or drained) and found.status != "running":
        yield Change(f"vm {vmid}", "state", found.status or "unknown", "running")


def _value(config: str, key: str) -> str:
    """A key of the VM's current configuration, empty if it is not set."""
    current = re.split(r"^\[", config, maxsplit=1, flags=re.MULTILINE)[0]
    match = re.search(rf"^{key}:[ \t]*(.*?)[ \t]*$", current, re.MULTILINE)
    return match[1] if match else ""


def _whole(whole: WholeVm | None) -> WholeVmSpec | None:
    if whole is None:
        return None
    return WholeVmSpec(
        name=whole.name,
        cores=whole.cores,
        memory_mib=whole.memory_mib,
        cpu_type=whole.cpu_type,
        disk_storage=whole.disk_storage,
        disk_gib=whole.disk_gib,
        network_bridge=whole.network_bridge,
        on_boot=whole.on_boot,
    )
