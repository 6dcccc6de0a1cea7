"""Facts first: what the host must be like before anything on it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topology.compare import vm_devices
from topology.config import Driver, FactsSource
from topology.lxc import passed_devices
from topology.presets import resolve_gpu
from topology.problem import Problem, TopologyError
from topology.rules.catalogue import broken
from topology.rules.pools import no_group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.address import PciAddress
    from topology.config import Pool, Topology
    from topology.facts import DeviceFacts, Facts

_DISPLAY = "03"
_BRIDGES = ("0604", "0600")
"""PCI-to-PCI and host bridges: members of a group that VFIO allows beside its devices. An NVSwitch, 0680, is none."""

_KINDS = {
    "0108": "an NVMe disk",
    "0106": "a SATA controller",
    "0200": "a network card",
    "0207": "an InfiniBand card",
    "0403": "an audio function",
    "0600": "a host bridge",
    "0604": "a PCI bridge",
    "0680": "a bridge such as an NVSwitch",
    "0c03": "a USB controller",
}

_MEMORY_TOLERANCE = 0.02
"""nvidia-smi's total differs a little between driver versions and with ECC on or off."""


def check_facts(topology: Topology, facts: Facts) -> tuple[Problem, ...]:
    """Judge a host's facts against the stack file."""
    declared = {device for pool in topology.pools.values() for device in pool.devices}
    return (
        *_host(topology, facts),
        *_errors(topology, declared, facts),
        *(problem for name, pool in topology.pools.items() for problem in _pool(name, pool, facts)),
        *_guests(topology, facts),
        *_undeclared(topology, facts),
    )


def _kind(device: DeviceFacts) -> str:
    """Say what a PCI function is, by its class and ids."""
    what = "a display controller" if device.pci_class.startswith(_DISPLAY) else _KINDS.get(device.pci_class[:4])
    return f"{what or 'a device'} (class {device.pci_class[:4]}, {device.pci_id})"


def _host(topology: Topology, facts: Facts) -> Iterator[Problem]:
    hostname = facts.host.hostname.split(".", 1)[0]
    if hostname != topology.host.node:
        yield broken(
            "host-name",
            f"host {topology.host.node}",
            f"is {hostname!r} at {topology.host.address}",
            "changing another hypervisor than the one meant would be a disaster",
            f"correct host.address, or write host.node: {hostname}",
        )


def _errors(topology: Topology, declared: set[PciAddress], facts: Facts) -> Iterator[Problem]:
    # A guest that could not be asked looks like one without GPUs and services: planning on would restart it.
    needed = (("pct", topology.containers), ("qm", topology.vms), ("systemctl", topology.services))
    commands = [command for command, guests in needed if guests]
    for error in facts.errors:
        devices = sorted(str(device) for device in declared if str(device) in error)
        concerned = bool(devices) or any(command in error for command in commands)
        yield broken(
            "facts-complete" if concerned else "facts-partial",
            f"device {', '.join(devices)}" if devices else f"host {facts.host.hostname}",
            f"could not be read: {error}",
            "what is not known cannot be checked or compared" if concerned else "a rule may have seen too little",
            "look at `dmesg`, `pct list`, `qm list` and `nvidia-smi` on the host, and plan again",
        )


def _pool(name: str, pool: Pool, facts: Facts) -> Iterator[Problem]:
    for address in pool.devices:
        subject = f"pool {name}, device {address}"
        device = facts.device(address)
        if device is None:
            yield _missing(subject, address, facts)
        elif not device.alive:
            yield broken(
                "device-answers",
                subject,
                "does not answer: its configuration space reads ffffffff",
                "a card that fell off the bus keeps its directory and is of no use",
                "take it out of the pool, or power-cycle the host (a warm reboot does not always help)",
            )
        elif not device.pci_class.startswith(_DISPLAY):
            yield _no_gpu(subject, device, facts)
        else:
            yield from _gpu(subject, pool, device, facts)
            yield from _group(subject, pool, device, facts)
    yield from _vfio_ids(name, pool, facts)


def _missing(subject: str, address: PciAddress, facts: Facts) -> Problem:
    return broken(
        "device-exists",
        subject,
        f"is not on host {facts.host.hostname}",
        "every declared address must exist there",
        f"correct {address.short}; GPUs there: {_gpus(facts)}",
    )


def _no_gpu(subject: str, device: DeviceFacts, facts: Facts) -> Problem:
    return broken(
        "device-is-gpu",
        subject,
        f"is {_kind(device)}",
        "a pool holds GPUs; a card's other functions follow by themselves",
        f"correct the address; GPUs there: {_gpus(facts)}",
    )


def _gpus(facts: Facts) -> str:
    gpus = [d.address.short for d in facts.devices if d.pci_class.startswith(_DISPLAY) and not d.boot_vga]
    return ", ".join(gpus) or "none"


def _gpu(subject: str, pool: Pool, device: DeviceFacts, facts: Facts) -> Iterator[Problem]:
    try:
        gpu = resolve_gpu(pool)
    except TopologyError:
        return  # check_config names the unknown preset
    if device.pci_id != gpu.pci_id:
        yield broken(
            "device-is-gpu",
            subject,
            f"is {_kind(device)}{f', {device.name}' if device.name else ''}",
            f"the pool declares {gpu.name}, {gpu.pci_id}",
            "correct the address, or the pool's gpu",
        )
    elif device.memory_mib is not None and abs(device.memory_mib / gpu.memory_mib - 1) > _MEMORY_TOLERANCE:
        yield broken(
            "device-memory",
            subject,
            f"has {device.memory_mib:,} MiB",
            f"the pool declares {gpu.memory_mib:,} MiB, by which it is judged what fits",
            "correct the pool's gpu",
        )
    yield from _numa(subject, pool, device, facts)
    if device.sriov_vfs or device.mig:
        found = f"has {device.sriov_vfs} SR-IOV functions" if device.sriov_vfs else "is sliced by MIG"
        yield broken(
            "device-whole",
            subject,
            found,
            "a pool's GPUs are given whole",
            "write 0 to its sriov_numvfs" if device.sriov_vfs else f"run `nvidia-smi -i {device.address} -mig 0`",
        )
    if device.boot_vga:
        vfio = pool.driver is Driver.VFIO
        yield broken(
            "boot-vga" if vfio else "boot-vga-shared",
            subject,
            "is the boot console",
            "the host's console would vanish with it" if vfio else "the console uses some of it",
            "choose another primary display in the BIOS, or another card for the pool",
        )


