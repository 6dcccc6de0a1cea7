"""The one exported object: what a topology is, for other stacks, scripts and the difference between two states."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topology.spec import PoolSpec, ServiceSpec, TopologySpec

VERSION = "v1"


def topology_output(spec: TopologySpec) -> dict[str, Any]:
    """The stack output `topology`, of plain JSON values; format v1, in which keys are added and never change meaning.

    `tp` of a pool is that of the service on it, None if there is none. `unitHash` is the SHA-256 of the unit file.
    """
    return {
        "version": VERSION,
        "host": {"node": spec.host.node, "snp": spec.host.snp, "translatedIommu": spec.host.translated_iommu},
        "pools": {pool.name: _pool(pool, spec) for pool in spec.pools},
        "services": {service.name: _service(service) for service in spec.services},
    }


def _pool(pool: PoolSpec, spec: TopologySpec) -> dict[str, Any]:
    return {
        "devices": list(pool.addresses),
        "driver": pool.driver,
        "numaNode": pool.numa_node,
        "owners": list(pool.owners),
        "gpu": pool.gpu,
        "memoryMib": pool.memory_mib,
        "tp": next((service.tp for service in spec.services if service.pool == pool.name), None),
    }


def _service(service: ServiceSpec) -> dict[str, Any]:
    return {
        "tp": service.tp,
        "pool": service.pool,
        "container": service.container,
        "port": service.port,
        "model": service.served_name,
        "unitHash": sha256(service.text.encode()).hexdigest(),
        "readiness": {"check": "token", "deadline": service.deadline_s, "tokenTimeout": service.token_timeout_s},
    }
