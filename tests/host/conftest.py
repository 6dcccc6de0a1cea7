"""An SSH server on loopback that runs what it is sent, for the transport alone."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import asyncssh
import pytest

from host.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class LoopbackServer:
    """The server's keys and port, and how many connections it took."""

    host_key: asyncssh.SSHKey
    client_key: asyncssh.SSHKey
    port: int = 0
    connections: int = 0
    accepted: list[asyncssh.SSHServerConnection] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop = field(init=False)
    stop: asyncio.Event = field(init=False)

    @property
    def target(self) -> Target:
        """A target that fits the server."""
        return Target(
            address="127.0.0.1",
            port=self.port,
            user="root",
            host_key=self.host_key.export_public_key().decode().strip(),
            root="/",
            private_key=self.client_key.export_private_key().decode(),
        )

    def with_other_host_key(self) -> Target:
        """A target that pins a key which the server doesn't have."""
        other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()
        return replace(self.target, host_key=other)

    def drop(self) -> None:
        """Cut every connection."""
        for connection in self.accepted:
            self.loop.call_soon_threadsafe(connection.abort)


async def _handle(process: asyncssh.SSHServerProcess[bytes]) -> None:
    given = await process.stdin.read()
    command = process.command or "true"
    done = await asyncio.to_thread(subprocess.run, ["sh", "-c", command], input=given, capture_output=True, check=False)
    with contextlib.suppress(BrokenPipeError):
        process.stdout.write(done.stdout)
        process.stderr.write(done.stderr)
        process.exit(done.returncode)


async def _serve(server: LoopbackServer, ready: threading.Event) -> None:
    class Counting(asyncssh.SSHServer):
        def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
            server.connections += 1
            server.accepted.append(connection)

    server.loop, server.stop = asyncio.get_running_loop(), asyncio.Event()
    authorized = asyncssh.import_authorized_keys(server.client_key.export_public_key().decode())
    async with asyncssh.create_server(
        Counting,
        "127.0.0.1",
        0,
        server_host_keys=[server.host_key],
        authorized_client_keys=authorized,
        process_factory=_handle,
        encoding=None,
    ) as acceptor:
        server.port = acceptor.get_port()
        ready.set()
        await server.stop.wait()
        for connection in server.accepted:
            connection.abort()
            await connection.wait_closed()


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    """A running server."""
    made = LoopbackServer(asyncssh.generate_private_key("ssh-ed25519"), asyncssh.generate_private_key("ssh-ed25519"))
    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(made, ready)))
    thread.start()
    assert ready.wait(10)
    yield made
    made.loop.call_soon_threadsafe(made.stop.set)
    thread.join(10)
