"""What this program manages on a host, which the host's own book must know before a drain may stop any of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topology.changes import Change
from topology.revision import revision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.facts import Facts
    from topology.spec import TopologySpec

REGISTER = "register"
AGENT = "agent"
"""The names under which the ledger keeps the revisions of what is managed, and of the agent's file."""


def managed_by(spec: TopologySpec) -> dict[str, object]:
    """Services, VMs and containers, as the agent's requests name them."""
    return {
        "services": [{"name": one.name, "unit": one.unit, "container": one.container} for one in spec.services],
        "vms": [vm.vmid for vm in spec.vms],
        "containers": [container.vmid for container in spec.containers],
    }


def managed_revision(spec: TopologySpec, facts: Facts) -> str:
    """The revision of what the ledger knows as managed: a new one where it lacks something, as after it was lost."""
    known = facts.ledger.managed
    services = {(one.unit, one.container) for one in spec.services}
    unknown = services - {(one.unit, one.container) for one in known.services}
    unknown_guests = {vm.vmid for vm in spec.vms} - {*known.vms}
    unknown_guests |= {container.vmid for container in spec.containers} - {*known.containers}
    return revision(
        REGISTER,
        as_wanted=not unknown and not unknown_guests,
        desired=managed_by(spec),
        observed=known.model_dump(),
        facts=facts,
    )


def agent_changes(facts: Facts) -> Iterator[Change]:
    """What somebody took away of the agent and its boot unit since they were installed."""
    if AGENT in facts.ledger.revisions and not facts.host.agent_installed:
        yield Change(f"host {facts.host.hostname}", "agent and boot unit", "missing or different", "installed")


def agent_revision(facts: Facts) -> str:
    """The revision of the agent's file and boot unit: a new one where either is gone, which Pulumi would not see."""
    there = facts.host.agent_installed
    return revision(AGENT, as_wanted=there, desired=True, observed=there, facts=facts)
