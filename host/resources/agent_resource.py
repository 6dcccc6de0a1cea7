"""The one shape of every resource that the agent applies, observes and releases."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, ResourceProvider, UpdateResult

from host.resources.session import HostResourceProvider, Properties, readable, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pulumi import Input, ResourceOptions

    from topology.facts import Facts


OBSERVED = "observed"
"""The output that says what the host had when it was last looked at; drift is its difference from what is wanted."""


class AgentResourceProvider(HostResourceProvider):
    """Applies with one operation, releases with another, reads through the facts.

    A subclass names the operations, the inputs whose change is an update, and those that say where the thing is, and
    says what facts to ask for, what of them to observe, and what must be observed when all is as wanted.
    """

    apply_operation: ClassVar[str]
    release_operation: ClassVar[str]
    compared: ClassVar[tuple[str, ...]]
    placed: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def request(self, inputs: Properties) -> Properties:
        """The apply operation's request."""

    @abstractmethod
    def release_request(self, inputs: Properties) -> Properties:
        """The release operation's request."""

    @abstractmethod
    def facts_request(self, inputs: Properties) -> Properties:
        """Which facts `observe` needs."""

    @abstractmethod
    def observe(self, facts: Facts, inputs: Properties) -> object | None:
        """What the host has now; None where the thing itself is gone."""

    @abstractmethod
    def wanted(self, inputs: Properties) -> object:
        """What `observe` returns when all is as wanted."""

    def diff(self, _id: str, olds: Properties, news: Properties) -> DiffResult:
        """An input that counts differs, or the host drifted; at another place it is another thing, made anew."""
        changed = any(olds.get(name) != news.get(name) for name in self.compared)
        moved = [name for name in self.placed if olds.get(name) != news.get(name)]
        return DiffResult(
            changes=changed or bool(moved) or olds.get(OBSERVED) != self.wanted(news),
            replaces=moved,
            # The host's book knows one place for each: what is at the old one is handed back before.
            delete_before_replace=True,
        )

    @readable
    def create(self, props: Properties) -> CreateResult:
        """Apply; what already is as wanted is adopted untouched by the operation itself."""
        return CreateResult(self.identity(_whole(props)), self._apply(props))

    @readable
    def update(self, _id: str, _olds: Properties, news: Properties) -> UpdateResult:
        """Apply again; the operation changes only what differs."""
        return UpdateResult(self._apply(news))

    @readable
    def read(self, id_: str, props: Properties) -> ReadResult:
        """Observe the host; a thing that is gone reads as deleted."""
        from host.facts import parse_facts  # noqa: PLC0415  as in `client`

        props = _whole(props)
        facts = parse_facts(self.client().facts(self.facts_request(props)), "the host's agent")
        observed = self.observe(facts, props)
        if observed is None:
            return ReadResult("", {})
        return ReadResult(id_, {**props, OBSERVED: observed})

    @readable
    def delete(self, _id: str, props: Properties) -> None:
        """Give back what the host's book says is still this resource's."""
        self.client().call(self.release_operation, self.release_request(_whole(props)))

    @abstractmethod
    def identity(self, inputs: Properties) -> str:
        """The resource's ID, unique on its host."""

    def _apply(self, inputs: Properties) -> Properties:
        # The operation verified the host before it answered, so what is wanted is what was observed.
        inputs = _whole(inputs)
        self.client().call(self.apply_operation, self.request(inputs))
        return {**inputs, OBSERVED: self.wanted(inputs)}


def _whole(props: Properties) -> Properties:
    return {name: whole(value) for name, value in props.items()}


class ObservedResource(Resource):
    """A resource in the state whose output `observed` says what was last seen.

    Pulumi evaluates a resource class's annotations when outputs come back, so neither this class nor a component has
    one that names a type imported for type checking alone.
    """

    provider_type: ClassVar[type[ResourceProvider]]

    def __init__(self, name: str, props: Mapping[str, Input[object]], opts: ResourceOptions | None = None) -> None:
        super().__init__(self.provider_type(), name, {**props, OBSERVED: None}, opts)
