"""SglangService: the unit file with its computed tensor parallelism, a restart until a token comes, a verification."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pulumi

from host.resources.agent_resource import OBSERVED
from host.resources.canonical import CanonicalUnit
from host.resources.unit import UnitFile, secret_in_clear
from topology.rules import check_service, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
        text = _guarded(service.text)
        # A drop-in of the host's administrator may set a token, too.
        environment = {key: _guarded(value, key) for key, value in service.effective_environment.items()}
        shown = asdict(service) | {"text": text, "effective_environment": environment}
        super().__init__("gpu-topology:index:SglangService", name, {"service": shown, "host": asdict(args.host)}, opts)
        # What was observed is the text again.
        hidden = [OBSERVED] if isinstance(text, pulumi.Output) else []
        child = pulumi.ResourceOptions(parent=self, additional_secret_outputs=hidden)
        place = {"name": service.name, "unit": service.unit, "container": service.container}
        self.unit = UnitFile(
            f"{name}-unit",
            {
                **place,
                "path": service.path,
                "text": text,
                "tp": service.tp,
                "enabled": service.enabled,
                "revision": service.unit_revision,
            },
            pulumi.ResourceOptions.merge(child, pulumi.ResourceOptions(depends_on=list(args.after))),
        )
        self.serving = args.access.action(
            f"{name}-serving",
            "serve",
            _keyed(_served(service), args.api_key),
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
            _keyed(
                {**place, "port": service.port, "tp": service.tp, "gpus": len(service.devices)},
                args.api_key,
                lambda server: {"service": server},
            ),
            triggers=[service.revision],
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self.serving]),
        )
        self.copy = CanonicalUnit(
            f"{name}-copy",
            {"path": service.canonical_unit, "text": text, "revision": args.copy_revision},
            pulumi.ResourceOptions.merge(child, pulumi.ResourceOptions(depends_on=[self.unit])),
        )
        self.register_outputs({"tp": service.tp, "unit": service.unit, "devices": list(service.devices)})


def _guarded(text: str, variable: str = "") -> pulumi.Input[str]:
    """A unit's text, or a variable's value; a secret that somebody wrote on the host must not reach the state."""
    held = f"{variable}={text}" if variable else text
    return pulumi.Output.secret(text) if secret_in_clear(held) else text


def _served(service: ServiceSpec) -> dict[str, object]:
    return {
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


def _keyed(
    server: Mapping[str, object],
    api_key: pulumi.Output[str] | None,
    shape: Callable[[dict[str, object]], dict[str, object]] = dict,
) -> pulumi.Output[str] | dict[str, object]:
    """The request about a server, in the operation's shape; a secret as a whole where the server asks for a key."""
    if api_key is None:
        return shape({**server})
    return api_key.apply(lambda key: json.dumps(shape({**server, "api_key": key}), sort_keys=True))
