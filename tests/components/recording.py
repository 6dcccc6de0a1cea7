"""What a program asks of the engine, recorded: every registration with all that orders, replaces or hides it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pulumi
from google.protobuf import json_format  # type: ignore[import-untyped]
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]
from pulumi.runtime import mocks
from pulumi.runtime.proto import resource_pb2
from pulumi.runtime.rpc import UNKNOWN, is_rpc_secret
from pulumi.runtime.settings import SETTINGS
from pulumi.runtime.stack import wait_for_rpcs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STACK = "pulumi:pulumi:Stack"


@dataclass(frozen=True)
class Secret:
    """A value that the state holds encrypted only."""

    value: object


@dataclass(frozen=True, kw_only=True)
class Registered:
    """One resource as it was registered; `parent`, `provider` and `dependencies` are URNs."""

    urn: str
    type: str
    name: str
    custom: bool
    parent: str
    provider: str
    inputs: dict[str, Any]
    dependencies: frozenset[str]
    delete_before_replace: bool
    replace_on_changes: tuple[str, ...]
    import_id: str
    retained: bool
    secret_outputs: tuple[str, ...]


@dataclass
class Recording:
    """All resources by URN, and which outputs each component registered, one entry a registration."""

    resources: dict[str, Registered] = field(default_factory=dict)
    outputs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def components(self) -> list[Registered]:
        """The component resources, the stack aside."""
        return [resource for resource in self.resources.values() if not resource.custom]

    @property
    def children(self) -> dict[str, Registered]:
        """The resources that do something, by name; providers aside."""
        found = [r for r in self.resources.values() if r.custom and not r.type.startswith("pulumi:providers:")]
        assert len({resource.name for resource in found}) == len(found)
        return {resource.name: resource for resource in found}

    def component(self, kind: str, name: str) -> Registered:
        """One component by the last part of its type, and its name."""
        return next(r for r in self.components if r.type == f"gpu-topology:index:{kind}" and r.name == name)

    def before(self, name: str) -> set[str]:
        """The names of all resources that must be done before `name` is begun."""
        done: set[str] = set()
        queue = [self.children[name]]
        while queue:
            for urn in queue.pop().dependencies:
                resource = self.resources[urn]
                if resource.name not in done:
                    done.add(resource.name)
                    queue.append(resource)
        return done


class RecordingMonitor(mocks.MockMonitor):
    """Answers each registration with its own inputs as outputs; called from the event loop's worker threads.

    The stock monitor makes an event loop in each of those threads and never closes it, and it drops whatever is not an
    input, so nothing of its registration is used.
    """

    def __init__(self) -> None:
        super().__init__(_NoMocks())
        self.recording = Recording()
        self._lock = threading.Lock()

    def RegisterResource(  # noqa: N802  the engine's own name
        self, request: resource_pb2.RegisterResourceRequest
    ) -> resource_pb2.RegisterResourceResponse:
        """Record it."""
        urn = self.make_urn(request.parent, request.type, request.name)
        if request.type != STACK:
            with self._lock:
                assert urn not in self.recording.resources, f"{urn} is registered twice"
                self.recording.resources[urn] = _registered(urn, request)
        return resource_pb2.RegisterResourceResponse(
            urn=urn, id=f"{request.name}-id" if request.custom else "", object=request.object
        )

    def RegisterResourceOutputs(  # noqa: N802  the engine's own name
        self, request: resource_pb2.RegisterResourceOutputsRequest
    ) -> Empty:
        """Record them."""
        if STACK not in request.urn.split("::")[2].split("$")[-1]:
            with self._lock:
                self.recording.outputs.append((request.urn, _plain(request.outputs)))
        return Empty()


def record(program: Callable[[], object], *, preview: bool = False) -> Recording:
    """Run a program in an event loop, and in settings of Pulumi's, that end with it; what it raises is raised here."""
    monitor = RecordingMonitor()

    async def run() -> None:
        # Of all settings this one set is shared by every context, with what a program left that ended by an error.
        SETTINGS.outputs = set()
        mocks.set_mocks(_NoMocks(), project="gpu-topology", stack="test", preview=preview, monitor=monitor)
        program()
        await wait_for_rpcs()

    # The runner gives its own context, in which Pulumi keeps its settings, and ends the loop's worker threads.
    with asyncio.Runner() as runner:
        runner.run(run())
    assert pulumi.runtime.get_root_resource() is None
    return monitor.recording


def in_clear(value: object) -> Iterator[str]:
    """Every text that stands in the state in clear, names of fields included."""
    match value:
        case str():
            yield value
        case dict():
            for name, item in value.items():
                yield name
                yield from in_clear(item)
        case list():
            for item in value:
                yield from in_clear(item)


def has_unknown(value: object) -> bool:
    """Whether anything in it is not known at a preview."""
    match value:
        case Secret():
            return has_unknown(value.value)
        case dict():
            return any(map(has_unknown, value.values()))
        case list():
            return any(map(has_unknown, value))
        case _:
            return value == UNKNOWN


class _NoMocks(mocks.Mocks):
    def call(self, args: mocks.MockCallArgs) -> Any:
        raise AssertionError(f"the program calls {args.token} of a provider")

    def new_resource(self, args: mocks.MockResourceArgs) -> Any:
        raise AssertionError(f"{args.name} was not recorded")


def _registered(urn: str, request: resource_pb2.RegisterResourceRequest) -> Registered:
    return Registered(
        urn=urn,
        type=request.type,
        name=request.name,
        custom=request.custom,
        parent=request.parent,
        provider=request.provider,
        inputs=_plain(request.object),
        dependencies=frozenset(request.dependencies),
        delete_before_replace=request.deleteBeforeReplace,
        replace_on_changes=tuple(request.replaceOnChanges),
        import_id=request.importId,
        retained=request.retainOnDelete,
        secret_outputs=tuple(request.additionalSecretOutputs),
    )


def _plain(message: Any) -> dict[str, Any]:
    value: dict[str, Any] = _unwrapped(json_format.MessageToDict(message))
    return value


def _unwrapped(value: Any) -> Any:
    if is_rpc_secret(value):
        return Secret(_unwrapped(value["value"]))
    if isinstance(value, dict):
        return {name: _unwrapped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_unwrapped(item) for item in value]
    return value
