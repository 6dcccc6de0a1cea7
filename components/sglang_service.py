"""SglangService: the unit file with its computed tensor parallelism, a restart until a token comes, a verification."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pulumi

from host.resources.canonical import CanonicalUnit
from host.resources.unit import UnitFile
from topology.rules import check_service, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from components.access import HostAccess
    from topology.spec import HostSpec, ServiceSpec


@dataclass(frozen=True, kw_only=True)
class SglangServiceArgs:
    """The service and its host; `api_key` (a secret) is needed only where the server asks for one."""

    service: ServiceSpec
    host: HostSpec
    access: HostAccess
    copy_revision: str
    api_key: pulumi.Output[str] | None = None
    after: Sequence[pulumi.Resource] = ()


class SglangService(pulumi.ComponentResource):
    """A service; depend on `verified`.

    Raises:
        TopologyError: tensor parallelism, memory or the NCCL environment breaks a rule.
    """

    def __init__(self, name: str, args: SglangServiceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        service = args.service
        refuse(check_service(service))
        props = {"service": asdict(service), "host": asdict(args.host)}
        super().__init__("gpu-topology:index:SglangService", name, props, opts)
        child = pulumi.ResourceOptions(parent=self)
        place = {"name": service.name, "unit": service.unit, "container": service.container}
        self.unit = UnitFile(
            f"{name}-unit",
            {
                **place,
                "path": service.path,
                "text": _guarded(service.text),
                "tp": service.tp,
                "enabled": service.enabled,
                "revision": service.unit_revision,
            },
            pulumi.ResourceOptions(parent=self, depends_on=list(args.after)),
        )
        self.serving = args.access.action(
            f"{name}-serving",
            "serve",
            _request(args),
            triggers=[service.revision, service.tp, list(service.devices)],
            delete="stop",
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=[self.unit, *args.after],
                # Deleting the old one afterwards would stop what the new one has just started.
                delete_before_replace=True,
            ),
        )
        self.verified = args.access.action(
            f"{name}-verified",
            "verify",
            {"service": {**place, "port": service.port, "tp": service.tp, "gpus": len(service.devices)}},
            triggers=[service.revision],
            opts=pulumi.ResourceOptions.merge(child, pulumi.ResourceOptions(depends_on=[self.serving])),
        )
        self.copy = CanonicalUnit(
            f"{name}-copy",
            {"path": service.canonical_unit, "text": _guarded(service.text), "revision": args.copy_revision},
            pulumi.ResourceOptions(parent=self, depends_on=[self.unit]),
        )
        self.register_outputs({"tp": service.tp, "unit": service.unit, "devices": list(service.devices)})


def _guarded(text: str) -> pulumi.Input[str]:
    """A unit found on the host may hold a key in clear, which must not reach the state."""
    return pulumi.Output.secret(text) if "api-key" in text or "API_KEY" in text else text


def _request(args: SglangServiceArgs) -> pulumi.Output[str] | dict[str, object]:
    service = args.service
    request: dict[str, object] = {
        "name": service.name,
        "unit": service.unit,
        "container": service.container,
        "port": service.port,
        "tp": service.tp,
        "gpus": len(service.devices),
        "devices": list(service.devices),
        "environment": service.environment,
        "enabled": service.enabled,
        "deadline_s": service.deadline_s,
        "token_timeout_s": service.token_timeout_s,
        "translated_iommu": service.translated_iommu,
        "model": service.served_name,
        "revision": service.revision,
    }
    if args.api_key is not None:
        return args.api_key.apply(lambda key: json.dumps(request | {"api_key": key}, sort_keys=True))
    return request
