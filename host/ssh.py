"""One SSH connection to a hypervisor, kept open and used by any thread; transport errors told apart from failures."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import asyncssh

from host.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from host.target import Hop, Target

CONNECT_TIMEOUT_S = 6.0
"""TCP, key exchange and login together: a host that doesn't answer must fail within 15 s."""

_KEEPALIVE_S = 15
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finished:
    """What a command left: its exit status, standard output, standard error."""

    status: int
    stdout: str
    stderr: str


class Connection:
    """A connection to `target`, opened at the first command and again after it was lost."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ssh", daemon=True)
        self._thread.start()
        self._lock = asyncio.Lock()
        self._stack: contextlib.AsyncExitStack | None = None
        self._client: asyncssh.SSHClientConnection | None = None

    def run(self, command: str, stdin: bytes, *, timeout_s: float, on_line: Callable[[str], None]) -> Finished:
        """Run one command; `on_line` gets each line of its standard error as it comes.

        Raises:
            TransportError: the host was not reached or the connection was lost or timed out.
        """
        try:
            return self._wait(self._run(command, stdin, timeout_s, on_line))
        except TimeoutError as error:
            raise TransportError(
                f"{self._where}: no answer to a command within {timeout_s:.0f} s, though the connection stood. "
                "What it did there is unknown. Fix: look at the host, then run again; operations are safe to repeat",
            ) from error

    def close(self) -> None:
        """Close the connection and stop its thread."""
        self._wait(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _where(self) -> str:
        return f"{self._target.user}@{self._target.address}:{self._target.port}"

    def _wait(self, work: Coroutine[object, object, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _run(
        self,
        command: str,
        stdin: bytes,
        timeout_s: float,
        on_line: Callable[[str], None],
    ) -> Finished:
        client = await self._connected()
        try:
            # Leaving the process's context, by a timeout as well, closes its channel; the agent notices as it tells.
            async with asyncio.timeout(timeout_s), client.create_process(command, encoding=None) as process:
                with contextlib.suppress(BrokenPipeError):  # it ended without reading: its exit status says how
                    process.stdin.write(stdin)
                    process.stdin.write_eof()
                stdout, stderr = await asyncio.gather(process.stdout.read(), _lines(process.stderr, on_line))
                await process.wait_closed()
        except TimeoutError:
            raise
        except (OSError, asyncssh.Error) as error:
            raise TransportError(self._lost(str(error))) from error
        if process.exit_status is None or process.exit_status < 0:
            raise TransportError(self._lost("the command was cut off"))
        return Finished(process.exit_status, stdout.decode(errors="replace"), stderr)

    async def _shut_down(self) -> None:
        if self._stack is not None:
            with contextlib.suppress(OSError, asyncssh.Error):
                await self._stack.aclose()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _lost(self, why: str) -> str:
        return (
            f"{self._where}: the connection was lost while a command ran ({why}). The host finishes or undoes what it "
            "began by itself. Fix: run again; every operation is safe to repeat"
        )

    async def _connected(self) -> asyncssh.SSHClientConnection:
        async with self._lock:
            if self._client is None or self._client.is_closed():
                self._stack = contextlib.AsyncExitStack()
                self._client = await self._stack.enter_async_context(_connect(self._target))
            return self._client


@contextlib.asynccontextmanager
async def _connect(target: Target) -> AsyncIterator[asyncssh.SSHClientConnection]:
    async with contextlib.AsyncExitStack() as stack:
        tunnel = None
        if target.proxy is not None:
            tunnel = await stack.enter_async_context(await _open(target.proxy, target.private_key, None))
        yield await stack.enter_async_context(await _open(target, target.private_key, tunnel))


async def _open(
    hop: Hop,
    private_key: str | None,
    tunnel: asyncssh.SSHClientConnection | None,
) -> asyncssh.SSHClientConnection:
    where = f"{hop.user}@{hop.address}:{hop.port}"
    try:
        pinned = asyncssh.import_public_key(hop.host_key)
        keys = None if private_key is None else [asyncssh.import_private_key(private_key)]
    except (asyncssh.KeyImportError, ValueError) as error:
        raise TransportError(
            f"{where}: a key cannot be read ({error}). Rule: host.hostKey is one line like `ssh-ed25519 AAAA…`; "
            "the private key is an unencrypted OpenSSH key. Fix: `ssh-keyscan -t ed25519 ADDRESS` prints the former",
        ) from error
    options = {} if keys is None else {"client_keys": keys, "agent_path": None}
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await asyncssh.connect(
                hop.address,
                hop.port,
                username=hop.user,
                known_hosts=([pinned], [], []),
                server_host_key_algs=[pinned.get_algorithm()],
                config=None,
                tunnel=tunnel,
                keepalive_interval=_KEEPALIVE_S,
                **options,
            )
    except (OSError, asyncssh.Error) as error:
        raise TransportError(_why(where, error)) from error


def _why(where: str, error: OSError | asyncssh.Error) -> str:
    match error:
        case asyncssh.HostKeyNotVerifiable() | asyncssh.KeyExchangeFailed():
            return (
                f"{where}: the host showed another host key than the pinned one ({error}). Rule: host keys are pinned. "
                "Fix: if the host was reinstalled, compare `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on its "
                "console and write the new key into host.hostKey; if not, somebody may be in between"
            )
        case asyncssh.PermissionDenied():
            return (
                f"{where}: the login was refused ({error}). Rule: root logs in by key. Fix: set the secret "
                "gpu-topology:sshPrivateKey (`pulumi config set --secret sshPrivateKey < FILE`) or host.identityFile, "
                "or load the key into your SSH agent; the host's /root/.ssh/authorized_keys must hold its public half"
            )
        case TimeoutError():
            return (
                f"{where}: no SSH server answered within {CONNECT_TIMEOUT_S:.0f} s. Fix: check host.address, host.port "
                "and the network; is the host up?"
            )
        case _:
            return f"{where}: cannot connect ({error}). Fix: check host.address, host.port and that sshd runs there"


async def _lines(stream: asyncssh.SSHReader[bytes], on_line: Callable[[str], None]) -> str:
    text = []
    async for raw in stream:
        if not raw:  # what asyncssh gives at the end of the stream
            break
        line = raw.decode(errors="replace").rstrip("\n")
        text.append(line)
        on_line(line)
    return "\n".join(text)
