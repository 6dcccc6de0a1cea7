"""Drain: stop what this program manages and holds given devices; refuse before touching anything else."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from . import lxc_config
from .guests import container_config, need_inside, shut_down, status, vm_config
from .holders import Holder, find_holders
from .pci import NVIDIA, VFIO, Address, Pci
from .persist import need_driverctl
from .request import Managed, Request, Service
from .result import BadRequestError, FailedError, Json, RefusedError
from .vm_config import refers_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .operation import Operation
    from .system import System

PASSING = 3.0
"""Seconds granted to a holder that isn't ours before the refusal: an nvidia-smi of a monitor comes and goes."""


@dataclass(frozen=True)
class Limits:
    """Seconds for stopping one holder, for the holders' vanishing, and for a stranger to go by itself."""

    stop: float
    holders: float
    passing: float

    @classmethod
    def of(cls, request: Request) -> Limits:
        """As the request has them."""
        return cls(
            request.seconds("stop_timeout_s", 120.0),
            request.seconds("holders_timeout_s", 60.0),
            request.seconds("passing_s", PASSING),
        )


def drain(operation: Operation, request: Request) -> dict[str, Json]:
    """Stop the managed holders of the devices that are about to change their driver."""
    driver, devices = known_driver(request), request.addresses("devices")
    pci = Pci(operation.system.root)
    need_devices(pci, devices)
    changing = [device for device in devices if pci.driver(device) != driver]
    pool = request.text("pool")
    if changing:
        need_driverctl(operation.system)
    stopped = drain_devices(operation, pool, changing, request.managed(), Limits.of(request))
    record_revision(operation, f"drain:{pool}", request)
    operation.ledger.manage(request.managed())
    return {"drained": [*stopped]}


def known_driver(request: Request) -> str:
    """The request's driver, one of the two that a pool can be on."""
    driver = request.text("driver")
    if driver not in (NVIDIA, VFIO):
        raise BadRequestError(f"field driver is {driver!r}: it must be {NVIDIA} or {VFIO}")
    return driver


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


def drain_devices(
    operation: Operation, pool: str, devices: Iterable[Address], managed: Managed, limits: Limits
) -> list[str]:
    """Stop every managed holder of a pool's devices; what was stopped, in words.

    Raises RefusedError, before anything is stopped, when a holder isn't managed.
    """
    wanted = tuple(devices)
    if not wanted:
        return []
    known = operation.ledger.managed
    managed = Managed((*managed.services, *known.services), (*managed.vms, *known.vms))
    holders = _holders_to_stop(operation, wanted, managed, limits.passing)
    stopped = []
    for what in dict.fromkeys(_stoppable(holder, managed, pool) for holder in holders):
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
    """A service (unit), a VM (vmid), or a daemon (unit and the pool it was stopped for) that can be started again."""

    unit: str = ""
    container: int | None = None
    vmid: int | None = None
    daemon_of: str | None = None

    def describe(self) -> str:
        """Its name in a message."""
        if self.vmid is not None:
            return f"VM {self.vmid}"
        return f"{self.unit}" + (f" in container {self.container}" if self.container is not None else "")

    def entry(self) -> dict[str, Json]:
        """Its form in the ledger."""
        if self.vmid is not None:
            return {"kind": "vm", "vmid": self.vmid}
        if self.daemon_of is not None:
            return {"kind": "unit", "unit": self.unit, "pool": self.daemon_of}
        return {"kind": "service", "container": self.container, "unit": self.unit}

    def stop(self, operation: Operation, limit: float) -> None:
        """Stop it within `limit` seconds or so."""
        if self.vmid is not None:
            shut_down(operation.system, "qm", self.vmid, limit)
        else:
            need_inside(operation.system, self.container, "systemctl", "stop", self.unit, limit=limit)


