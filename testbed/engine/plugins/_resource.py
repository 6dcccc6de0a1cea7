"""What a plugin's resource and function are, apart from how the engine calls them."""
# ruff: noqa: ARG002 - the base's own methods do nothing with what the subclasses need

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from testbed.engine.plugins._diff import Change
    from testbed.engine.plugins._engine import Engine
    from testbed.engine.plugins._schema import Failure
    from testbed.engine.plugins._wire import Props

    Function: TypeAlias = Callable[[Props], Awaitable[Props]]


class ProviderError(Exception):
    """An operation that failed or cannot be done; its text is what the person reads."""


class PartialError(ProviderError):
    """A creation that failed after the resource came to be; the engine keeps it in the state, as failed."""

    def __init__(self, reason: str, identifier: str, outputs: Props) -> None:
        super().__init__(reason)
        self.identifier = identifier
        self.outputs = outputs


@dataclass(frozen=True)
class Job:
    """One call of the engine: the resource it is about, and the engine to tell of progress."""

    urn: str
    engine: Engine

    @property
    def name(self) -> str:
        """The resource's name in the program."""
        return self.urn.rsplit("::", 1)[-1]

    async def status(self, line: str) -> None:
        """Show a line of progress."""
        await self.engine.status(self.urn, line)

    async def warn(self, text: str) -> None:
        """Show a warning."""
        await self.engine.warning(self.urn, text)


class Resource(ABC):
    """One resource type. Inputs and state come with secrets revealed, except in `complete`, `faults` and `diff`."""

    token: ClassVar[str]
    replacing: ClassVar[frozenset[str]] = frozenset()  # properties whose change replaces, beyond the schema's

    def complete(self, job: Job, olds: Props, inputs: Props, seed: bytes) -> Props:
        """The inputs with what the provider itself chooses, such as a name."""
        return inputs

    def faults(self, inputs: Props) -> list[Failure]:
        """What is wrong with inputs that fit the schema."""
        return []

    @abstractmethod
    def diff(self, olds: Props, news: Props) -> dict[str, Change]:
        """The changes from the state to the inputs, by property path."""

    @abstractmethod
    def preview(self, olds: Props | None, inputs: Props) -> Props:
        """The outputs as far as they are known before anything is done; no old state means a creation."""

    @abstractmethod
    async def create(self, job: Job, inputs: Props) -> tuple[str, Props]:
        """Make the resource; returns its id and outputs."""

    async def read(self, job: Job, identifier: str, state: Props, inputs: Props) -> tuple[Props, Props] | None:
        """The outputs and inputs as they really are, None if the resource is gone."""
        return state, inputs

    @abstractmethod
    async def update(self, job: Job, identifier: str, olds: Props, news: Props) -> Props:
        """Change the resource in place; returns its outputs."""

    @abstractmethod
    async def delete(self, job: Job, identifier: str, olds: Props) -> None:
        """Remove the resource."""
