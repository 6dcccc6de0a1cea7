"""SGLang services: the computed tensor parallelism, the unit, and whether the running process is what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from topology.changes import ABSENT, Change
from topology.compare import Overlay, WantedUnit, process_changes, unit_changes
from topology.flags import Flags, canonical_flag
from topology.nccl import effective_environment, required_environment
from topology.plan_guests import unit_name
from topology.plan_pools import translated_iommu
from topology.presets import resolve_model
from topology.render import render_unit
from topology.revision import ADOPTED, digest, revision
from topology.spec import ServiceSpec
from topology.tensor_parallel import tensor_parallel
from topology.unit import parse_unit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from topology.config import ArgumentValue, Service, Topology
    from topology.facts import Facts, ServiceFacts
    from topology.spec import PoolSpec

_UNITS = "/etc/systemd/system"


@dataclass(frozen=True, slots=True)
class PlannedService:
    """A service and what it changes; `copy_revision` is `adopted` while the workstation's copy equals the unit.

    `overruled` are differences that drop-ins or environment files on the host make to a unit that is as it must be.
    """

    spec: ServiceSpec
    changes: tuple[Change, ...]
    overruled: tuple[Change, ...]
    copy_revision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a service depends on: its pool, whether pool or container change too, the copy of its unit here."""

    pool: PoolSpec
    disturbed: bool
    copy: str | None
    base: Path


def plan_service(name: str, topology: Topology, facts: Facts, around: Surroundings) -> PlannedService:
    """Plan one service: the unit found on the host is kept where it means what is wanted, else one is rendered."""
    service, pool = topology.services[name], around.pool
    found = next((s for s in facts.services if s.name == name), None)
    translated = translated_iommu(d.iommu_type for d in facts.devices if str(d.address) in pool.addresses)
    tp = tensor_parallel(len(pool.devices), service.parallelism)
    wanted = _wanted(name, service, tp, pool, facts, translated=translated)
    unit = _choose_unit(service, wanted, found, around.copy)
    deployed = found if found is not None and found.exists else None
    unit_differs = (*unit.changes, *_enablement(name, service, deployed))
    copy_differs = _copy_changes(name, service, unit.text, around.copy)
    running = _running_changes(name, deployed, wanted, facts, restart=around.disturbed or bool(unit.changes))
    effective = effective_environment(found, unit.text)
    desired = {"unit": digest(unit.text), "tp": tp, "devices": sorted(pool.addresses), "port": service.port}
    state = [found and found.active, found and found.need_reload, [str(change) for change in running]]
    spec = ServiceSpec(
        name=name,
        unit=unit_name(name, topology),
        container=service.container,
        pool=service.pool,
        devices=pool.addresses,
        driver=pool.driver,
        memory_mib=pool.memory_mib,
        tp=tp,
        pipeline=service.parallelism.pipeline,
        data=service.parallelism.data,
        port=service.port,
        address=service.address,
        served_name=service.model.served_name or service.model.path,
        model=resolve_model(service.model, around.base),
        arguments=tuple(sorted((canonical_flag(k), _argument(v)) for k, v in service.arguments.items())),
        environment=wanted.environment,
        effective_environment=effective,
        translated_iommu=translated,
        text=unit.text,
        path=unit.path or f"{_UNITS}/{unit_name(name, topology)}",
        canonical_unit=service.canonical_unit,
        enabled=service.enabled,
        deadline_s=service.readiness.deadline,
        token_timeout_s=service.readiness.token_timeout,
        unit_revision=revision(
            f"unit:{name}",
            as_wanted=not unit_differs,
            desired={"text": digest(unit.text), "enabled": service.enabled},
            observed=[found and found.text and digest(found.text), found and found.enabled],
            facts=facts,
        ),
        revision=revision(f"service:{name}", as_wanted=not running, desired=desired, observed=state, facts=facts),
    )
    copy_revision = digest([around.copy, unit.text])[:8] if copy_differs else ADOPTED
    return PlannedService(spec, (*unit_differs, *running, *copy_differs), unit.overruled, copy_revision)


