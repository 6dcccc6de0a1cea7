"""A virtual machine's GPUs: hostpci entries through one PCI resource mapping, one per device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .drain import record_revision
from .guests import VMS, shut_down, status, vm_config
from .holders import find_holders
from .outgoing import make_way_for_vm
from .pci import VFIO, Address, Pci, slot_of
from .request import Request
from .result import BadRequestError, FailedError, Json, RefusedError
from .vm_config import MAPPINGS, MOST_ENTRIES, hostpci, mappings, options, paths_of, same_meaning

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .operation import Operation
    from .system import System

START_LIMIT = 600.0
"""Seconds for `qm start`: a confidential guest's memory is pinned and accepted page by page, 512 GiB take minutes."""


def vm(operation: Operation, request: Request) -> dict[str, Json]:
    """Give a VM its pool's devices through a mapping; foreign hostpci entries stay."""
    vmid, mapping, devices = request.number("vmid"), request.text("mapping"), request.addresses("devices")
    stop_limit, system = request.seconds("stop_timeout_s", 120.0), operation.system
    drained: dict[str, Json] = {"kind": "vm", "vmid": vmid}
    # One whose power state is left alone, and that ran until a drain stopped it, runs again.
    start = request.flag("start", default=False) or drained in operation.ledger.drained
    text = need_vm(system, vmid)
    _need_mapping(system, mapping, devices)
    value = f"mapping={mapping}"
    value += ",pcie=1" if request.flag("pcie", default=True) else ""
    value += "" if request.flag("rombar", default=False) else ",rombar=0"
    pci = Pci(system.root)
    if elsewhere := [one for one in devices if pci.driver(one) != VFIO]:
        # Proxmox would take them from their driver by itself when the VM starts, in use or not.
        raise RefusedError(f"{', '.join(elsewhere)} is not on {VFIO}: bind the pool of VM {vmid} first")
    now = hostpci(text)
    ours = own_entries(system, now, (mapping,), devices)
    wanted = _entries(now, ours, value, request.number("count", len(devices)))
    state = status(system, "qm", vmid)
    _note_found(operation, vmid, ours, state, mapping)
    sets = {key: entry for key, entry in wanted.items() if key not in now or not same_meaning(now[key], entry)}
    deletes = [key for key in ours if key not in wanted]
    running = state == "running"
    live = not running or not devices or set(devices) <= set(_held(system, vmid, devices))
    if start or running:
        make_way_for_vm(operation, vmid, devices, stop_limit)
    if sets or deletes or not live:
        apply(operation, vmid, Change(sets, deletes, start or running, stop_limit))
    elif start and not running:
        _start(operation, vmid, stop_limit)
    if start or running:
        _verify_running(system, vmid, devices)
    operation.ledger.manage_guest("vms", vmid)
    operation.ledger.forget_drained(drained)
    record_revision(operation, f"vm:{vmid}", request)
    return {"vmid": vmid, "hostpci": dict(hostpci(need_vm(system, vmid)))}


def vm_release(operation: Operation, request: Request) -> dict[str, Json]:
    """Take our entries from a VM, and give it back those that it was found with."""
    vmid, system = request.number("vmid"), operation.system
    entry = operation.ledger.table("found").get(f"vm:{vmid}")
    text, withheld = vm_config(system, vmid), False
    if isinstance(entry, dict) and text is not None:
        before = entry["hostpci"] if isinstance(entry["hostpci"], dict) else {}
        found = {key: str(value) for key, value in before.items() if _can_have(operation, str(value))}
        withheld = len(found) < len(before)
        now = hostpci(text)
        # A mapping that is deleted by now says nothing of its devices; its name does.
        ours = own_entries(system, now, Request.of(entry).texts("mappings"), ())
        sets = {key: value for key, value in found.items() if key not in now or (key in ours and now[key] != value)}
        deletes = [key for key in ours if key not in found]
        if sets or deletes:
            # What it ran with is gone: it runs again only if it was found running, with what it had then.
            again = not withheld and entry["status"] == "running" and status(system, "qm", vmid) == "running"
            apply(operation, vmid, Change(sets, deletes, again, request.seconds("stop_timeout_s", 120.0)))
    if not withheld:  # else a later release, with its GPUs back on vfio-pci, gives it what it was found with
        operation.ledger.table("found").pop(f"vm:{vmid}", None)
    operation.ledger.table("revisions").pop(f"vm:{vmid}", None)
    operation.ledger.unmanage_guest("vms", vmid)
    operation.ledger.forget_drained({"kind": "vm", "vmid": vmid})
    return {"vmid": vmid}


def need_vm(system: System, vmid: int) -> str:
    """A VM's configuration; refused where there is none on this node."""
    text = vm_config(system, vmid)
    if text is None:
        raise RefusedError(
            f"VM {vmid} does not exist on this node ({VMS}/{vmid}.conf is missing): `qm list` shows those that do; "
            "correct the VMID"
        )
    return text


def _can_have(operation: Operation, value: str) -> bool:
    """Whether a found entry can be given back: its GPUs are no nvidia pool's by now, and its mapping still exists."""
    system, table = operation.system, operation.ledger.table("devices")
    taken = {
        slot_of(Address(one)) for one, entry in table.items() if isinstance(entry, dict) and entry["driver"] != VFIO
    }
    paths = paths_of(value, system.root)
    return bool(paths) and not any(path in taken or slot_of(path) in taken for path in paths)


