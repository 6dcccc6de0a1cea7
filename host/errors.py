"""What can go wrong between the workstation and the hypervisor, told apart for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class HostError(Exception):
    """A host could not be asked, or an operation failed; the message says what, by which rule, and how to fix it."""

    # A dynamic resource's failure reaches the person through traceback.format_exc(), which prints the class with its
    # module unless that is builtins.
    __module__ = "builtins"


class TransportError(HostError):
    """The host was not reached, or the connection was lost: nothing is known of what it did."""

    __module__ = "builtins"


class OperationError(HostError):
    """The agent answered that an operation did not succeed.

    `outcome` is `bad-request`, `refused` (nothing changed), `undone`, `not-undone` or `busy`.
    """

    __module__ = "builtins"

    def __init__(self, operation: str, outcome: str, message: str, details: Mapping[str, object]) -> None:
        super().__init__(f"{operation} {_OUTCOMES.get(outcome, outcome)}: {message}")
        self.operation = operation
        self.outcome = outcome
        self.message = message
        self.details = details


_OUTCOMES = {
    "bad-request": "was not understood by the host",
    "refused": "was refused, nothing was changed",
    "undone": "failed and was undone",
    "not-undone": "failed and could NOT be undone",
    "busy": "did not start, another operation holds the host",
}
