"""One command over one SSH session, as pulumi-command runs it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asyncssh
from asyncssh.packet import String

from testbed.engine.plugins.command.output import failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from testbed.engine.plugins.command.output import Output

# Numbers of the signals that SSH names (RFC 4254, section 6.10), as golang.org/x/crypto/ssh counts them.
_SIGNALS = {"ABRT": 6, "ALRM": 14, "FPE": 8, "HUP": 1, "ILL": 4, "INT": 2, "KILL": 9, "PIPE": 13, "QUIT": 3}
_SIGNALS |= {"SEGV": 11, "TERM": 15}


@dataclass(frozen=True)
class Command:
    """What to run and what it gets; `optional` is environment that a server may refuse."""

    text: str
    stdin: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)


class RefusedEnvironmentError(Exception):
    """The server does not accept a variable; the argument is its name."""


class _Session(asyncssh.SSHClientSession[bytes]):
    def __init__(self, command: Command, output: Output, warn: Callable[[str], Awaitable[None]]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._command = command
        self._output = output
        self._warn = warn

    def connection_made(self, chan: Any) -> None:
        """Put the environment before the command.

        asyncssh sends the environment without asking for a reply, so a refusal would go unnoticed and the command
        would run without it; the real plugin asks, and fails.
        """
        ask = chan._make_request  # noqa: SLF001 - there is no public way to wait for the reply

        async def ask_environment_first(request: bytes, *args: bytes) -> bool | None:
            if request == b"exec":
                for name, value in self._command.environment.items():
                    if not await ask(b"env", String(name), String(value)):
                        raise RefusedEnvironmentError(name)
                for name, value in self._command.optional.items():
                    if value and not await ask(b"env", String(name), String(value)):
                        await self._warn(name)
            answer: bool | None = await ask(request, *args)
            return answer

        chan._make_request = ask_environment_first  # noqa: SLF001

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._output.add(data, is_stderr=datatype == asyncssh.EXTENDED_DATA_STDERR)

    def eof_received(self) -> bool:
        """Keep the channel, since the exit status may come after the end of the output."""
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncssh's signature
        if not self.ended.done():
            self.ended.set_result(None)


async def execute(
    connection: asyncssh.SSHClientConnection,
    command: Command,
    output: Output,
    warn: Callable[[str], Awaitable[None]],
) -> None:
    """Run the command and collect its output; fails as `failure` unless it exits with 0."""
    session = _Session(command, output, warn)
    chan, _ = await connection.create_session(lambda: session, command.text, encoding=None)
    chan.write(command.stdin.encode())
    chan.write_eof()
    await session.ended
    reason = _ending(chan)
    if reason is not None:
        raise failure(reason, command.text, output)


def _ending(chan: Any) -> str | None:
    """Why the command did not succeed, in the words of golang.org/x/crypto/ssh; None if it did."""
    exit_signal = chan.get_exit_signal()
    if exit_signal is not None:
        name, _, message, _ = exit_signal
        status = 128 + _SIGNALS.get(name, 0)
        return f"Process exited with status {status} from signal {name}" + (
            f". Reason was: {message}" if message else ""
        )
    status = chan.get_exit_status()
    if status is None:
        return "wait: remote command exited without exit status or exit signal"
    return None if status == 0 else f"Process exited with status {status}"
