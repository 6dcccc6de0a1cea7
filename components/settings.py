"""The stack's settings: its topology, and its secrets, which must be secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pulumi
from pydantic import TypeAdapter, ValidationError

from topology.load import load_topology
from topology.problem import Problem, TopologyError
from topology.rules.catalogue import broken

if TYPE_CHECKING:
    from topology.config import Topology

PROJECT = "gpu-topology"


def topology_setting() -> Topology:
    """The topology of the stack file.

    Raises:
        TopologyError: it breaks rules; holds every problem found.
    """
    config = pulumi.Config(PROJECT)
    try:
        raw = config.get_object("topology")
    except pulumi.ConfigTypeError:  # text where a mapping must be, which the loader says
        raw = config.get("topology")
    return load_topology(raw)


def secret_setting(key: str) -> str | None:
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


def api_key_settings(topology: Topology) -> dict[str, pulumi.Output[str]]:
    """The API keys that servers ask for, by service."""
    try:
        keys = TypeAdapter(dict[str, str]).validate_json(secret_setting("serviceApiKeys") or "{}")
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
