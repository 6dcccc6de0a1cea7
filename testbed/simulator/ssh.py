"""The SSH server: it runs what it is sent in the private root, and serves files by SFTP."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import asyncssh

from testbed.simulator.events import EventKind

if TYPE_CHECKING:
    from asyncssh.channel import SSHChannel

    from testbed.simulator.events import EventLog
    from testbed.simulator.folder import Folder
    from testbed.simulator.tree import Tree
    from testbed.simulator.waiting import HeldPipes

LOOPBACK = "127.0.0.1"
SHELL = "/bin/sh"
CHUNK = 1 << 16
ENDED_S = 5


class SshServer:
    """One port on loopback; `connections` and `commands` count what it accepted and ran."""

    def __init__(self, tree: Tree, log: EventLog, environment: dict[str, str], folder: Folder, held: HeldPipes) -> None:
        self.tree, self.log, self.environment, self.folder, self.held = tree, log, environment, folder, held
        self.connections = 0
        self.commands = 0
        self.port = 0
        self._listener: asyncssh.SSHAcceptor | None = None
        self._silent: asyncio.Server | None = None
        self._unheard: list[asyncio.StreamWriter] = []
        self._open: dict[asyncssh.SSHServerConnection, set[asyncio.subprocess.Process]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> None:
        """Listen; port 0 takes a free one."""
        self._listener = await asyncssh.listen(
            LOOPBACK,
            port,
            server_factory=lambda: _Session(self),
            server_host_keys=[str(self.folder.host_key_file)],
            authorized_client_keys=f"{self.folder.identity_file}.pub",
            encoding=None,
            line_editor=False,
            reuse_address=True,
        )
        self.port = self._listener.get_port()

    async def stop(self) -> None:
        """Drop every connection and listen no more."""
        await asyncio.gather(*(c.wait_closed() for c in self.cut("the host goes down")))
        if self._listener:
            self._listener.close()
            await self._listener.wait_closed()
            self._listener = None
        if self._silent:
            self._silent.close()
            self._silent = None
            for writer in self._unheard:
                writer.close()
            self._unheard.clear()

    async def ended(self) -> None:
        """Let go of commands whose processes were killed, before the event loop is closed under them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ENDED_S)

    async def set_silent(self, *, on: bool) -> None:
        """Accept TCP connections and say nothing, or serve again."""
        if on and self._listener:
            await self.stop()
            self._silent = await asyncio.start_server(self._say_nothing, LOOPBACK, self.port, reuse_address=True)
        elif not on and self._silent:
            await self.stop()
            await self.start(self.port)

    async def _say_nothing(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        self._unheard.append(writer)

    def cut(self, reason: str) -> list[asyncssh.SSHServerConnection]:
        """Drop every connection; gives those that were open."""
        dropped = list(self._open)
        for connection in dropped:
            self.log.add(EventKind.SSH_DROP, reason)
            connection.abort()
            self.closed(connection)
        return dropped

    def opened(self, connection: asyncssh.SSHServerConnection) -> None:
        """Take note of a new connection."""
        self.connections += 1
        self._open[connection] = set()
        self.log.add(EventKind.SSH_CONNECT, "root")

    def closed(self, connection: asyncssh.SSHServerConnection) -> None:
        """Hang up on the commands of a connection that is gone."""
        for process in self._open.pop(connection, set()):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGHUP)

    async def run(self, channel: asyncssh.SSHServerProcess[bytes]) -> None:
        """Run a command and pass its streams on."""
        task = asyncio.current_task()
        if task:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        connection = channel.get_extra_info("connection")
        command = channel.command
        if command is None:
            channel.stderr.write(b"The simulated host runs commands; it has no login shell.\n")
            channel.exit(1)
            return
        self.commands += 1
        self.log.add(EventKind.SSH_EXEC, command)
        process = await asyncio.create_subprocess_exec(
            SHELL,
            "-c",
            command,
            cwd=self.tree.root,
            env=self.environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        running = self._open.get(connection)
        if running is None:
            os.killpg(process.pid, signal.SIGHUP)
            return
        running.add(process)
        pipes = _output_pipes(process)
        feeding = asyncio.create_task(_feed(channel, process))
        try:
            await asyncio.gather(_pass_on(process.stdout, channel.stdout), _pass_on(process.stderr, channel.stderr))
            status = await process.wait()
            await self.held.released(pipes)
        finally:
            running.discard(process)
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        self._exit(channel, status)

    @staticmethod
    def _exit(channel: asyncssh.SSHServerProcess[bytes], status: int) -> None:
        if status < 0:
            channel.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
        else:
            channel.exit(status)


def _output_pipes(process: asyncio.subprocess.Process) -> list[str]:
    """The names, as /proc/PID/fd has them, of the pipes that keep a command's channel open."""
    transport = process._transport  # type: ignore[attr-defined]  # noqa: SLF001  asyncio shows the pipes nowhere else
    ends = [transport.get_pipe_transport(number).get_extra_info("pipe") for number in (1, 2)]
    return [f"pipe:[{os.fstat(end.fileno()).st_ino}]" for end in ends if not end.closed]


async def _feed(channel: asyncssh.SSHServerProcess[bytes], process: asyncio.subprocess.Process) -> None:
    """Pass on what the client sends, until it ends or the command no longer reads."""
    if process.stdin is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):
        while data := await channel.stdin.read(CHUNK):
            process.stdin.write(data)
            await process.stdin.drain()
    process.stdin.close()