def own_entries(
    system: System, entries: Mapping[str, str], names: Iterable[str], devices: Iterable[Address]
) -> dict[str, str]:
    """The hostpci entries that refer to GPUs: by a mapping of these names, or to a display controller."""
    pci, ours = Pci(system.root), set(names)
    slots = {slot_of(address) for address in pci.all() if pci.is_display(address)} | {slot_of(one) for one in devices}

    def is_gpu(value: str) -> bool:
        return options(value).get("mapping") in ours or any(
            path in slots or slot_of(path) in slots for path in paths_of(value, system.root)
        )

    return {key: value for key, value in entries.items() if is_gpu(value)}


def _note_found(operation: Operation, vmid: int, ours: Mapping[str, str], state: str, mapping: str) -> None:
    """Keep what was found at first touch, and the name of every mapping that we gave the VM since."""
    operation.ledger.note_found(f"vm:{vmid}", {"hostpci": dict(ours), "status": state, "mappings": []})
    entry = Request.of(operation.ledger.table("found")[f"vm:{vmid}"])
    entry.fields["mappings"] = [*dict.fromkeys([*entry.texts("mappings"), mapping])]


@dataclass(frozen=True)
class Change:
    """What to set and delete, and whether the VM is to run afterwards."""

    sets: dict[str, str]
    deletes: list[str]
    start: bool
    stop_limit: float


def apply(operation: Operation, vmid: int, change: Change) -> None:
    """Change hostpci entries of a VM that is stopped for it, since those of a running one would only be pending."""
    system, sets, deletes = operation.system, change.sets, change.deletes
    before = hostpci(need_vm(system, vmid))
    if status(system, "qm", vmid) == "running":
        operation.undo_with(f"start VM {vmid}", partial(_ensure_running, system, vmid))
        operation.begin(f"stop VM {vmid}")
        shut_down(system, "qm", vmid, change.stop_limit)
    if sets or deletes:
        undo = partial(_put_back, system, vmid, before, change.stop_limit)
        operation.undo_with(f"hostpci entries of VM {vmid}", undo)
        operation.begin(f"VM {vmid}: set {', '.join(sets) or 'nothing'}, delete {', '.join(deletes) or 'nothing'}")
        _set(system, vmid, sets, deletes)
        now = hostpci(need_vm(system, vmid))
        wrong = [key for key, value in sets.items() if key not in now or not same_meaning(now[key], value)]
        if wrong or any(key in now for key in deletes):
            raise FailedError(f"VM {vmid} has other hostpci entries than were set ({now}): look at `qm pending {vmid}`")
    if change.start:
        _start(operation, vmid, change.stop_limit)


def _set(system: System, vmid: int, sets: Mapping[str, str], deletes: Iterable[str]) -> None:
    arguments = [word for key, value in sets.items() for word in (f"-{key}", value)]
    if gone := ",".join(deletes):
        arguments += ["-delete", gone]
    if arguments:
        system.need("qm", "set", str(vmid), *arguments, limit=60)


def _put_back(system: System, vmid: int, before: Mapping[str, str], stop_limit: float) -> None:
    if status(system, "qm", vmid) == "running":
        shut_down(system, "qm", vmid, stop_limit)
    now = hostpci(need_vm(system, vmid))
    changed = {key: value for key, value in before.items() if now.get(key) != value}
    _set(system, vmid, changed, [key for key in now if key not in before])


def _ensure_running(system: System, vmid: int) -> None:
    if status(system, "qm", vmid) != "running":
        system.need("qm", "start", str(vmid), limit=START_LIMIT)


def _start(operation: Operation, vmid: int, stop_limit: float) -> None:
    operation.undo_with(f"stop VM {vmid}", partial(shut_down, operation.system, "qm", vmid, stop_limit))
    operation.begin(f"start VM {vmid}")
    _ensure_running(operation.system, vmid)


def _need_mapping(system: System, mapping: str, devices: Iterable[Address]) -> None:
    known = mappings(system.root.text(MAPPINGS) or "")
    if mapping not in known:
        raise RefusedError(
            f"PCI resource mapping {mapping} does not exist ({MAPPINGS} has {', '.join(known) or 'none'}): it must be "
            "made before the VM refers to it; if somebody deleted it, `pulumi up --refresh` makes it again"
        )
    paths = {path for entry in known[mapping] for path in entry.get("path", "").split(";")}
    if missing := [one for one in devices if one not in paths and slot_of(one) not in paths]:
        raise RefusedError(
            f"mapping {mapping} has no entry for {', '.join(missing)}: it must name every device of the pool; "
            "if somebody changed it, `pulumi up --refresh` puts it right"
        )


def _entries(now: Mapping[str, str], ours: Mapping[str, str], value: str, count: int) -> dict[str, str]:
    """The hostpci entries that are to be ours: what foreign entries leave free, lowest numbers first."""
    free = [key for number in range(MOST_ENTRIES) if (key := f"hostpci{number}") in ours or key not in now]
    if count > len(free):
        raise BadRequestError(
            f"field count is {count}, and only {len(free)} of a VM's {MOST_ENTRIES} hostpci entries are free of others"
        )
    return dict.fromkeys(free[:count], value)


def _held(system: System, vmid: int, devices: Iterable[Address]) -> tuple[Address, ...]:
    """Which devices the VM's process really holds."""
    holders = find_holders(system, devices)
    return tuple(held for one in holders if one.vmid == vmid and one.pid is not None for held in one.devices)


def _verify_running(system: System, vmid: int, devices: tuple[Address, ...]) -> None:
    deadline = time.monotonic() + 30
    while True:
        held = _held(system, vmid, devices)
        missing = [device for device in devices if device not in held]
        if status(system, "qm", vmid) == "running" and not missing:
            return
        if time.monotonic() > deadline:
            raise FailedError(
                f"VM {vmid} runs without {', '.join(missing)}"
                if missing
                else f"VM {vmid} does not stay running: look at `qm showcmd {vmid}` and its task log"
            )
        time.sleep(0.5)
