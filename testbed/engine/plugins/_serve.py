"""The gRPC side that both plugins share: the provider protocol in terms of small resources and functions."""
# ruff: noqa: N802, ARG002 - names and arguments are those of the protocol

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc, status_pb2

from testbed.engine.plugins._diff import changes, root
from testbed.engine.plugins._resource import Job, PartialError, ProviderError
from testbed.engine.plugins._wire import decode, encode, has_unknown, reveal_props

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping

    from testbed.engine.plugins._diff import Change
    from testbed.engine.plugins._engine import Engine
    from testbed.engine.plugins._resource import Function, Resource
    from testbed.engine.plugins._schema import Failure, Schema
    from testbed.engine.plugins._wire import Props

# The Pulumi SDKs allow messages of 400 MB, since a state can be large.
MESSAGE_LIMIT = 400 * 1024 * 1024
_OPTIONS = [("grpc.max_receive_message_length", MESSAGE_LIMIT), ("grpc.max_send_message_length", MESSAGE_LIMIT)]
_PARENT_CHECK_S = 1.0


class Plugin(provider_pb2_grpc.ResourceProviderServicer):
    """A resource provider: its schema, resources and functions, spoken to by the engine."""

    def __init__(
        self, schema: Schema, resources: Mapping[str, Resource], functions: Mapping[str, Function], engine: Engine
    ) -> None:
        self.schema = schema
        self.resources = resources
        self.functions = functions
        self.engine = engine
        self._running: set[asyncio.Task[Any]] = set()
        self._cancelled = False

    async def configure(self, config: Props) -> None:
        """Take the provider's configuration, secrets revealed; nothing to do unless a plugin has one."""

    async def close(self) -> None:
        """Let go of what the plugin holds open."""
        await self.engine.close()

    def config_failures(self, config: Props) -> list[Failure]:
        """What is wrong with the provider's configuration."""
        return self.schema.check_config(config)

    async def Handshake(self, request: Any, context: Any) -> Any:
        self.engine.address = request.engine_address or self.engine.address
        return provider_pb2.ProviderHandshakeResponse(accept_secrets=True)

    async def Attach(self, request: Any, context: Any) -> Any:
        self.engine.address = request.address
        return Empty()

    async def GetPluginInfo(self, request: Any, context: Any) -> Any:
        return plugin_pb2.PluginInfo(version=self.schema.version)

    async def GetSchema(self, request: Any, context: Any) -> Any:
        return provider_pb2.GetSchemaResponse(schema=self.schema.text)

    async def CheckConfig(self, request: Any, context: Any) -> Any:
        news = decode(request.news)
        inputs = encode(self.schema.config_with_secrets(news))
        return provider_pb2.CheckResponse(inputs=inputs, failures=_failures(self.config_failures(news)))

    async def DiffConfig(self, request: Any, context: Any) -> Any:
        # A changed endpoint or credential is the same host reached otherwise, never a reason to replace its guests.
        names = sorted({root(path) for path in changes(decode(request.old_inputs), decode(request.news))})
        return provider_pb2.DiffResponse(changes=_amount(names), diffs=names)

    async def Configure(self, request: Any, context: Any) -> Any:
        config = self.schema.parse_config(reveal_props(decode(request.args)))
        async with self._work(context):
            if not has_unknown(config):
                await self.configure(config)
        return provider_pb2.ConfigureResponse(acceptSecrets=True, supportsPreview=True)

    async def Invoke(self, request: Any, context: Any) -> Any:
        function, args = self.functions.get(request.tok), reveal_props(decode(request.args))
        async with self._work(context):
            if function is None:
                raise ProviderError(f"this stand-in of {self.schema.name} doesn't carry the function {request.tok}")
            failures = self.schema.check_arguments(request.tok, args)
            result = encode({} if failures else await function(args))
        # `return` is a keyword, so the field can only be given by name in a mapping.
        return provider_pb2.InvokeResponse(failures=_failures(failures), **{"return": result})

    async def Check(self, request: Any, context: Any) -> Any:
        job, news = self._job(request), decode(request.news)
        async with self._work(context):
            resource = self._resource(request)
            failures = self.schema.check(resource.token, news)
            inputs = self.schema.with_defaults(resource.token, news)
            inputs = resource.complete(job, decode(request.olds), inputs, request.randomSeed)
            failures += [] if failures else resource.faults(inputs)
            inputs = self.schema.with_secrets(resource.token, inputs, inputs)
        return provider_pb2.CheckResponse(inputs=encode(inputs), failures=_failures(failures))

    async def Diff(self, request: Any, context: Any) -> Any:
        olds, news = decode(request.olds), decode(request.news)
        async with self._work(context):
            resource = self._resource(request)
            for name in request.ignoreChanges:
                _copy(olds, news, root(name))
            found = resource.diff(olds, news)
        names = {root(path) for path in found}
        replaced = {name for name in names if name in resource.replacing or self.schema.replaces(resource.token, name)}
        return provider_pb2.DiffResponse(
            changes=_amount(found),
            diffs=sorted(names),
            replaces=sorted(replaced),
            detailedDiff={path: _property_diff(change, root(path) in replaced) for path, change in found.items()},
            hasDetailedDiff=True,
        )

    async def Create(self, request: Any, context: Any) -> Any:
        wire = decode(request.properties)
        async with self._work(context):
            resource, inputs = self._resource(request), reveal_props(wire)
            if request.preview:
                identifier, outputs = "", resource.preview(None, inputs)
            else:
                try:
                    identifier, outputs = await resource.create(self._job(request), inputs)
                except PartialError as error:
                    await self._fail_partially(context, error, resource, wire)
        outputs = self.schema.with_secrets(resource.token, outputs, wire)
        return provider_pb2.CreateResponse(id=identifier, properties=encode(outputs))

    async def Read(self, request: Any, context: Any) -> Any:
        state, wire = decode(request.properties), decode(request.inputs)
        async with self._work(context):
            resource = self._resource(request)
            found = await resource.read(self._job(request), request.id, reveal_props(state), reveal_props(wire))
        if found is None:  # an empty id tells the engine that the resource is gone
            return provider_pb2.ReadResponse()
        outputs, inputs = found
        marks = state | wire
        return provider_pb2.ReadResponse(
            id=request.id,
            properties=encode(self.schema.with_secrets(resource.token, outputs, marks)),
            inputs=encode(self.schema.with_secrets(resource.token, inputs, marks)),
        )

    async def Update(self, request: Any, context: Any) -> Any:
        olds, wire = decode(request.olds), decode(request.news)
        for name in request.ignoreChanges:
            _copy(olds, wire, root(name))
        async with self._work(context):
            resource, news, state = self._resource(request), reveal_props(wire), reveal_props(olds)
            if request.preview:
                outputs = resource.preview(state, news)
            else:
                outputs = await resource.update(self._job(request), request.id, state, news)
        return provider_pb2.UpdateResponse(properties=encode(self.schema.with_secrets(resource.token, outputs, wire)))

    async def Delete(self, request: Any, context: Any) -> Any:
        async with self._work(context):
            state = reveal_props(decode(request.properties))
            await self._resource(request).delete(self._job(request), request.id, state)
        return Empty()

    async def Cancel(self, request: Any, context: Any) -> Any:
        self._cancelled = True
        for task in self._running:
            task.cancel()
        return Empty()

    async def _fail_partially(self, context: Any, error: PartialError, resource: Resource, wire: Props) -> None:
        """Fail, and tell the engine in the status' details of the resource that exists all the same."""
        outputs = self.schema.with_secrets(resource.token, error.outputs, wire)
        failed = provider_pb2.ErrorResourceInitFailed(
            id=error.identifier, properties=encode(outputs), reasons=[str(error)], inputs=encode(wire)
        )
        status = status_pb2.Status(code=grpc.StatusCode.UNKNOWN.value[0], message=str(error))
        status.details.add().Pack(failed)
        trailer = (("grpc-status-details-bin", status.SerializeToString()),)
        await context.abort(grpc.StatusCode.UNKNOWN, str(error), trailing_metadata=trailer)

    async def _unimplemented(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"the stand-in of {self.schema.name} doesn't do this")

    # The generated base raises a Python error for these, which gRPC would print with a traceback.
    Parameterize = Call = Construct = GetMapping = GetMappings = _unimplemented

    def _resource(self, request: Any) -> Resource:
        token = request.type or _token(request.urn)
        if token not in self.resources:
            raise ProviderError(f"this stand-in of {self.schema.name} doesn't carry the resource {token}")
        return self.resources[token]

    def _job(self, request: Any) -> Job:
        return Job(request.urn, self.engine)

    @contextlib.asynccontextmanager
    async def _work(self, context: Any) -> AsyncIterator[None]:
        """Answer a refusal as the error that the person reads, and let Cancel interrupt what is running."""
        task = asyncio.current_task()
        self._running |= {task} if task else set()
        try:
            yield
        except ProviderError as error:
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            await context.abort(grpc.StatusCode.CANCELLED, "cancelled")
        finally:
            self._running -= {task}