async def _pass_on(source: asyncio.StreamReader | None, target: asyncssh.SSHWriter[bytes]) -> None:
    """Pass on what the command prints; once the client is gone, only read it."""
    while source and (data := await source.read(CHUNK)):
        with suppress(BrokenPipeError, ConnectionError):
            target.write(data)
            await target.drain()


class _Session(asyncssh.SSHServer):
    """One connection: root by key only, environment variables refused as sshd without AcceptEnv does."""

    def __init__(self, server: SshServer) -> None:
        self._server = server
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._server.opened(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._connection:
            self._server.closed(self._connection)

    def password_auth_supported(self) -> bool:
        return False

    def session_requested(self) -> tuple[asyncssh.SSHServerChannel[bytes], asyncssh.SSHServerProcess[bytes]]:
        if self._connection is None:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, "connection is gone")
        channel = self._connection.create_server_channel(encoding=None)
        # OpenSSH without AcceptEnv refuses the request, and pulumi-command takes that for an error.
        channel._process_env_request = lambda packet: False  # type: ignore[method-assign]  # noqa: SLF001, ARG005
        process = asyncssh.SSHServerProcess[bytes](self._server.run, self._files, 3, allow_scp=False)
        return channel, process

    def _files(self, channel: SSHChannel[bytes]) -> _Files:
        # asyncssh types the factory by the base class, and gives it a server's channel.
        return _Files(cast("asyncssh.SSHServerChannel[bytes]", channel), self._server.tree)


class _Files(asyncssh.SFTPServer):
    """Files of the private root: it is `/`, and the folder that relative paths start from."""

    def __init__(self, channel: asyncssh.SSHServerChannel[bytes], tree: Tree) -> None:
        super().__init__(channel, chroot=os.fsencode(tree.root))
        self._tree = tree

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> object:
        self._check(path, writing=bool(pflags & asyncssh.FXF_WRITE))
        return super().open(path, pflags, attrs)

    def open56(self, path: bytes, desired_access: int, flags: int, attrs: asyncssh.SFTPAttrs) -> object:
        self._check(path, writing=bool(desired_access & asyncssh.ACE4_WRITE_DATA))
        return super().open56(path, desired_access, flags, attrs)

    def _check(self, path: bytes, *, writing: bool) -> None:
        if writing:
            self._tree.check_space(self._tree.path(os.fsdecode(path)))
