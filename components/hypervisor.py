"""The one order that works: check, drain, bind, map, containers and VMs, units, services; as dependency edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from components.agent_install import AgentInstall, AgentInstallArgs
from components.confidential_vm import ConfidentialVm, ConfidentialVmArgs
from components.gpu_pool import GpuPool, GpuPoolArgs
from components.lxc_gpu_passthrough import LxcGpuPassthrough, LxcGpuPassthroughArgs
from components.pci_mapping import PciMapping, PciMappingArgs
from components.sglang_service import SglangService, SglangServiceArgs
from components.vfio_binding import VfioBinding, VfioBindingArgs
from topology.managed import agent_revision, managed_by, managed_revision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pulumi
    from pulumi_proxmoxve import Provider

    from components.access import HostAccess
    from topology.plan import Plan
    from topology.spec import TopologySpec


@dataclass(frozen=True, kw_only=True)
class HypervisorArgs:
    """A plan and the ways to carry it out; `provider` is absent where nothing of Proxmox's API is used."""

    plan: Plan
    access: HostAccess
    provider: Provider | None
    bundle_folder: Path
    api_keys: Mapping[str, pulumi.Output[str]]


def build_hypervisor(args: HypervisorArgs) -> None:
    """Create every component of `args.plan`, each after what it needs."""
    spec = args.plan.spec
    managed = managed_by(spec)
    install = AgentInstall(
        "agent",
        AgentInstallArgs(
            access=args.access,
            managed=managed,
            revision=managed_revision(spec, args.plan.facts),
            file_revision=agent_revision(args.plan.facts),
            bundle_folder=args.bundle_folder,
        ),
    )
    access = replace(args.access, installed=install.ready)

    pools = {
        pool.name: GpuPool(pool.name, GpuPoolArgs(pool=pool, host=spec.host, access=access)) for pool in spec.pools
    }
    verified = [pool.verified for pool in pools.values()]
    bound = _bindings(spec, access, managed, verified)
    mapped = _mappings(args, bound)
    passed = _containers(spec, [*bound, *mapped])
    machines = _vms(args, [*bound, *mapped])
    _services(args, access, passed, [*bound, *machines])


def _bindings(
    spec: TopologySpec,
    access: HostAccess,
    managed: Mapping[str, object],
    verified: Sequence[pulumi.Resource],
) -> list[pulumi.Resource]:
    bindings = [
        VfioBinding(
            f"{binding.pool}-binding",
            VfioBindingArgs(binding=binding, managed=managed, access=access, after=verified),
        )
        for binding in spec.bindings
    ]
    # A device that moves between two pools is held by the one's guests and bound by the other: no device is touched
    # before the guests of all are drained.
    drains = [binding.drained for binding in bindings]
    return [binding.bind(drains) for binding in bindings]


def _mappings(args: HypervisorArgs, after: Sequence[pulumi.Resource]) -> list[pulumi.Resource]:
    found = {mapping.id: mapping for mapping in args.plan.facts.mappings}
    return [
        PciMapping(
            mapping.name,
            PciMappingArgs(
                mapping=mapping,
                provider=_required(args.provider),
                found=found.get(mapping.name),
                after=after,
            ),
        ).mapped
        for mapping in args.plan.spec.mappings
    ]


def _containers(spec: TopologySpec, after: Sequence[pulumi.Resource]) -> dict[int, pulumi.Resource]:
    pools = {pool.name: pool for pool in spec.pools}
    return {
        container.vmid: LxcGpuPassthrough(
            f"lxc-{container.vmid}",
            LxcGpuPassthroughArgs(container=container, pool=pools[container.pool], after=after),
        ).passed
        for container in spec.containers
    }


def _vms(args: HypervisorArgs, after: Sequence[pulumi.Resource]) -> list[pulumi.Resource]:
    return [
        ConfidentialVm(
            f"vm-{vm.vmid}",
            ConfidentialVmArgs(vm=vm, host=args.plan.spec.host, provider=_required(args.provider), after=after),
        ).machine
        for vm in args.plan.spec.vms
    ]


def _services(
    args: HypervisorArgs,
    access: HostAccess,
    passed: Mapping[int, pulumi.Resource],
    after: Sequence[pulumi.Resource],
) -> None:
    for service in args.plan.spec.services:
        own = [passed[service.container]] if service.container is not None else []
        SglangService(
            service.name,
            SglangServiceArgs(
                service=service,
                host=args.plan.spec.host,
                access=access,
                copy_revision=args.plan.copy_revisions[service.name],
                api_key=args.api_keys.get(service.name),
                after=[*own, *after],
            ),
        )


def _required(provider: Provider | None) -> Provider:
    if provider is None:
        raise RuntimeError("a plan with VMs or mappings was made without topology.proxmox, which its rules refuse")
    return provider
