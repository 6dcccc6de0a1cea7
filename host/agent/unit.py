"""A service's systemd unit file, in a container or on the host: written atomically, given back as found."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from .drain import record_revision
from .facts_devices import properties
from .guests import container_config, need_inside, run_inside, status
from .ledger import FOLDER, write_atomically
from .processes import identity
from .request import Managed, Request, Service
from .result import FailedError, Json, RefusedError

if TYPE_CHECKING:
    from .operation import Operation
    from .system import System

UNITS = "/etc/systemd/system"


def unit(operation: Operation, request: Request) -> dict[str, Json]:
    """Write the unit file if its bytes differ, reload systemd when it has to know, enable it as wanted."""
    service, text = request.service(), request.text("text")
    path = request.text("path", f"{UNITS}/{service.unit}")
    system = operation.system
    need_running(system, service)
    current, shown = read_file(system, service.container, path), show(system, service)
    enabled = shown.get("UnitFileState") == "enabled"
    key = f"unit:{service.name}"
    active = shown.get("ActiveState") in ("active", "activating", "reloading")
    quieted = {"vmid": service.container, "unit": service.unit} in operation.ledger.quieted
    operation.ledger.note_found(key, {"text": current, "enabled": enabled or quieted, "active": active})
    if current != text:
        operation.ledger.table("previous")[key] = current
        # A process that was started before this write is outdated, to the clock tick, and whatever clocks say.
        operation.ledger.table("outdated")[key] = identity(system, service, int(shown.get("MainPID") or 0))
        change(operation, service, path, current, text)
    elif shown.get("NeedDaemonReload") == "yes":
        operation.begin(f"systemd of {_where(service)} reads its units again")
        need_inside(system, service.container, "systemctl", "daemon-reload")
    if request.has("enabled") and request.flag("enabled", default=True) != enabled:
        set_enabled(operation, service, enabled=not enabled)
    operation.ledger.manage(Managed((service,)))
    record_revision(operation, key, request)
    return {"unit": service.unit, "path": path}


def unit_release(operation: Operation, request: Request) -> dict[str, Json]:
    """Give the found text back, or remove the file if there was none; enabled as found; nothing is started."""
    service = request.service()
    path = request.text("path", f"{UNITS}/{service.unit}")
    system, key = operation.system, f"unit:{service.name}"
    found = operation.ledger.table("found").get(key)
    gone = service.container is not None and container_config(system, service.container) is None
    if isinstance(found, dict) and not gone:
        need_running(system, service)
        before = found["text"] if isinstance(found["text"], str) else None
        current = read_file(system, service.container, path)
        enabled = show(system, service).get("UnitFileState") == "enabled"
        if enabled and not found["enabled"]:
            set_enabled(operation, service, enabled=False)
        if current != before:
            change(operation, service, path, current, before)
        if found["enabled"] and not enabled and before is not None:
            set_enabled(operation, service, enabled=True)
    guest = operation.ledger.table("found").get(f"container:{service.container}")
    if isinstance(guest, dict):  # its release restarts it, and is not to bring this unit up
        guest["units"] = [*dict.fromkeys([*Request.of(guest).texts("units"), service.unit])]
    for table in ("found", "outdated", "previous", "revisions"):
        operation.ledger.table(table).pop(key, None)
    operation.ledger.unmanage_service(service)
    return {"unit": service.unit}


def need_running(system: System, service: Service) -> None:
    """Refuse a service whose container can't be spoken to."""
    vmid = service.container
    if vmid is None:
        return
    if container_config(system, vmid) is None:
        raise RefusedError(f"container {vmid} of service {service.name} does not exist on this node: correct the VMID")
    if status(system, "pct", vmid) != "running":
        raise RefusedError(f"container {vmid} of service {service.name} is stopped: `pct start {vmid}`, and run again")


def show(system: System, service: Service) -> dict[str, str]:
    """What systemd says of the unit."""
    names = "LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,MainPID,NRestarts,FragmentPath,DropInPaths"
    done = need_inside(system, service.container, "systemctl", "show", service.unit, "-p", names)
    return properties(done.out)


def read_file(system: System, container: int | None, path: str) -> str | None:
    """A file's exact text, in a container or on the host; None where there is none."""
    if container is None:
        return system.root.text(path)
    done = run_inside(system, container, "cat", path)
    if done.ok:
        return done.out
    if "No such file" in done.err:
        return None
    raise FailedError(f"{path} in container {container} can't be read: {done.complaint()}")


def write_file(system: System, container: int | None, path: str, text: str | None) -> None:
    """Replace a file by a rename beside it, in a container or on the host; None removes it."""
    if container is None:
        if text is None:
            system.root.at(path).unlink(missing_ok=True)
        else:
            write_atomically(system.root.at(path), text)
        return
    if text is None:
        need_inside(system, container, "rm", "-f", path)
        return
    folder, _, name = path.rpartition("/")
    beside = f"{folder}/.{name}.new"
    local = system.root.at(f"{FOLDER}/push")
    write_atomically(local, text, 0o600)
    try:
        system.need("pct", "push", str(container), str(local), beside, "--perms", "0644", limit=60)
        need_inside(system, container, "mv", "-f", beside, path)
    finally:
        with contextlib.suppress(OSError):
            local.unlink()


def set_enabled(operation: Operation, service: Service, *, enabled: bool) -> None:
    """Enable or disable the unit for the next boot, without starting or stopping it."""
    verb, opposite = ("enable", "disable") if enabled else ("disable", "enable")
    system, container = operation.system, service.container
    operation.undo_with(
        f"{opposite} {service.unit}", partial(need_inside, system, container, "systemctl", opposite, service.unit)
    )
    operation.begin(f"{verb} {service.unit} in {_where(service)}")
    need_inside(system, container, "systemctl", verb, service.unit)
    quieted: Json = {"vmid": container, "unit": service.unit}
    if quieted in operation.ledger.quieted:
        operation.ledger.quieted.remove(quieted)


def replace(system: System, service: Service, path: str, text: str | None) -> None:
    """Write, check and load a unit file."""
    write_file(system, service.container, path, text)
    if read_file(system, service.container, path) != text:
        raise FailedError(f"{path} in {_where(service)} reads differently from what was written: is its disk full?")
    need_inside(system, service.container, "systemctl", "daemon-reload")


def change(operation: Operation, service: Service, path: str, current: str | None, text: str | None) -> None:
    """Replace a unit file as a step of an operation; None is no file."""
    operation.undo_with(f"{path} as before", partial(replace, operation.system, service, path, current))
    operation.begin(f"{'remove' if text is None else 'write'} {path} in {_where(service)}")
    replace(operation.system, service, path, text)


def _where(service: Service) -> str:
    return "the host" if service.container is None else f"container {service.container}"
