"""VfioBinding: a pool's devices handed to vfio-pci, or back to nvidia: first drained, then bound and persisted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pulumi

from host.resources.binding import DriverBinding
from topology.rules import check_binding, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from components.access import HostAccess
    from topology.spec import BindingSpec


@dataclass(frozen=True, kw_only=True)
class VfioBindingArgs:
    """What to bind; `managed` names the services and VMs that a drain may stop."""

    binding: BindingSpec
    managed: Mapping[str, object]
    access: HostAccess
    after: Sequence[pulumi.Resource] = ()


class VfioBinding(pulumi.ComponentResource):
    """A binding in two halves, so that every pool of a host can be drained before the first device is touched.

    `drained` is an action keyed by the devices and driver about to change; call `bind` once all drains are known.

    Raises:
        TopologyError: the binding breaks a rule.
    """

    def __init__(self, name: str, args: VfioBindingArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        refuse(check_binding(args.binding))
        super().__init__("gpu-topology:index:VfioBinding", name, {"binding": asdict(args.binding)}, opts)
        self._name, self._args = name, args
        binding = args.binding
        self.drained = args.access.action(
            f"{name}-drain",
            "drain",
            {
                "pool": binding.pool,
                "devices": list(binding.devices),
                "driver": binding.driver,
                "revision": binding.drain_revision,
            },
            triggers=[binding.drain_revision],
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(args.after)),
        )

    def bind(self, drains: Sequence[pulumi.Resource]) -> DriverBinding:
        """Bind once `drains` (those of every pool of the host) are done."""
        binding = self._args.binding
        bound = DriverBinding(
            f"{self._name}-driver",
            {
                "pool": binding.pool,
                "devices": list(binding.devices),
                "driver": binding.driver,
                "others": list(binding.others),
                "managed": self._args.managed,
                "revision": binding.revision,
            },
            pulumi.ResourceOptions(parent=self, depends_on=[self.drained, *drains]),
        )
        self.register_outputs({"devices": list(binding.devices), "driver": binding.driver})
        return bound
