"""A host to reach over SSH: a real shell and real SFTP below a folder, in this process, without root."""
# ruff: noqa: D102 - the methods say what they are

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asyncssh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from testbed.engine.plugins._wire import Props

    Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

PASSWORD = "correct horse"  # noqa: S105


@dataclass
class SshHost:
    """The host as a client sees it, and what it saw of its clients."""

    root: Path
    port: int = 0
    key: asyncssh.SSHKey = field(default_factory=lambda: asyncssh.generate_private_key("ssh-ed25519"))
    client_key: asyncssh.SSHKey = field(default_factory=lambda: asyncssh.generate_private_key("ssh-ed25519"))
    attempts: int = 0
    open: set[Any] = field(default_factory=set)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # set once a client has gone

    @property
    def public_line(self) -> str:
        """The host's key as one authorized_keys line."""
        return self.key.export_public_key().decode().strip()

    def connection(self, **changes: Any) -> Props:
        """The `connection` input that works, with changes; None leaves a property out."""
        props: Props = {
            "host": "127.0.0.1",
            "port": self.port,
            "user": "root",
            "password": PASSWORD,
            "hostKey": self.public_line,
            "dialErrorLimit": 0,
            **changes,
        }
        return {name: value for name, value in props.items() if value is not None}

    def write(self, name: str, text: str = "") -> None:
        (self.root / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.root / name).read_text()

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()


class _Server(asyncssh.SSHServer):
    def __init__(self, host: SshHost) -> None:
        self._host = host
        self._connection: Any = None

    def connection_made(self, conn: Any) -> None:
        self._host.attempts += 1
        self._host.open.add(conn)
        self._connection = conn
        # As OpenSSH since 8.8: no signatures with SHA-1.
        conn._server_host_keys.pop(b"ssh-rsa", None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.open.discard(self._connection)
        self._host.left.set()

    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return username == "root" and password == PASSWORD

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return key == self._host.client_key.convert_to_public()

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return True


async def _pump(source: Any, sink: Any) -> None:
    with contextlib.suppress(ConnectionError, asyncssh.Error):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        if isinstance(sink, asyncio.StreamWriter):
            sink.close()


async def _run(host: SshHost, process: asyncssh.SSHServerProcess[bytes]) -> None:
    shell = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        process.command or "",
        cwd=host.root,
        env={"PATH": "/usr/bin:/bin", **process.env},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    feeding = asyncio.ensure_future(_pump(process.stdin, shell.stdin))
    try:
        await asyncio.gather(_pump(shell.stdout, process.stdout), _pump(shell.stderr, process.stderr))
        status = await shell.wait()
    finally:
        feeding.cancel()
        if shell.returncode is None:  # the client went away, and this host with it
            os.killpg(shell.pid, signal.SIGKILL)
            await shell.wait()
    if status < 0:
        process.exit_with_signal({-9: "KILL", -15: "TERM"}[status])
    else:
        process.exit(status)


class _Sftp(asyncssh.SFTPServer):
    def __init__(self, root: Path, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        super().__init__(chan, chroot=str(root).encode())


@contextlib.asynccontextmanager
async def ssh_host(root: Path, key: asyncssh.SSHKey | None = None) -> AsyncIterator[SshHost]:
    """A host on an ephemeral loopback port."""
    host = SshHost(root) if key is None else SshHost(root, key=key)
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=functools.partial(_Server, host),
        server_host_keys=[host.key],
        process_factory=functools.partial(_run, host),
        sftp_factory=functools.partial(_Sftp, root),
        encoding=None,
    )
    host.port = server.get_port()
    try:
        yield host
    finally:
        server.close()
        for connection in list(host.open):
            connection.abort()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def listener(handle: Handler, **where: Any) -> AsyncIterator[asyncio.Server]:
    """A plain stream server, on an ephemeral loopback port or on `path`, whose connections end with it."""
    writers: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Future[None]] = []

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        tasks.append(asyncio.ensure_future(handle(reader, writer)))

    if "path" in where:
        server = await asyncio.start_unix_server(serve, **where)
    else:
        server = await asyncio.start_server(serve, "127.0.0.1", **{"port": 0, **where})
    try:
        yield server
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await asyncio.gather(*tasks, return_exceptions=True)
