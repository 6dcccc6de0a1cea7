"""A mutating operation as a transaction: lock, journal, steps, undo, record."""

from __future__ import annotations

import copy
import datetime as dt
from typing import TYPE_CHECKING

from .ledger import Ledger
from .lock import host_lock
from .result import (
    AgentError,
    BadRequestError,
    BusyError,
    FailedError,
    Json,
    LeftStartingError,
    NotUndoneError,
    RefusedError,
    StuckError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .request import Request
    from .system import System

NOT_JOURNALLED = ("api_key", "text", "previous_text", "environment")
"""Request fields that may carry secrets, or that only swell the journal."""


class Operation:
    """What one operation did so far, how to undo it, and the ledger that records it."""

    def __init__(self, system: System, name: str, request: Request) -> None:
        self.system = system
        self.name = name
        self.steps: list[str] = []
        self.changed = False
        self.ledger = Ledger(system.root)
        self._request = {key: value for key, value in request.fields.items() if key not in NOT_JOURNALLED}
        self._undo: list[tuple[str, Callable[[], object]]] = []
        interrupted = self.ledger.data["operation"]
        if isinstance(interrupted, dict):
            self.note(
                f"an earlier {interrupted.get('op')} was cut off at «{interrupted.get('step')}»: "
                "going on from what the host shows"
            )
        self._before = copy.deepcopy(self.ledger.data)

    def note(self, line: str) -> None:
        """Tell and record one step that changes nothing."""
        self.steps.append(line)
        self.system.progress(line)

    def begin(self, step: str) -> None:
        """Journal, then tell, a step that changes the host; called before the change."""
        if not self.changed:
            sequence = self.ledger.data["sequence"]
            self.ledger.data["sequence"] = (sequence if isinstance(sequence, int) else 0) + 1
        self.ledger.data["operation"] = {
            "op": self.name,
            "request": copy.deepcopy(self._request),
            "step": step,
            "undo": [label for label, _ in self._undo],
            "started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        }
        self.ledger.save()
        self.changed = True
        self.note(step)

    def undo_with(self, label: str, action: Callable[[], object]) -> None:
        """Say how to undo what comes next; undone in reverse order."""
        self._undo.append((label, action))

    def finish(self) -> None:
        """Record the end; raises FailedError when the ledger can't be written."""
        self.ledger.data["operation"] = None
        self.ledger.save()

    def roll_back(self) -> list[str]:
        """Undo everything in reverse order; the labels and reasons of what could not be undone."""
        failures = []
        while self._undo:
            label, action = self._undo.pop()
            try:
                self.note(f"undo: {label}")
                action()
            except (AgentError, OSError) as error:
                failures.append(f"{label}: {error}")
        if not failures:
            still = self.ledger.drained
            self._before["drained"] = [one for one in self._before["drained"] or [] if one in still]  # type: ignore[union-attr]
            self._before["sequence"] = self.ledger.data["sequence"]
            self.ledger.data = self._before
        try:
            self.finish()
        except AgentError as error:
            failures.append(f"the ledger: {error}")
        return failures


def run_mutating(
    system: System, name: str, request: Request, act: Callable[[Operation, Request], dict[str, Json]]
) -> dict[str, Json]:
    """Run one operation under the host's lock; its result's fields, or an AgentError that says how it ended."""
    with host_lock(system, request.seconds("lock_wait_s", 120.0)):
        operation = Operation(system, name, request)
        try:
            fields = act(operation, request)
            operation.finish()
        except Exception as error:
            raise _ended(operation, error) from error
        return {"ok": True, "changed": operation.changed, "steps": list(operation.steps), **fields}


def _ended(operation: Operation, error: Exception) -> AgentError:
    """What to report of an operation that raised: refused, undone or not undone."""
    details = dict(error.details) if isinstance(error, AgentError) else {}
    what = error.message if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"
    ended: AgentError
    if not operation.changed:
        if isinstance(error, BadRequestError | RefusedError | BusyError):
            ended = error
        else:
            ended = FailedError(f"{what}. Nothing had been changed", details)
    else:
        if isinstance(error, LeftStartingError):
            operation.finish()
            return error
        failures = operation.roll_back()
        if isinstance(error, StuckError):
            failures.append("the kernel still has that write; see above")
        if isinstance(error, NotUndoneError):
            failures.append("see above")
        if failures:
            ended = NotUndoneError(f"{what}. NOT undone: {'; '.join(failures)}", details)
        else:
            ended = FailedError(f"{what}. Everything done before was undone", details)
    ended.steps = list(operation.steps)
    return ended
