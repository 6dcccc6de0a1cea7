"""Drain: stop what this program manages and holds given devices; refuse before touching anything else."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .guests import need_inside, shut_down, status
from .holders import Holder, find_holders
from .pci import Address, Pci
from .request import Managed, Request, Service
from .result import FailedError, Json, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .operation import Operation

PASSING = 3.0
"""Seconds granted to a holder that isn't ours before the refusal: an nvidia-smi of a monitor comes and goes."""


@dataclass(frozen=True)
class Limits:
    """Seconds that stopping one holder, and the holders' vanishing, may take."""

    stop: float
    holders: float

    @classmethod
    def of(cls, request: Request) -> Limits:
        """As the request has them."""
        return cls(request.seconds("stop_timeout_s", 120.0), request.seconds("holders_timeout_s", 60.0))


def drain(operation: Operation, request: Request) -> dict[str, Json]:
    """Stop the managed holders of the devices that are about to change their driver."""
    driver, devices = request.text("driver"), request.addresses("devices")
    pci = Pci(operation.system.root)
    need_devices(pci, devices)
    changing = [device for device in devices if pci.driver(device) != driver]
    stopped = drain_devices(operation, changing, request.managed(), Limits.of(request))
    record_revision(operation, f"drain:{request.text('pool')}", request)
    operation.ledger.manage(request.managed())
    return {"drained": [*stopped]}


def record_revision(operation: Operation, key: str, request: Request) -> None:
    """Keep the request's revision; its only reader is the workstation."""
    operation.ledger.table("revisions")[key] = request.text_or_none("revision")


def need_devices(pci: Pci, devices: Iterable[Address]) -> None:
    """Refuse devices that the kernel doesn't know."""
    if missing := [device for device in devices if not pci.exists(device)]:
        raise RefusedError(
            f"{', '.join(missing)} does not exist on this host: look at `lspci -D -d ::0300` and `lspci -D -d ::0302`, "
            "and correct the pool's devices"
        )


def drain_devices(operation: Operation, devices: Iterable[Address], managed: Managed, limits: Limits) -> list[str]:
    """Stop every managed holder of the devices; what was stopped, in words.

    Raises RefusedError, before anything is stopped, when a holder isn't managed.
    """
    wanted = tuple(devices)
    if not wanted:
        return []
    known = operation.ledger.managed
    managed = Managed((*managed.services, *known.services), (*managed.vms, *known.vms))
    holders = _holders_to_stop(operation, wanted, managed)
    stopped = []
    for what in dict.fromkeys(_stoppable(holder, managed) for holder in holders):
        operation.begin(f"stop {what.describe()}")
        operation.ledger.note_drained(what.entry())
        operation.undo_with(f"start {what.describe()}", partial(start_again, operation, what.entry()))
        what.stop(operation, limits.stop)
        stopped.append(what.describe())
    if stopped:
        _wait_until_free(operation, wanted, limits.holders)
    return stopped


@dataclass(frozen=True)
class Stoppable:
    """A service or daemon (unit) or a VM (vmid) that can be stopped and started."""

    unit: str = ""
    container: int | None = None
    vmid: int | None = None
    daemon: bool = False

    def describe(self) -> str:
        """Its name in a message."""
        if self.vmid is not None:
            return f"VM {self.vmid}"
        return f"{self.unit}" + (f" in container {self.container}" if self.container is not None else "")

    def entry(self) -> dict[str, Json]:
        """Its form in the ledger."""
        if self.vmid is not None:
            return {"kind": "vm", "vmid": self.vmid}
        if self.daemon:
            return {"kind": "unit", "unit": self.unit}
        return {"kind": "service", "container": self.container, "unit": self.unit}

    def stop(self, operation: Operation, limit: float) -> None:
        """Stop it within `limit` seconds or so."""
        if self.vmid is not None:
            shut_down(operation.system, "qm", self.vmid, limit)
        else:
            need_inside(operation.system, self.container, "systemctl", "stop", self.unit, limit=limit)


def start_again(operation: Operation, entry: dict[str, Json]) -> None:
    """Start one drained thing, and take it off the ledger's list."""
    system = operation.system
    if entry["kind"] == "vm":
        vmid = str(entry["vmid"])
        if status(system, "qm", int(vmid)) != "running":
            system.need("qm", "start", vmid, limit=300)
    else:
        container = entry.get("container")
        place = container if isinstance(container, int) else None
        need_inside(system, place, "systemctl", "start", str(entry["unit"]), limit=120)
    operation.ledger.forget_drained(entry)


def start_drained(operation: Operation) -> None:
    """Start again, in reverse order, everything that is on the ledger's list: a change was undone."""
    for entry in reversed([one for one in operation.ledger.drained if isinstance(one, dict)]):
        start_again(operation, entry)


def start_daemons(operation: Operation) -> None:
    """Start the driver's daemons that a drain stopped, once devices are bound; they serve the other cards too."""
    for entry in [one for one in operation.ledger.drained if isinstance(one, dict) and one["kind"] == "unit"]:
        operation.begin(f"start {entry['unit']}")
        start_again(operation, entry)


def _stoppable(holder: Holder, managed: Managed) -> Stoppable:
    if holder.vmid is not None:
        return Stoppable(vmid=holder.vmid)
    service: Service | None = holder.service_of(managed)
    if service is not None:
        return Stoppable(unit=service.unit, container=service.container)
    return Stoppable(unit=holder.unit or "", daemon=True)


def _holders_to_stop(operation: Operation, devices: tuple[Address, ...], managed: Managed) -> list[Holder]:
    deadline = time.monotonic() + PASSING
    while True:
        holders = find_holders(operation.system, devices)
        strangers = [holder for holder in holders if not holder.is_managed(managed)]
        if not strangers:
            return holders
        if time.monotonic() > deadline:
            raise RefusedError(
                f"{'; '.join(one.describe() for one in strangers)}: this program does not manage "
                f"{'it' if len(strangers) == 1 else 'them'}, and never stops what is not its own. "
                "Stop it by hand, or name it under services or vms, and run again",
                {"holders": [one.describe() for one in strangers]},
            )
        time.sleep(0.5)


def _wait_until_free(operation: Operation, devices: tuple[Address, ...], limit: float) -> None:
    started = told = time.monotonic()
    while holders := find_holders(operation.system, devices):
        now = time.monotonic()
        names = "; ".join(one.describe() for one in holders)
        if now - started > limit:
            raise FailedError(f"still held {limit:.0f} s after everything was stopped: {names}")
        if now - told > 10:
            told = now
            operation.system.progress(f"waiting for {names} ({now - started:.0f} s)")
        time.sleep(0.3)
    operation.note(f"nothing holds {', '.join(devices)}")
