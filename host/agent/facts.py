"""The facts operation: all that a plan needs of a host, read-only, in about a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .facts_devices import (
    GPU_QUERY,
    PERSISTENCED,
    device_facts,
    gpu_table,
    host_facts,
    numa_nodes,
    nvidia_facts,
    relevant,
    snp,
    vfio_ids,
)
from .facts_guests import container_facts, mapping_facts, vm_facts
from .facts_services import first_commands, service_facts
from .ledger import Ledger
from .pci import Pci

if TYPE_CHECKING:
    from .request import Request
    from .result import Json
    from .system import System

COMMANDS_LIMIT = 20.0
"""Seconds for all commands together; a healthy host needs about one, a wedged nvidia-smi is cut off here."""
VERSION = "v1"
PRIVATE = ("found", "previous", "outdated")
"""What only the agent needs of its ledger: whole files as they were found, secrets in them included."""


def version(_system: System, _request: Request) -> dict[str, Json]:
    """The format of the facts."""
    return {"version": VERSION}


def facts(system: System, request: Request) -> dict[str, Json]:
    """Read everything; what could not be read is null and named in `errors`."""
    root, pci = system.root, Pci(system.root)
    errors: list[Json] = []
    services = [one.service() for one in request.objects("services")]
    asked = request.addresses("addresses")
    limit = request.seconds("commands_limit_s", COMMANDS_LIMIT)
    general = _wanted_commands(system, errors)
    commands = [*general.values(), *(command for service in services for command in first_commands(service))]
    done = system.run_all(commands, limit)
    answers = dict(zip(general, done, strict=False))
    errors += [f"`{' '.join(one.argv)}` did not answer within {limit:.0f} s" for one in done if one.code is None]
    # Without an answer every guest would look stopped, and its services gone.
    asked_of = [answers[name] for name in ("pct", "qm") if name in answers]
    errors += [one.complaint() for one in asked_of if one.code]
    smi = answers.get("nvidia-smi")
    return {
        "version": VERSION,
        "host": host_facts(root, answers.get("pveversion")),
        "numa_nodes": numa_nodes(root),
        "snp": snp(root),
        "nvidia": nvidia_facts(root, answers.get("persistenced")),
        "vfio_ids": vfio_ids(root),
        "devices": device_facts(system, relevant(pci, asked), gpu_table(smi) if smi else {}, errors),
        "missing": [address for address in asked if not pci.exists(address)],
        "mappings": mapping_facts(root),
        "containers": container_facts(system, request.numbers("containers"), answers.get("pct")),
        "vms": vm_facts(system, request.numbers("vms"), answers.get("qm")),
        "services": service_facts(system, services, done[len(general) :], limit),
        "ledger": {key: value for key, value in Ledger(root).data.items() if key not in PRIVATE},
        "errors": errors,
    }


def _wanted_commands(system: System, errors: list[Json]) -> dict[str, tuple[str, ...]]:
    """The commands that this host has; one that is missing although it is needed is an error in the facts."""
    commands = {
        "pveversion": ("pveversion",),
        "persistenced": PERSISTENCED,
        "nvidia-smi": GPU_QUERY,
        "pct": ("pct", "list"),
        "qm": ("qm", "list"),
    }
    missing = {name for name, argv in commands.items() if not system.has(argv[0])}
    errors += [f"{name} is not on the host's PATH" for name in sorted(missing & {"pct", "qm"})]
    return {name: argv for name, argv in commands.items() if name not in missing}
