"""Holders that must give up devices which stay on their driver: what the configuration moved elsewhere or left out."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from .drain import Stoppable, start_again
from .holders import Holder, find_holders
from .request import Managed, Service
from .result import FailedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .operation import Operation
    from .pci import Address

HOLDERS_LIMIT = 60.0


def make_way_for_vm(operation: Operation, vmid: int, devices: Iterable[Address], stop_limit: float) -> None:
    """Stop other managed VMs that hold a VM's devices: their own entries are changed, or taken away, later."""
    vms = tuple(other for other in operation.ledger.managed.vms if other != vmid)
    _stop(operation, tuple(devices), Managed(vms=vms), stop_limit)


def make_way_for_service(operation: Operation, service: Service, devices: Iterable[Address], stop_limit: float) -> None:
    """Stop managed services that hold a service's devices, other than those which share them by configuration.

    One that the configuration left out is deleted last, when its successor was to run long before; and it is given
    back disabled, since at the next boot both would start.
    """
    ledger = operation.ledger
    kept, others = ledger.configured, []
    for other in ledger.managed.services:
        left_out = kept is not None and (other.unit, other.container) not in kept
        if (other.unit, other.container) != (service.unit, service.container) and (
            left_out or other.container != service.container
        ):
            others.append((other, left_out))
    for gone in _stop(operation, tuple(devices), Managed(tuple(other for other, _ in others)), stop_limit):
        for other, left_out in others:
            found = ledger.table("found").get(f"unit:{other.name}")
            if left_out and (other.unit, other.container) == (gone.unit, gone.container) and isinstance(found, dict):
                found["enabled"] = False


def _stop(
    operation: Operation, devices: tuple[Address, ...], managed: Managed, stop_limit: float
) -> tuple[Stoppable, ...]:
    def holders() -> list[Holder]:
        return [one for one in find_holders(operation.system, devices) if _is_one_of(one, managed)]

    if not (managed.services or managed.vms):
        return ()
    stopped = tuple(dict.fromkeys(_stoppable(one) for one in holders()))
    for what in stopped:
        operation.begin(f"stop {what.describe()}, whose GPUs go to another owner")
        operation.ledger.note_drained(what.entry())
        operation.undo_with(f"start {what.describe()}", partial(start_again, operation, what.entry()))
        what.stop(operation, stop_limit)
    deadline = time.monotonic() + HOLDERS_LIMIT
    while stopped and (left := holders()):
        if time.monotonic() > deadline:
            raise FailedError(
                f"still held {HOLDERS_LIMIT:.0f} s after it was stopped: {'; '.join(one.describe() for one in left)}"
            )
        time.sleep(0.3)
    return stopped


def _is_one_of(holder: Holder, managed: Managed) -> bool:
    return holder.vmid in managed.vms or holder.service_of(managed) is not None


def _stoppable(holder: Holder) -> Stoppable:
    return Stoppable(vmid=holder.vmid) if holder.vmid is not None else Stoppable(holder.unit or "", holder.container)
