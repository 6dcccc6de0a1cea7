from __future__ import annotations

from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from pulumi.runtime.proto import engine_pb2, engine_pb2_grpc


class Engine:
    """The engine as a plugin sees it: where log lines go."""

    def __init__(self, address: str | None = None) -> None:
        self.address = address
        self._channel: Any = None

    async def status(self, urn: str, message: str) -> None:
        """Show a line of progress on a resource, which later ones overwrite."""
        await self._log(engine_pb2.INFO, urn, message, ephemeral=True)

    async def warning(self, urn: str, message: str) -> None:
        """Show a warning on a resource."""
        await self._log(engine_pb2.WARNING, urn, message)

    async def error(self, urn: str, message: str) -> None:
        """Show an error on a resource; the operation itself must still be failed."""
        await self._log(engine_pb2.ERROR, urn, message)

    async def close(self) -> None:
        """End the connection to the engine."""
        if self._channel is not None:
            await self._channel.close()

    async def _log(self, severity: Any, urn: str, message: str, *, ephemeral: bool = False) -> None:
        if self.address is None:
            return
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address)
        request = engine_pb2.LogRequest(severity=severity, urn=urn, message=message, ephemeral=ephemeral)
        stub: Any = engine_pb2_grpc.EngineStub(self._channel)
        await stub.Log(request)
