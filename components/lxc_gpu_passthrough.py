"""LxcGpuPassthrough: an LXC container is given exactly its pool's GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pulumi

from host.resources.container import ContainerGpus
from topology.rules import check_container, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topology.spec import ContainerSpec, PoolSpec


@dataclass(frozen=True, kw_only=True)
class LxcGpuPassthroughArgs:
    """The container and its pool."""

    container: ContainerSpec
    pool: PoolSpec
    after: Sequence[pulumi.Resource] = ()


class LxcGpuPassthrough(pulumi.ComponentResource):
    """A container's GPUs; depend on `passed`.

    Raises:
        TopologyError: the container's pool is not on nvidia, or another rule is broken.
    """

    def __init__(self, name: str, args: LxcGpuPassthroughArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        container = args.container
        refuse(check_container(container, args.pool))
        super().__init__("gpu-topology:index:LxcGpuPassthrough", name, {"container": asdict(container)}, opts)
        self.passed = ContainerGpus(
            f"{name}-gpus",
            {
                "vmid": container.vmid,
                "devices": list(container.devices),
                "style": container.passthrough,
                "units": list(container.units),
                "revision": container.revision,
            },
            pulumi.ResourceOptions(parent=self, depends_on=list(args.after)),
        )
        self.register_outputs({"vmid": container.vmid, "devices": list(container.devices)})
