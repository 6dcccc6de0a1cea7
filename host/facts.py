"""The facts a plan needs: from the live host in one round trip, or from a recording where no host can be reached."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import ValidationError

from host.client import AgentClient, JsonObject
from host.errors import HostError
from topology.config import FactsSource
from topology.facts import Facts

if TYPE_CHECKING:
    from pathlib import Path

    from host.target import Target
    from topology.config import Topology


def facts_request(topology: Topology) -> JsonObject:
    """What to ask the host about: every device, container, VM and service that the configuration names."""
    return {
        "addresses": sorted({str(device) for pool in topology.pools.values() for device in pool.devices}),
        "containers": sorted(topology.containers),
        "vms": sorted(topology.vms),
        "services": [
            {"name": name, "unit": service.unit or f"{name}.service", "container": service.container}
            for name, service in sorted(topology.services.items())
        ],
    }


def gather_facts(topology: Topology, target: Target, *, recorded: Path) -> Facts:
    """The host's facts, from where the configuration says.

    Raises:
        HostError: the host cannot be asked, or there is no usable recording.
    """
    if topology.host.facts is FactsSource.RECORDED:
        return read_facts(recorded)
    return live_facts(topology, target)


def live_facts(topology: Topology, target: Target) -> Facts:
    """The facts of the live host.

    Raises:
        HostError: the host cannot be asked.
    """
    with AgentClient(target) as client:
        return parse_facts(client.facts(facts_request(topology)), f"{target.address}'s agent")


def read_facts(path: Path) -> Facts:
    """A recording that `write_facts` made."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise HostError(
            f"host.facts is recorded, but {path} cannot be read ({error}). Fix: record the host with "
            "`gpu-topology record` from a machine that reaches it, or set host.facts to live",
        ) from error
    return parse_facts(value, str(path))


def parse_facts(value: JsonObject, source: str) -> Facts:
    """What an agent or a recording said, checked; `source` names it in the message of a HostError."""
    try:
        return Facts.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise HostError(
            f"the facts of {source} are not of format v1: {'.'.join(map(str, first['loc']))}: {first['msg']}. "
            "Fix: record them again with this version",
        ) from error
