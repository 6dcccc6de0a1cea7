"""GpuPool: a set of GPUs with one driver and one owner, verified against the host before anything changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pulumi

from topology.rules import check_pool, refuse

if TYPE_CHECKING:
    from components.access import HostAccess
    from topology.spec import DeviceSpec, HostSpec, PoolSpec


@dataclass(frozen=True, kw_only=True)
class GpuPoolArgs:
    """The pool and its host are plain values, so that policies and previews know them."""

    pool: PoolSpec
    host: HostSpec
    access: HostAccess


class GpuPool(pulumi.ComponentResource):
    """A pool; depend on `verified`, since a component alone orders nothing.

    Raises:
        TopologyError: the pool breaks a rule.
    """

    def __init__(self, name: str, args: GpuPoolArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        refuse(check_pool(args.pool, args.host))
        super().__init__(
            "gpu-topology:index:GpuPool", name, {"pool": asdict(args.pool), "host": asdict(args.host)}, opts
        )
        request = {"pool": args.pool.name, "devices": [_expected(device) for device in args.pool.devices]}
        self.verified = args.access.action(
            f"{name}-verified",
            "check-pool",
            request,
            triggers=[request],
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.register_outputs({"devices": list(args.pool.addresses), "driver": args.pool.driver})


def _expected(device: DeviceSpec) -> dict[str, object]:
    vendor, product = device.pci_id.split(":")
    return {
        "address": device.address,
        "vendor": vendor,
        "device": product,
        "numa_node": device.numa_node,
        "iommu_group": device.iommu_group,
    }