def _token(urn: str) -> str:
    """The resource type of a URN, whose third part lists the types of the parents before it."""
    return urn.split("::")[2].rsplit("$", 1)[-1]


def _amount(found: Collection[str]) -> Any:
    return provider_pb2.DiffResponse.DIFF_SOME if found else provider_pb2.DiffResponse.DIFF_NONE


def _copy(olds: Props, news: Props, name: str) -> None:
    news.pop(name, None)
    if name in olds:
        news[name] = olds[name]


def _failures(failures: list[Failure]) -> list[Any]:
    return [provider_pb2.CheckFailure(property=failure.path, reason=failure.reason) for failure in failures]


def _property_diff(change: Change, replace: bool) -> Any:
    kind = f"{change.name}_REPLACE" if replace else change.name
    return provider_pb2.PropertyDiff(kind=provider_pb2.PropertyDiff.Kind.Value(kind))


async def start(plugin: Plugin) -> tuple[Any, int]:
    """Serve the plugin on a free loopback port; returns the server and its port."""
    server = grpc.aio.server(options=_OPTIONS)
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(plugin, server)
    port: int = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def serve(plugin: Plugin) -> None:
    """Serve until the engine ends this process or is gone, after printing the port, as the engine expects."""
    parent = os.getppid()  # before the engine can know of this process, and so be gone again
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    server, port = await start(plugin)
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    while not ended.is_set() and os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _PARENT_CHECK_S)
    await server.stop(grace=None)
    await plugin.close()
