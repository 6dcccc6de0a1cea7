"""PciMapping: the PCI resource mapping a VM names instead of addresses; ids and IOMMU groups come from live sysfs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pulumi
from pulumi_proxmoxve.hardware.mapping import Pci, PciMapArgs

from topology.rules import check_mapping, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulumi_proxmoxve import Provider

    from topology.spec import MappingSpec

DEFAULT_COMMENT = "GPUs of one pool; written by gpu-topology"


@dataclass(frozen=True, kw_only=True)
class PciMappingArgs:
    """The mapping; one that the host has already is `found`, and taken over with its own `comment`."""

    mapping: MappingSpec
    provider: Provider
    found: bool = False
    comment: str = DEFAULT_COMMENT
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
        self.mapped = Pci(
            f"{name}-mapping",
            name=mapping.name,
            comment=args.comment,
            maps=[
                PciMapArgs(
                    id=entry.id,
                    node=mapping.node,
                    path=entry.path,
                    iommu_group=entry.iommu_group,
                    subsystem_id=entry.subsystem_id,
                )
                for entry in mapping.entries
            ],
            opts=pulumi.ResourceOptions(
                parent=self,
                provider=args.provider,
                depends_on=list(args.after),
                # Proxmox has no rename: the provider's in-place PUT to the new name fails.
                replace_on_changes=["name"],
                delete_before_replace=True,
                import_=mapping.name if args.found else None,
            ),
        )
        self.register_outputs({"name": mapping.name, "paths": [entry.path for entry in mapping.entries]})
