"""What the program does, in order, and how a person's mistake ends it: one message for each, no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pulumi
from pulumi_proxmoxve import Provider

from components.access import HostAccess
from components.hypervisor import HypervisorArgs, build_hypervisor
from host.errors import HostError
from host.facts import gather_facts
from host.resources.canonical import read_copy
from host.target import target
from topology.export import topology_output
from topology.load import load_topology
from topology.plan import make_plan
from topology.problem import TopologyError
from topology.rules import service_fit

if TYPE_CHECKING:
    from topology.config import Proxmox, Topology

PROJECT = "gpu-topology"
_ALREADY_SHOWN = 32
"""The exit status that Pulumi's language host takes for "said what was wrong": it adds no message of its own.

A RunError would be followed by `Program exited with non-zero exit code: 1`.
"""

_BUNDLE_FOLDER = Path(".cache")


def run() -> None:
    """Load, look, plan, build, export; a mistake is shown, every problem by itself, and ends the program."""
    try:
        _build()
    except TopologyError as error:
        _end(*map(str, error.problems))
    except HostError as error:
        _end(str(error))


def _end(*messages: str) -> None:
    for message in messages:
        pulumi.log.error(message)
    sys.exit(_ALREADY_SHOWN)


def _build() -> None:
    base = Path.cwd()
    topology = load_topology(pulumi.Config(PROJECT).get_object("topology"))
    where = target(topology.host, private_key=_plain_secret("sshPrivateKey"), base=base)
    facts = gather_facts(topology, where, recorded=base / "facts" / f"{pulumi.get_stack()}.json")
    plan = make_plan(topology, facts, base=base, read_local=lambda path: read_copy(str(base / path)))
    for warning in plan.warnings:
        pulumi.warn(str(warning))
    fits = [f"service {service.name} at tp {service.tp}: {service_fit(service)}" for service in plan.spec.services]
    for line in (*plan.changes, *fits):
        pulumi.info(str(line))
    build_hypervisor(
        HypervisorArgs(
            plan=plan,
            access=HostAccess.to(where),
            provider=_proxmox(topology.proxmox),
            bundle_folder=base / _BUNDLE_FOLDER,
            api_keys=_api_keys(topology),
        ),
    )
    pulumi.export("topology", topology_output(plan.spec))


def _plain_secret(key: str) -> str | None:
    # The program itself connects with it; Config.get would warn that the value, used right here, is a secret.
    value = pulumi.runtime.get_config(f"{PROJECT}:{key}")
    return None if value is None else str(value)


def _proxmox(proxmox: Proxmox | None) -> Provider | None:
    if proxmox is None:
        return None
    config = pulumi.Config(PROJECT)
    token, password = config.get_secret("proxmoxApiToken"), config.get_secret("proxmoxPassword")
    # With neither, the provider takes PROXMOX_VE_API_TOKEN or PROXMOX_VE_PASSWORD from the environment.
    return Provider(
        "proxmox",
        endpoint=proxmox.endpoint,
        insecure=proxmox.insecure,
        api_token=token,
        username=None if password is None else proxmox.username,
        password=password,
    )


def _api_keys(topology: Topology) -> dict[str, pulumi.Output[str]]:
    raw = _plain_secret("serviceApiKeys")
    keys = cast("dict[str, Any]", json.loads(raw)) if raw else {}
    return {name: pulumi.Output.secret(str(keys[name])) for name in topology.services if name in keys}
