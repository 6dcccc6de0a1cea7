"""What the program does, in order, and how a person's mistake ends it: one message for each, no traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pulumi
from pulumi_proxmoxve import Provider
from pydantic import TypeAdapter, ValidationError

from components.access import HostAccess
from components.hypervisor import HypervisorArgs, build_hypervisor
from host.errors import HostError
from host.facts import gather_facts
from host.resources.canonical import read_copy
from host.target import target
from topology.export import topology_output
from topology.load import load_topology
from topology.plan import make_plan
from topology.problem import Problem, TopologyError
from topology.rules import service_fit
from topology.rules.catalogue import broken

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
    topology = _topology()
    where = target(topology.host, private_key=_secret("sshPrivateKey"), base=base)
    facts = gather_facts(topology, where, recorded=base / "facts" / f"{pulumi.get_stack()}.json")
    plan = make_plan(topology, facts, base=base, read_local=lambda path: read_copy(path, base))
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


def _topology() -> Topology:
    config = pulumi.Config(PROJECT)
    try:
        raw = config.get_object("topology")
    except pulumi.ConfigTypeError:  # text where a mapping must be, which the loader says
        raw = config.get("topology")
    return load_topology(raw)


def _secret(key: str) -> str | None:
    """A secret of the stack, for this process: Config.get would warn that it is used right here.

    Raises:
        TopologyError: it stands in the stack file in clear.
    """
    name = f"{PROJECT}:{key}"
    value = pulumi.runtime.get_config(name)
    if value is None:
        return None
    if not pulumi.runtime.is_config_secret(name):
        why = "a secret in clear would be in the repository and in the state"
        fix = f"take it out, choose another secret, and set that by `pulumi config set --secret {key}`"
        raise TopologyError((broken("no-secret-in-clear", name, "stands in the stack file in clear", why, fix),))
    return str(value)


def _proxmox(proxmox: Proxmox | None) -> Provider | None:
    if proxmox is None:
        return None
    token, password = _secret("proxmoxApiToken"), _secret("proxmoxPassword")
    # With neither, the provider takes PROXMOX_VE_API_TOKEN or PROXMOX_VE_PASSWORD from the environment.
    return Provider(
        "proxmox",
        endpoint=proxmox.endpoint,
        insecure=proxmox.insecure,
        api_token=_hidden(token),
        username=None if password is None else proxmox.username,
        password=_hidden(password),
    )


def _hidden(value: str | None) -> pulumi.Output[str] | None:
    return None if value is None else pulumi.Output.secret(value)


def _api_keys(topology: Topology) -> dict[str, pulumi.Output[str]]:
    try:
        keys = TypeAdapter(dict[str, str]).validate_json(_secret("serviceApiKeys") or "{}")
    except ValidationError:  # its own text would show the keys
        raise _wrong_keys("is no JSON object of texts", topology) from None
    if unknown := sorted(keys.keys() - topology.services.keys()):
        raise _wrong_keys(f"has a key for {', '.join(unknown)}", topology)
    return {service: pulumi.Output.secret(key) for service, key in keys.items()}


def _wrong_keys(value: str, topology: Topology) -> TopologyError:
    problem = Problem(
        rule="configuration",
        subject=f"{PROJECT}:serviceApiKeys",
        value=value,
        why=f"it holds API keys by service, and the services are {', '.join(topology.services) or 'none'}",
        fix="""run `pulumi config set --secret serviceApiKeys '{"SERVICE": "KEY"}'`""",
    )
    return TopologyError((problem,))
