"""What the engine does with a plugin, small: the provider protocol over real gRPC, and a log that records."""
# ruff: noqa: D102 - the methods are the protocol's

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]
from pulumi.runtime.proto import engine_pb2, engine_pb2_grpc, provider_pb2, provider_pb2_grpc

from testbed.engine.plugins._serve import start
from testbed.engine.plugins._wire import decode, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from testbed.engine.plugins._serve import Plugin
    from testbed.engine.plugins._wire import Props

SEVERITIES = {engine_pb2.INFO: "info", engine_pb2.WARNING: "warning", engine_pb2.ERROR: "error"}


class OperationError(Exception):
    """What the engine would print as the error of an operation."""


class _Log(engine_pb2_grpc.EngineServicer):
    def __init__(self) -> None:
        self.records: list[Any] = []
        self.news = asyncio.Event()

    async def Log(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.records.append(request)
        self.news.set()
        return Empty()


@dataclass(frozen=True)
class Checked:
    """A Check's answer: the inputs, and the failures by property."""

    inputs: Props
    failures: dict[str, str]


@dataclass
class Driver:
    """Calls a plugin as the engine does, for one resource."""

    stub: Any
    log: _Log
    token: str = ""
    name: str = "thing"
    state: Props = field(default_factory=dict)

    @property
    def urn(self) -> str:
        return f"urn:pulumi:dev::project::{self.token}::{self.name}"

    @property
    def lines(self) -> list[str]:
        """The informational lines that reached the engine."""
        return [record.message for record in self.log.records if record.severity == engine_pb2.INFO]

    def logged(self, severity: str) -> list[str]:
        return [record.message for record in self.log.records if SEVERITIES[record.severity] == severity]

    async def until_logged(self, line: str) -> None:
        while line not in self.lines:
            self.log.news.clear()
            await self.log.news.wait()

    async def configure(self, config: Mapping[str, Any]) -> None:
        await _call(self.stub.Configure(provider_pb2.ConfigureRequest(args=encode(config))))

    async def check_config(self, config: Mapping[str, Any]) -> dict[str, str]:
        answer = await self.stub.CheckConfig(provider_pb2.CheckRequest(news=encode(config)))
        return {failure.property: failure.reason for failure in answer.failures}

    async def check(self, inputs: Mapping[str, Any], olds: Mapping[str, Any] | None = None) -> Checked:
        request = provider_pb2.CheckRequest(
            urn=self.urn, news=encode(inputs), olds=encode(olds or {}), randomSeed=b"seed"
        )
        answer = await _call(self.stub.Check(request))
        return Checked(decode(answer.inputs), {failure.property: failure.reason for failure in answer.failures})

    async def diff(self, olds: Mapping[str, Any], news: Mapping[str, Any], ignore: list[str] | None = None) -> Any:
        request = provider_pb2.DiffRequest(
            id="id", urn=self.urn, olds=encode(olds), news=encode(news), ignoreChanges=ignore or []
        )
        return await _call(self.stub.Diff(request))

    async def create(self, inputs: Mapping[str, Any], *, preview: bool = False) -> tuple[str, Props]:
        request = provider_pb2.CreateRequest(urn=self.urn, properties=encode(inputs), preview=preview)
        answer = await _call(self.stub.Create(request))
        return answer.id, decode(answer.properties)

    async def read(
        self, identifier: str, state: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
    ) -> tuple[str, Props, Props]:
        request = provider_pb2.ReadRequest(
            id=identifier, urn=self.urn, properties=encode(state), inputs=encode(inputs or {})
        )
        answer = await _call(self.stub.Read(request))
        return answer.id, decode(answer.properties), decode(answer.inputs)

    async def update(
        self, identifier: str, olds: Mapping[str, Any], news: Mapping[str, Any], *, preview: bool = False
    ) -> Props:
        request = provider_pb2.UpdateRequest(
            id=identifier, urn=self.urn, olds=encode(olds), news=encode(news), preview=preview
        )
        return decode((await _call(self.stub.Update(request))).properties)

    async def delete(self, identifier: str, state: Mapping[str, Any]) -> None:
        await _call(self.stub.Delete(provider_pb2.DeleteRequest(id=identifier, urn=self.urn, properties=encode(state))))

    async def cancel(self) -> None:
        await self.stub.Cancel(Empty())

    async def invoke(self, token: str, args: Mapping[str, Any]) -> Props:
        answer = await _call(self.stub.Invoke(provider_pb2.InvokeRequest(tok=token, args=encode(args))))
        assert not answer.failures, answer.failures
        return decode(getattr(answer, "return"))


async def _call(call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise OperationError(error.details()) from error


@contextlib.asynccontextmanager
async def driving(plugin: Plugin, token: str = "") -> AsyncIterator[Driver]:
    """A driver of the plugin, which serves as it does for the engine."""
    log = _Log()
    engine = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(log, engine)
    engine_port = engine.add_insecure_port("127.0.0.1:0")
    await engine.start()
    server, port = await start(plugin)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = provider_pb2_grpc.ResourceProviderStub(channel)
            await stub.Handshake(provider_pb2.ProviderHandshakeRequest(engine_address=f"127.0.0.1:{engine_port}"))
            yield Driver(stub, log, token)
    finally:
        await server.stop(grace=None)
        await plugin.close()
        await engine.stop(grace=None)
