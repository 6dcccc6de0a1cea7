"""Facts of Proxmox mappings, containers and virtual machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .guests import CONTAINERS, VMS, container_config, ids_in, parse_list, vm_config
from .vm_config import MAPPINGS, descriptions, hostpci, main_section, mappings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .result import Json
    from .root import Root
    from .system import Completed, System


def mapping_facts(root: Root) -> list[Json]:
    """Every PCI resource mapping of the cluster."""
    text = root.text(MAPPINGS) or ""
    described = descriptions(text)
    return [
        {"id": name, "description": described.get(name), "entries": [_entry(entry) for entry in entries]}
        for name, entries in mappings(text).items()
    ]


def _entry(entry: dict[str, str]) -> Json:
    group = entry.get("iommugroup", "")
    return {
        "node": entry.get("node"),
        "path": entry.get("path"),
        "id": entry.get("id"),
        "subsystem_id": entry.get("subsystem-id"),
        "iommu_group": int(group) if group.isdigit() else None,
    }


def container_facts(system: System, asked: Iterable[int], table: Completed | None) -> list[Json]:
    """The containers asked for, and every one that is given a GPU's node."""
    states = parse_list(table.out) if table and table.ok else {}
    configs = {vmid: container_config(system, vmid) for vmid in ids_in(system, CONTAINERS)}
    passing = {vmid for vmid, text in configs.items() if "/dev/nvidia" in main_section(text or "")}
    facts: list[Json] = []
    for vmid in _shown(passing, set(asked), set(configs)):
        text = configs.get(vmid)
        unprivileged = bool(re.search(r"^unprivileged:\s*1", main_section(text or ""), re.MULTILINE))
        facts.append(
            {
                "vmid": vmid,
                "exists": text is not None,
                "status": states.get(vmid),
                "config": text,
                "unprivileged": unprivileged,
            }
        )
    return facts


def vm_facts(system: System, asked: Iterable[int], table: Completed | None) -> list[Json]:
    """The virtual machines asked for, and every one with a hostpci entry."""
    states = parse_list(table.out) if table and table.ok else {}
    configs = {vmid: vm_config(system, vmid) for vmid in ids_in(system, VMS)}
    passing = {vmid for vmid, text in configs.items() if hostpci(text or "")}
    return [
        {"vmid": vmid, "exists": vmid in configs, "status": states.get(vmid), "config": configs.get(vmid)}
        for vmid in _shown(passing, set(asked), set(configs))
    ]


def _shown(passing: set[int], asked: set[int], there: set[int]) -> list[int]:
    """Guests with GPUs and those asked for; all, once one of these isn't there, to choose the right VMID from."""
    return sorted(passing | asked if asked <= there else asked | there)