def _numa(subject: str, pool: Pool, device: DeviceFacts, facts: Facts) -> Iterator[Problem]:
    nodes = ", ".join(map(str, facts.numa_nodes))
    if device.numa_node < 0:
        if len(facts.numa_nodes) > 1:
            yield broken(
                "numa-node",
                subject,
                "is on NUMA node -1",
                f"-1 is unknown, which only a host with a single node may ignore; this one has {nodes}",
                "set the NUMA options in the BIOS so that the kernel learns the slot's node",
            )
        elif pool.numa_node is not None and pool.numa_node not in facts.numa_nodes:
            why = f"this host has {nodes}"
            yield broken("numa-node", subject, f"is declared on NUMA node {pool.numa_node}", why, f"write {nodes}")
    elif pool.numa_node is not None and device.numa_node != pool.numa_node:
        yield broken(
            "numa-node",
            subject,
            f"is on NUMA node {device.numa_node}, and the pool declares {pool.numa_node}",
            "a pool does not span NUMA nodes unless it says so",
            f"move it to a pool of node {device.numa_node}, correct numaNode, or write spanNumaNodes: true instead",
        )


def _group(subject: str, pool: Pool, device: DeviceFacts, facts: Facts) -> Iterator[Problem]:
    vfio = pool.driver is Driver.VFIO
    if device.iommu_group is None:
        if vfio:
            yield no_group(subject, str(device.address))
        return
    own = {address.slot for address in pool.devices}
    foreign = [
        f"{other.address}, {_kind(other)}"
        for other in facts.devices
        if other.iommu_group == device.iommu_group
        and other.address.slot not in own
        and not other.pci_class.startswith(_BRIDGES)
    ]
    if foreign:
        yield broken(
            "iommu-group" if vfio else "iommu-group-mixed",
            subject,
            f"shares IOMMU group {device.iommu_group} with {'; '.join(foreign)}",
            "VFIO hands a group to a VM whole",
            "put the whole group into the pool, or move the card to a slot with a group of its own (ACS in the BIOS)",
        )


def _vfio_ids(name: str, pool: Pool, facts: Facts) -> Iterator[Problem]:
    if pool.driver is not Driver.NVIDIA:
        return
    ids = {device.pci_id for address in pool.devices if (device := facts.device(address))}
    for taken in sorted(ids & set(facts.vfio_ids)):
        yield broken(
            "vfio-ids",
            f"pool {name}",
            f"has GPUs of id {taken}, which vfio-pci takes by ids= at boot",
            "ids= cannot tell identical cards apart, so after a reboot these may come up on the wrong driver",
            "remove ids= from /etc/modprobe.d or the kernel's command line, and run update-initramfs -u",
        )


def _guests(topology: Topology, facts: Facts) -> Iterator[Problem]:
    containers = [c.vmid for c in facts.containers if c.exists]
    vms = [v.vmid for v in facts.vms if v.exists]
    recorded = topology.host.facts is FactsSource.RECORDED
    again = "; or record the host again: a recording holds what the stack file named at that time" if recorded else ""
    for vmid in topology.containers:
        if facts.container(vmid) is None:
            yield _no_guest("container", vmid, containers, "VM" if vmid in vms else "", f"`pct list` lists all){again}")
    for vmid, vm in topology.vms.items():
        if facts.vm(vmid) is None and vm.whole is None:
            yield _no_guest("VM", vmid, vms, "container" if vmid in containers else "", f"`qm list` lists all){again}")


def _no_guest(what: str, vmid: int, known: list[int], other: str, more: str) -> Problem:
    listed = ", ".join(map(str, sorted(known))) or "none seen"
    return broken(
        "guest-exists",
        f"{what} {vmid}",
        f"is a {other} on this host" if other else "does not exist on this host",
        f"GPUs are given to a {what} that is there",
        f"correct the VMID; {what}s there: {listed} ({more}",
    )


def _undeclared(topology: Topology, facts: Facts) -> Iterator[Problem]:
    """A second owner, once it is started; one that this program gave its GPUs is handed back by the plan."""
    declared = {device.slot: device for pool in topology.pools.values() for device in pool.devices}
    managed = facts.ledger.managed
    given = [
        (f"container {c.vmid}", c.status, {address.slot for address in passed_devices(c, facts)})
        for c in facts.containers
        if c.vmid not in topology.containers and c.vmid not in managed.containers
    ]
    given += [
        (f"VM {v.vmid}", v.status, vm_devices(v, facts))
        for v in facts.vms
        if v.vmid not in topology.vms and v.vmid not in managed.vms
    ]
    for guest, status, slots in given:
        if shared := sorted(declared[slot].short for slot in slots & declared.keys()):
            yield broken(
                "guest-undeclared",
                guest,
                f"is given {', '.join(shared)} by its configuration and is {status or 'in an unknown state'}",
                "a GPU has one owner, and this guest takes it, or fails, at its next start",
                "take the GPU out of its configuration, or name the guest in the stack file",
            )