def _wanted(  # noqa: PLR0913  everything that a unit's meaning depends on
    name: str, service: Service, tp: int, pool: PoolSpec, facts: Facts, *, translated: bool | None
) -> WantedUnit:
    found = facts.service(name)
    flags: Flags = {canonical_flag(k): _words(v) for k, v in service.arguments.items() if v is not False}
    computed = {
        "model-path": service.model.path,
        "served-model-name": service.model.served_name,
        "host": service.address,
        "port": str(service.port),
        "tp": str(tp),
        "pp": str(service.parallelism.pipeline) if service.parallelism.pipeline > 1 else None,
        "dp": str(service.parallelism.data) if service.parallelism.data > 1 else None,
    }
    flags |= {flag: (value,) for flag, value in computed.items() if value is not None}
    required = required_environment(translated_iommu=translated, gpus=len(pool.devices))
    return WantedUnit(
        service=name,
        command=service.command,
        flags=flags,
        environment=required | service.environment,
        environment_files=service.environment_files,
        working_directory=service.working_directory,
        user=service.user,
        numa_node=None if "numa-node" in flags else _numa_node(pool, facts),
        to_be_enabled=service.enabled and not (found and found.enabled),
    )


def _words(value: ArgumentValue) -> tuple[str, ...]:
    """A flag's words: none for a bare one, several for a list."""
    if value is True:
        return ()
    return tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)


def _argument(value: ArgumentValue) -> str:
    """An argument as rules and people read it."""
    return str(value).lower() if isinstance(value, bool) else " ".join(_words(value))


def _numa_node(pool: PoolSpec, facts: Facts) -> int | None:
    """The one node where all GPUs sit, on a host that has several."""
    nodes = {device.numa_node for device in pool.devices}
    node = nodes.pop() if len(nodes) == 1 else -1
    return node if node >= 0 and len(facts.numa_nodes) > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChosenUnit:
    text: str
    path: str | None
    changes: tuple[Change, ...]
    overruled: tuple[Change, ...] = ()


def _choose_unit(service: Service, wanted: WantedUnit, found: ServiceFacts | None, copy: str | None) -> _ChosenUnit:
    """Take the deployed unit if it means what is wanted, else the workstation's copy if that does, else render one."""
    overlay = Overlay.of(found)
    deployed = found if found is not None and found.exists and found.text is not None else None
    if deployed is None or deployed.text is None:
        changes: tuple[Change, ...] = (Change(f"service {wanted.service}", "unit", ABSENT, "written"),)
    else:
        changes = unit_changes(deployed.text, wanted, overlay)
        if not changes:
            return _ChosenUnit(text=deployed.text, path=deployed.path, changes=())
    if copy is not None and not unit_changes(copy, wanted, Overlay()):
        text = copy
    else:
        base = (deployed and deployed.text) or copy
        text = render_unit(wanted, description=service.description, found=parse_unit(base) if base else None)
    return _ChosenUnit(
        text=text,
        path=None,
        changes=changes,
        overruled=unit_changes(text, wanted, overlay),
    )


def _enablement(name: str, service: Service, deployed: ServiceFacts | None) -> Iterator[Change]:
    if deployed is not None and deployed.enabled is not service.enabled:
        words = {True: "enabled", False: "disabled", None: "unknown"}
        yield Change(f"service {name}", "at boot", words[deployed.enabled], words[service.enabled])


def _running_changes(
    name: str, deployed: ServiceFacts | None, wanted: WantedUnit, facts: Facts, *, restart: bool
) -> tuple[Change, ...]:
    """Why the service must be started or restarted; empty if its process is what its unit says."""
    subject = f"service {name}"
    if deployed is None or deployed.active != "active" or deployed.process is None:
        return (Change(subject, "state", deployed.active if deployed else ABSENT, "active"),)
    if (deployed.unit, deployed.container) in {(e.get("unit"), e.get("container")) for e in facts.ledger.drained}:
        return (Change(subject, "state", "stopped by a run that did not finish", "active"),)
    if restart:
        return (Change(subject, "process", "running", "restarted"),)
    if deployed.need_reload:
        return (Change(subject, "process", "older than its unit", "restarted"),)
    return process_changes(deployed.process, wanted, Overlay.of(deployed))


def _copy_changes(name: str, service: Service, text: str, copy: str | None) -> tuple[Change, ...]:
    if copy == text:
        return ()
    before = ABSENT if copy is None else "another"
    return (Change(f"copy {service.canonical_unit}", "text", before, f"that of service {name}'s unit"),)
