"""The plan: everything that must be on a host, as a pure function of its configuration and its facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from topology.changes import Change
from topology.compare import mapping_changes
from topology.managed import agent_changes
from topology.plan_guests import plan_container, plan_vm
from topology.plan_pools import host_spec, mapping_specs, plan_binding, pool_spec
from topology.plan_services import PlannedService, Surroundings, plan_service
from topology.problem import Level, Problem
from topology.rules import check_config, check_facts, check_spec, refuse
from topology.spec import TopologySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from pathlib import Path

    from topology.config import Topology
    from topology.facts import Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What must be, how the host differs from it, and what a person should know.

    `copy_revisions` has `adopted` for each service whose unit's copy on the workstation equals `text`; any other value
    says that the copy is to be written.
    """

    spec: TopologySpec
    facts: Facts
    changes: tuple[Change, ...]
    warnings: tuple[Problem, ...]
    copy_revisions: Mapping[str, str]


def make_plan(
    topology: Topology,
    facts: Facts,
    *,
    base: Path,
    read_local: Callable[[str], str | None],
) -> Plan:
    """Plan a host; `read_local` gives the text of a canonical unit's path, None if there is no file.

    Raises:
        TopologyError: the configuration, or the host, breaks rules; it holds every problem found.
    """
    problems = (*check_config(topology), *check_facts(topology, facts))
    refuse(problems)
    bindings = {name: plan_binding(name, topology, facts) for name in sorted(topology.pools)}
    mappings = {mapping.name: mapping for mapping in mapping_specs(topology, facts)}
    containers = {vmid: plan_container(vmid, topology, facts) for vmid in sorted(topology.containers)}
    vms = [plan_vm(v, topology, facts, mappings[vm.mapping]) for v, vm in sorted(topology.vms.items())]
    pools = {name: pool_spec(name, topology, facts) for name in sorted(topology.pools)}
    services = {}
    for name, service in sorted(topology.services.items()):
        container = None if service.container is None else containers[service.container]
        around = Surroundings(
            pool=pools[service.pool],
            disturbed=bindings[service.pool].moving or bool(container and container.changes),
            copy=read_local(service.canonical_unit),
            base=base,
        )
        services[name] = plan_service(name, topology, facts, around)
    spec = TopologySpec(
        host=host_spec(topology, facts),
        pools=tuple(pools.values()),
        bindings=tuple(binding.spec for binding in bindings.values()),
        mappings=tuple(mappings.values()),
        containers=tuple(container.spec for container in containers.values()),
        vms=tuple(vm.spec for vm in vms),
        services=tuple(service.spec for service in services.values()),
    )
    problems = (*problems, *check_spec(spec))
    moving = {name for name, binding in bindings.items() if binding.changes}
    found = {mapping.id: mapping for mapping in facts.mappings}
    remapped = {name: mapping_changes(found.get(name), mapping) for name, mapping in mappings.items()}
    problems = (*problems, *_mappings(spec, remapped, moving, facts))
    refuse((*problems, *_overruled(services.values(), problems)))
    changes = [change for binding in bindings.values() for change in binding.changes]
    changes += [change for differences in remapped.values() for change in differences]
    changes += [change for container in containers.values() for change in container.changes]
    changes += [change for vm in vms for change in vm.changes]
    changes += [change for service in services.values() for change in service.changes]
    return Plan(
        spec=spec,
        facts=facts,
        changes=(*agent_changes(facts), *changes, *_released(topology, facts)),
        warnings=tuple(dict.fromkeys(problem for problem in problems if problem.level is Level.WARN)),
        copy_revisions={name: service.copy_revision for name, service in services.items()},
    )


def _overruled(services: Iterable[PlannedService], problems: Iterable[Problem]) -> Iterator[Problem]:
    """What the host lays over a unit wins over it, so writing the unit again would never make it right."""
    refused = {problem.subject for problem in problems if problem.level is Level.REFUSE}
    for service in services:
        subject = f"service {service.spec.name}"
        if not service.overruled or subject in refused:
            continue
        yield Problem(
            rule="unit-overruled",
            subject=subject,
            value="; ".join(f"{c.what} would be {c.before}, not {c.after}" for c in service.overruled),
            why="drop-ins and environment files on the host win over the unit that the stack file describes",
            fix=f"see `systemctl cat {service.spec.unit}` there, and take the setting out or say the same in the stack "
            "file",
        )


def _mappings(
    spec: TopologySpec, remapped: Mapping[str, tuple[Change, ...]], moving: Container[str], facts: Facts
) -> Iterator[Problem]:
    """Mappings that say otherwise though their pool does not change: somebody else's, or ours that somebody changed."""
    found = {mapping.id for mapping in facts.mappings}
    for mapping in spec.mappings:
        changes = remapped[mapping.name]
        value = "; ".join(f"{change.what} is {change.before}, and would be {change.after}" for change in changes)
        traces = {f"vm:{vm.vmid}" for vm in spec.vms if vm.mapping == mapping.name} | {f"binding:{mapping.pool}"}
        ours = not traces.isdisjoint(facts.ledger.revisions)
        if mapping.name in found and changes and not ours:
            yield Problem(
                rule="mapping-not-ours",
                subject=f"mapping {mapping.name}",
                value=value,
                why="it was there before this program took the pool, and Proxmox refuses a second one of its name",
                fix=f"name another mapping, or remove this one: `pvesh delete /cluster/mapping/pci/{mapping.name}`",
            )
        if changes and ours and mapping.pool not in moving:
            yield Problem(
                rule="mapping-drift",
                subject=f"mapping {mapping.name}",
                value=value,
                why="Pulumi compares a mapping with what Proxmox has only in a refresh",
                fix="run `pulumi up --refresh`",
                level=Level.WARN,
            )


def _released(topology: Topology, facts: Facts) -> Iterator[Change]:
    """What the host's book manages and the configuration no longer names."""
    kept = {
        "binding": set(topology.pools),
        "container": {str(vmid) for vmid in topology.containers},
        "vm": {str(vmid) for vmid in topology.vms},
        "service": set(topology.services),
    }
    words = {"binding": "pool", "container": "lxc", "vm": "vm", "service": "service"}
    for key in sorted(facts.ledger.revisions):
        kind, _, name = key.partition(":")
        if kind in kept and name not in kept[kind]:
            yield Change(f"{words[kind]} {name}", "managed", "by this stack", "handed back as found")
