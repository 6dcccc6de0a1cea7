"""ConfidentialVm: a virtual machine, under SEV-SNP where asked for, with its pool's GPUs by PCI resource mapping."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pulumi
from pulumi_proxmoxve import (
    VmLegacy,
    VmLegacyAmdSevArgs,
    VmLegacyCpuArgs,
    VmLegacyDiskArgs,
    VmLegacyHostpciArgs,
    VmLegacyMemoryArgs,
    VmLegacyNetworkDeviceArgs,
)

from host.resources.vm import VmGpus
from topology.rules import check_vm, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulumi_proxmoxve import Provider

    from topology.spec import HostSpec, VmSpec, WholeVmSpec


@dataclass(frozen=True, kw_only=True)
class ConfidentialVmArgs:
    """The VM and its host."""

    vm: VmSpec
    host: HostSpec
    provider: Provider
    after: Sequence[pulumi.Resource] = ()


class ConfidentialVm(pulumi.ComponentResource):
    """A VM with GPUs: managed whole, or only its hostpci entries and power state; depend on `machine`.

    Raises:
        TopologyError: the VM breaks a rule.
    """

    def __init__(self, name: str, args: ConfidentialVmArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        vm = args.vm
        refuse(check_vm(vm))
        super().__init__("gpu-topology:index:ConfidentialVm", name, {"vm": asdict(vm), "host": asdict(args.host)}, opts)
        child = pulumi.ResourceOptions(parent=self, depends_on=list(args.after))
        if vm.whole is not None:
            # The provider starts a machine when `started` changes, not one that a drain stopped: the agent does.
            made = _whole(name, vm, vm.whole, args, child)
            child = pulumi.ResourceOptions(parent=self, depends_on=[made])
        self.machine = _gpus(name, vm, child)
        self.register_outputs({"vmid": vm.vmid, "devices": list(vm.devices)})


def _gpus(name: str, vm: VmSpec, opts: pulumi.ResourceOptions) -> VmGpus:
    props: dict[str, object] = {
        "vmid": vm.vmid,
        "mapping": vm.mapping,
        "count": len(vm.devices),
        "start": vm.start,
        "pool": vm.pool,
        "devices": list(vm.devices),
        "revision": vm.revision,
    }
    return VmGpus(f"{name}-gpus", props, opts)


def _whole(
    name: str, vm: VmSpec, whole: WholeVmSpec, args: ConfidentialVmArgs, opts: pulumi.ResourceOptions
) -> VmLegacy:
    return VmLegacy(
        f"{name}-machine",
        vm_id=vm.vmid,
        name=whole.name,
        node_name=args.host.node,
        machine="q35",
        bios="ovmf",
        on_boot=whole.on_boot,
        started=vm.start,
        # A guest of SEV-SNP answers no ACPI shutdown reliably, and a destroy must not wait for it.
        stop_on_destroy=True,
        cpu=VmLegacyCpuArgs(cores=whole.cores, type=whole.cpu_type),
        memory=VmLegacyMemoryArgs(dedicated=whole.memory_mib),
        amd_sev=VmLegacyAmdSevArgs(type="snp") if vm.sev_snp else None,
        # Proxmox refuses an EFI disk together with SEV-SNP; a list of disks is named because omitting it is a
        # perpetual difference in the provider.
        disks=[VmLegacyDiskArgs(interface="scsi0", datastore_id=whole.disk_storage, size=whole.disk_gib)],
        network_devices=[VmLegacyNetworkDeviceArgs(bridge=whole.network_bridge, model="virtio")],
        # Omitted, rombar would be sent as 0 without being said.
        hostpcis=[
            VmLegacyHostpciArgs(device=f"hostpci{index}", mapping=vm.mapping, pcie=True, rombar=False)
            for index in range(len(vm.devices))
        ],
        opts=pulumi.ResourceOptions.merge(
            opts,
            # Without `start` its power state is left alone: a refresh must not have it stopped under a person.
            pulumi.ResourceOptions(provider=args.provider, ignore_changes=[] if vm.start else ["started"]),
        ),
    )