def start_again(operation: Operation, entry: dict[str, Json]) -> None:
    """Start one drained thing, and take it off the ledger's list."""
    system, asked = operation.system, Request(entry)
    if hindered := _hindered(system, asked):
        raise FailedError(
            f"not started, since {', '.join(hindered)} {'is' if len(hindered) == 1 else 'are'} not usable"
        )
    if entry["kind"] == "vm":
        vmid = asked.number("vmid")
        if status(system, "qm", vmid) != "running":
            system.need("qm", "start", str(vmid), limit=300)
    else:
        need_inside(system, asked.number_or_none("container"), "systemctl", "start", asked.text("unit"), limit=120)
    operation.ledger.forget_drained(entry)


def start_drained(operation: Operation) -> None:
    """Start again, in reverse order, what the ledger lists and can run: a change was undone.

    What was drained for another pool's change that did succeed stays stopped: its GPUs are elsewhere by now.
    """
    for entry in reversed([one for one in operation.ledger.drained if isinstance(one, dict)]):
        if not _elsewhere(operation.system, Request(entry)):
            start_again(operation, entry)


def _gpus(system: System, entry: Request, *, driver: str) -> tuple[list[Address], bool]:
    """The GPUs that a drained guest's configuration names and that `driver` has; whether it names others too."""
    pci = Pci(system.root)
    displays = [address for address in pci.all() if pci.is_display(address)]
    on_driver = [address for address in displays if pci.driver(address) == driver]
    if (vmid := entry.number_or_none("vmid")) is not None:
        named = refers_to(vm_config(system, vmid) or "", displays, system.root)
        return [address for address in named if address in on_driver], not set(named) <= set(on_driver)
    minors = {pci.minor(address): address for address in on_driver}
    container = entry.number_or_none("container")
    if container is None:  # a daemon, or a service of the host, which may open every card
        return list(minors.values()), False
    wanted = lxc_config.parse(container_config(system, container) or "").minors
    return [address for minor, address in minors.items() if minor in wanted], not wanted <= set(minors)


def _elsewhere(system: System, entry: Request) -> bool:
    """Whether a drained guest's GPUs are, in part, on another driver by now."""
    return _gpus(system, entry, driver=VFIO if entry.has("vmid") else NVIDIA)[1]


def _hindered(system: System, entry: Request) -> list[str]:
    """What forbids starting: GPUs whose removal hangs, or a VM's GPUs that vfio-pci does not have.

    Proxmox would take those from their driver by itself, in use or not.
    """
    gpus, others = _gpus(system, entry, driver=VFIO if entry.has("vmid") else NVIDIA)
    if entry.has("vmid") and others:
        return [f"a GPU that is not on {VFIO}"]
    pci = Pci(system.root)
    answered = system.read_apart({one: partial(pci.override, one) for one in gpus}, 1.0)
    return [address for address in gpus if address not in answered]


def start_daemons(operation: Operation, pool: str, *, last: bool) -> None:
    """Start the driver's daemons that this pool's drain stopped, once its devices are bound; all of them at the last.

    They serve the other cards too. A daemon that another pool's drain stopped waits for that pool's binding, which it
    would only hinder; where no other pool is left, its binding never comes.
    """
    for entry in [one for one in operation.ledger.drained if isinstance(one, dict) and one["kind"] == "unit"]:
        if last or entry.get("pool") == pool:
            operation.begin(f"start {entry['unit']}")
            start_again(operation, entry)


def _stoppable(holder: Holder, managed: Managed, pool: str) -> Stoppable:
    if holder.vmid is not None:
        return Stoppable(vmid=holder.vmid)
    service: Service | None = holder.service_of(managed)
    if service is not None:
        return Stoppable(unit=service.unit, container=service.container)
    return Stoppable(unit=holder.unit or "", daemon_of=pool)


def _holders_to_stop(
    operation: Operation, devices: tuple[Address, ...], managed: Managed, passing: float
) -> list[Holder]:
    deadline = time.monotonic() + passing
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
