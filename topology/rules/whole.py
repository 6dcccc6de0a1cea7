"""All rules on a plan together, those between its parts included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topology.problem import Level, Problem, TopologyError
from topology.rules.catalogue import broken
from topology.rules.guests import check_container, check_vm, same_devices
from topology.rules.hosts import check_host
from topology.rules.memory import mem_fraction
from topology.rules.pools import check_binding, check_mapping, check_pool, check_pools, slot
from topology.rules.services import check_service

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from topology.spec import MappingSpec, PoolSpec, ServiceSpec, TopologySpec


def check_spec(spec: TopologySpec) -> tuple[Problem, ...]:
    """Judge everything that must be on a hypervisor; each problem once."""
    pools = {pool.name: pool for pool in spec.pools}
    found = [
        *(p for pool in spec.pools for p in check_pool(pool, spec.host)),
        *check_pools(spec.pools),
        *(p for binding in spec.bindings for p in check_binding(binding)),
        *(p for mapping in spec.mappings for p in check_mapping(mapping)),
        *(p for container in spec.containers for p in check_container(container, pools.get(container.pool))),
        *(p for vm in spec.vms for p in check_vm(vm)),
        *(p for service in spec.services for p in check_service(service)),
        *check_host(spec.host, spec.vms, spec.services),
        *_parts(spec, pools),
        *shared_memory(spec.services),
    ]
    return tuple(dict.fromkeys(found))


def refuse(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Let warnings through, and return them.

    Raises:
        TopologyError: with every problem that is a refusal.
    """
    found = tuple(problems)
    refusals = tuple(p for p in found if p.level is Level.REFUSE)
    if refusals:
        raise TopologyError(refusals)
    return found


def shared_memory(services: Sequence[ServiceSpec]) -> Iterator[Problem]:
    """Refuse services on one pool that ask for more of its memory than there is."""
    by_pool: dict[str, list[ServiceSpec]] = {}
    for service in services:
        by_pool.setdefault(service.pool, []).append(service)
    for pool, users in by_pool.items():
        try:
            total = sum(map(mem_fraction, users))
        except ValueError:
            continue  # check_service says which figure is none
        if len(users) > 1 and total >= 1:
            yield broken(
                "memory-shared",
                f"services {' and '.join(user.name for user in users)}",
                f"ask for {total:.0%} of the memory of pool {pool}'s GPUs together",
                "each takes its mem-fraction-static of the whole GPU",
                "lower their arguments.mem-fraction-static, or give each its own pool",
            )


def _parts(spec: TopologySpec, pools: dict[str, PoolSpec]) -> Iterator[Problem]:
    users = [
        *((f"binding of pool {b.pool}", b.pool, b.devices) for b in spec.bindings),
        *((f"VM {v.vmid}", v.pool, v.devices) for v in spec.vms),
        *((f"service {s.name}", s.pool, s.devices) for s in spec.services),
    ]
    for subject, name, devices in users:
        if name in pools:
            yield from same_devices(subject, devices, pools[name])
    for mapping in spec.mappings:
        if mapping.pool in pools:
            yield from _mapped(mapping, pools[mapping.pool])


def _mapped(mapping: MappingSpec, pool: PoolSpec) -> Iterator[Problem]:
    """A mapping's path may leave out the function, which then means all of them."""
    mapped = {slot(entry.path) for entry in mapping.entries}
    if mapped != {slot(address) for address in pool.addresses}:
        yield broken(
            "same-devices",
            f"PCI mapping {mapping.name}",
            f"has {', '.join(sorted(mapped)) or 'nothing'}, and pool {pool.name} {', '.join(sorted(pool.addresses))}",
            "it maps its pool's GPUs and no others",
            f"change the devices of pool {pool.name} in the stack file and plan again",
        )
