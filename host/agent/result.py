"""How an operation can end, and the errors that say so."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    from collections.abc import Mapping

Json: TypeAlias = Union[bool, int, float, str, list["Json"], dict[str, "Json"], None]  # noqa: UP007 (recursive)


class Outcome(StrEnum):
    """Every way in which an operation can fail."""

    BAD_REQUEST = "bad-request"
    REFUSED = "refused"
    UNDONE = "undone"
    NOT_UNDONE = "not-undone"
    BUSY = "busy"


EXIT_CODES = {
    Outcome.BAD_REQUEST: 2,
    Outcome.REFUSED: 3,
    Outcome.UNDONE: 4,
    Outcome.NOT_UNDONE: 5,
    Outcome.BUSY: 6,
}


class AgentError(Exception):
    """An operation's failure: its outcome and a message that says what, the value, the rule and the fix."""

    outcome = Outcome.UNDONE

    def __init__(self, message: str, details: Mapping[str, Json] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Json] = dict(details or {})
        self.steps: list[str] = []


class BadRequestError(AgentError):
    """The request isn't one that this agent understands."""

    outcome = Outcome.BAD_REQUEST


class RefusedError(AgentError):
    """A check failed before anything was changed."""

    outcome = Outcome.REFUSED


class BusyError(AgentError):
    """Another operation holds the host's lock."""

    outcome = Outcome.BUSY


class FailedError(AgentError):
    """A step failed; what was done before it is to be undone."""


class NotUndoneError(AgentError):
    """A step failed and the host could not be brought back to where it was."""

    outcome = Outcome.NOT_UNDONE


class StuckError(FailedError):
    """A kernel write did not return: its writer may hang in the kernel, whatever is undone around it."""


class LeftStartingError(NotUndoneError):
    """The person's connection is gone: the service goes on loading, and the next run looks at it again."""
