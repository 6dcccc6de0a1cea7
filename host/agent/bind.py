"""Bind a pool's devices to its driver, live and for the next boot; hand back what left it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from .container_live import restart_pending
from .drain import Limits, drain_devices, known_driver, need_devices, record_revision, start_daemons, start_drained
from .pci import VFIO, Address, Pci, slot_of
from .persist import need_driverctl, persist
from .rebind import Binding, load, move, probe, read_binding, restore, set_override, unbind
from .request import Request
from .result import AgentError, BadRequestError, Json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .operation import Operation
    from .system import System


def bind(operation: Operation, request: Request) -> dict[str, Json]:
    """Bring every device of a pool onto its driver; a device that is as wanted is left alone."""
    pool, driver = request.text("pool"), known_driver(request)
    devices, others = request.addresses("devices"), request.addresses("others")
    if shared := sorted({slot_of(one) for one in devices} & {slot_of(one) for one in others}):
        raise BadRequestError(f"{', '.join(shared)} is in pool {pool} and in another: one device has one owner")
    system, pci = operation.system, Pci(operation.system.root)
    managed, limits, unbind_limit = request.managed(), Limits.of(request), request.seconds("unbind_timeout_s", 60.0)
    with _or_start_drained(operation):
        need_devices(pci, devices)
        wanted = {address: _wanted(operation, pci, address, driver) for address in _with_functions(pci, devices)}
        now = {address: read_binding(system, address) for address in wanted}
        changing = [address for address in wanted if not wanted[address].met_by(now[address])]
        leaving = _leaving(operation, devices, others)
        if changing or leaving:
            need_driverctl(system)
        moving = [address for address in changing if not wanted[address].live(now[address])]
        drain_devices(operation, pool, [*moving, *_moving_back(operation, pci, leaving)], managed, limits)
    operation.undo_with("start what was drained", lambda: start_drained(operation))
    _own(operation, pool, wanted, now)
    for address in changing:
        _change(operation, address, now[address], wanted[address], unbind_limit)
    for address in changing:
        _persist(operation, address, now[address], wanted[address])
    for address in leaving:
        _hand_back(operation, address, unbind_limit)
    _forget_missing(operation, pci)
    start_daemons(operation, pool, last=not others)
    operation.ledger.manage(managed)
    record_revision(operation, f"binding:{pool}", request)
    return {"devices": [_result(system, pci, address) for address in devices], "handed_back": [*leaving]}


@contextlib.contextmanager
def _or_start_drained(operation: Operation) -> Iterator[None]:
    """A binding that is refused before it changes anything undoes the drain that came before it, too."""
    try:
        yield
    except AgentError:
        if not operation.changed and operation.ledger.drained:
            operation.undo_with("start what was drained", lambda: start_drained(operation))
            operation.begin("give the binding up")
        raise


def release(operation: Operation, request: Request) -> dict[str, Json]:
    """Hand back, as they were found, the devices that by now still belong to a pool."""
    pool = request.text("pool")
    pci = Pci(operation.system.root)
    leaving = [address for address in _owned(operation, pool) if pci.exists(address)]
    drain_devices(operation, pool, _moving_back(operation, pci, leaving), request.managed(), Limits.of(request))
    operation.undo_with("start what was drained", lambda: start_drained(operation))
    for address in leaving:
        _hand_back(operation, address, request.seconds("unbind_timeout_s", 60.0))
    _forget_missing(operation, pci)
    start_daemons(operation, pool, last=not operation.ledger.table("devices"))
    restart_pending(operation, request)
    for key in (f"binding:{pool}", f"drain:{pool}"):
        operation.ledger.table("revisions").pop(key, None)
    return {"handed_back": [*leaving]}


def _with_functions(pci: Pci, devices: Iterable[Address]) -> list[Address]:
    return list(dict.fromkeys(function for device in devices for function in pci.functions(device)))


@dataclass(frozen=True)
class Wanted:
    """What a function is to be bound to, and which persistent halves agree with it."""

    driver: str | None  # None: whichever driver the kernel chooses by ids
    override: str | None
    persisted: str | None
    accepted: tuple[str | None, ...]

    def met_by(self, now: Binding) -> bool:
        """Whether the binding needs no change."""
        return self.live(now) and now.persisted in self.accepted

    def live(self, now: Binding) -> bool:
        """Whether the live half needs no change."""
        if self.driver is None:
            return now.driver != VFIO  # a function that no driver of this host knows has none
        return now.driver == self.driver and now.override in (None, self.override)


def _wanted(operation: Operation, pci: Pci, address: Address, driver: str) -> Wanted:
    """What a function of a pool's slot is to be bound to.

    A card's audio or USB function leaves the host together with its GPU (a group with one function on a host
    driver is not viable for vfio), and goes back to what it was found on.
    """
    if driver == VFIO:
        return Wanted(driver, driver, driver, (driver,))
    if pci.is_display(address):
        return Wanted(driver, driver, driver, (None, driver))  # an override keeps another card's new_id off this one
    found, now = _found(operation, address), pci.driver(address)
    if found and found.driver != VFIO:
        return Wanted(found.driver, found.override, found.persisted, (found.persisted,))
    return Wanted(None if now == VFIO else now, None, None, (None, now if now != VFIO else None))


def _found(operation: Operation, address: Address) -> Binding | None:
    entry = operation.ledger.table("devices").get(address)
    if not isinstance(entry, dict):
        return None
    found = Request.of(entry["found"], f"ledger.devices.{address}.")
    return Binding(found.text_or_none("driver"), found.text_or_none("override"), found.text_or_none("persisted"))


def _own(operation: Operation, pool: str, wanted: dict[Address, Wanted], now: dict[Address, Binding]) -> None:
    """Record owner and, at first touch, what was found; before acting, so that a killed run loses nothing."""
    table = operation.ledger.table("devices")
    for address, target in wanted.items():
        known = table.get(address)
        found: Json = (
            known["found"]
            if isinstance(known, dict)
            else {"driver": now[address].driver, "override": now[address].override, "persisted": now[address].persisted}
        )
        table[address] = {"pool": pool, "driver": target.driver, "found": found}


def _owned(operation: Operation, pool: str) -> list[Address]:
    table = operation.ledger.table("devices")
    return [Address(key) for key, value in sorted(table.items()) if isinstance(value, dict) and value["pool"] == pool]


def _leaving(operation: Operation, devices: Iterable[Address], others: Iterable[Address]) -> list[Address]:
    """Devices that are in no pool any more, also those of a pool whose first bind was killed and then given up."""
    pci = Pci(operation.system.root)
    kept = {slot_of(address) for address in (*devices, *others)}
    owned = (Address(key) for key in sorted(operation.ledger.table("devices")))
    return [address for address in owned if slot_of(address) not in kept and pci.exists(address)]


def _moving_back(operation: Operation, pci: Pci, leaving: Iterable[Address]) -> list[Address]:
    found = {address: _found(operation, address) for address in leaving}
    return [address for address, binding in found.items() if binding and binding.driver != pci.driver(address)]


def _change(operation: Operation, address: Address, now: Binding, wanted: Wanted, unbind_limit: float) -> None:
    """Change the live half, unless only the persistent one differs."""
    system, driver = operation.system, wanted.driver
    if wanted.live(now):
        return
    if driver is not None:
        load(system, driver)
    operation.undo_with(
        f"{address} back to {now.driver or 'no driver'}", lambda: restore(system, address, now, unbind_limit)
    )
    operation.begin(f"{address}: {now.driver or 'no driver'} → {driver or 'whichever driver knows it'}")
    if driver is None:
        set_override(system, address, None)
        unbind(system, address, unbind_limit)
        probe(system, address)
        return
    move(system, address, driver, unbind_limit)
    if wanted.override != driver:
        set_override(system, address, wanted.override)


def _persist(operation: Operation, address: Address, now: Binding, wanted: Wanted) -> None:
    system = operation.system
    if now.persisted == wanted.persisted:
        return
    operation.undo_with(
        f"{address} at boot as before ({now.persisted or 'no override'})",
        lambda: persist(system, address, now.persisted),
    )
    operation.begin(f"{address}: {wanted.persisted or 'no override'} at boot")
    persist(system, address, wanted.persisted)


def _hand_back(operation: Operation, address: Address, unbind_limit: float) -> None:
    """Restore one device to its found binding, and let go of it in the ledger."""
    system, found = operation.system, _found(operation, address)
    now = read_binding(system, address)
    if found and now != found:
        need_driverctl(system)
        operation.undo_with(
            f"{address} back to {now.driver or 'no driver'}",
            lambda: _restore_both(system, address, now, unbind_limit),
        )
        operation.begin(f"{address}: back to {found.driver or 'no driver'}, as found")
        _restore_both(system, address, found, unbind_limit)
    operation.ledger.table("devices").pop(address)


def _forget_missing(operation: Operation, pci: Pci) -> None:
    """A card that was taken out of the machine can't be handed back."""
    table = operation.ledger.table("devices")
    for address in [Address(key) for key in table if not pci.exists(Address(key))]:
        table.pop(address)


def _restore_both(system: System, address: Address, binding: Binding, unbind_limit: float) -> None:
    restore(system, address, binding, unbind_limit)
    persist(system, address, binding.persisted)


def _result(system: System, pci: Pci, address: Address) -> dict[str, Json]:
    binding = read_binding(system, address)
    return cast(
        "dict[str, Json]",
        {
            "address": address,
            "driver": binding.driver,
            "driver_override": binding.override,
            "persisted": binding.persisted,
            "minor": pci.minor(address),
        },
    )
