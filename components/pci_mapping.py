"""PciMapping: the PCI resource mapping a VM names instead of addresses; ids and IOMMU groups come from live sysfs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pulumi
from pulumi_proxmoxve.hardware.mapping import Pci, PciMapArgs

from topology.compare import mapping_changes
from topology.rules import check_mapping, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulumi_proxmoxve import Provider

    from topology.facts import MappingEntryFacts, MappingFacts
    from topology.spec import MappingEntry, MappingSpec

DEFAULT_COMMENT = "GPUs of one pool; written by gpu-topology"


@dataclass(frozen=True, kw_only=True)
class PciMappingArgs:
    """The mapping, and the one of that name which the host has already, if any."""

    mapping: MappingSpec
    provider: Provider
    found: MappingFacts | None = None
    after: Sequence[pulumi.Resource] = ()


class PciMapping(pulumi.ComponentResource):
    """A mapping; depend on `mapped`.

    Raises:
        TopologyError: the mapping breaks a rule.
    """

    def __init__(self, name: str, args: PciMappingArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        refuse(check_mapping(args.mapping))
        super().__init__("gpu-topology:index:PciMapping", name, {"mapping": asdict(args.mapping)}, opts)
        mapping = args.mapping
        own = [_map(mapping.node, entry) for entry in mapping.entries]
        self.mapped = Pci(
            f"{name}-mapping",
            name=mapping.name,
            # As found, also where there is none: an import whose inputs differ from what is there fails.
            comment=DEFAULT_COMMENT if args.found is None else args.found.description,
            maps=[*own, *_of_other_nodes(args)],
            opts=pulumi.ResourceOptions(
                parent=self,
                provider=args.provider,
                depends_on=list(args.after),
                # Proxmox has no rename: the provider's in-place PUT to the new name fails.
                replace_on_changes=["name"],
                delete_before_replace=True,
                # Taken over as it is; one that differs and is in no state is Proxmox's to refuse, not ours to rewrite.
                import_=mapping.name if _is_as_wanted(args) else None,
                # One that was there before us stays when we go, since somebody's VM may name it.
                retain_on_delete=args.found is not None and args.found.description != DEFAULT_COMMENT,
            ),
        )
        self.register_outputs({"name": mapping.name, "paths": [entry.path for entry in mapping.entries]})


def _map(node: str, entry: MappingEntry | MappingEntryFacts) -> PciMapArgs:
    return PciMapArgs(
        id=entry.id,
        node=node,
        path=entry.path,
        iommu_group=entry.iommu_group,
        subsystem_id=entry.subsystem_id,
    )


def _of_other_nodes(args: PciMappingArgs) -> list[PciMapArgs]:
    """A mapping is the whole cluster's: what it says of other nodes stays."""
    entries = () if args.found is None else args.found.entries
    return [_map(entry.node, entry) for entry in entries if entry.node != args.mapping.node]


def _is_as_wanted(args: PciMappingArgs) -> bool:
    return args.found is not None and not mapping_changes(args.found, args.mapping)
