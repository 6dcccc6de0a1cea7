"""What a command printed: collected, logged line by line while it runs, and shown whole if it fails."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from testbed.engine.plugins._resource import ProviderError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclass
class Output:
    """What a command printed: apart, together in the order of arrival, and as lines for the log."""

    log_stdout: bool
    log_stderr: bool
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    both: bytearray = field(default_factory=bytearray)
    lines: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    _partial: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes, *, is_stderr: bool) -> None:
        """Take what arrived, and queue the lines that it completes."""
        (self.stderr if is_stderr else self.stdout).extend(data)
        self.both.extend(data)
        if self.log_stderr if is_stderr else self.log_stdout:
            *complete, rest = (self._partial + data).split(b"\n")
            self._partial = bytearray(rest)
            for line in complete:
                self.lines.put_nowait(decoded(line.removesuffix(b"\r")))

    def end(self) -> None:
        """Queue the last line, if it had no newline, and the end."""
        if self._partial:
            self.lines.put_nowait(decoded(self._partial))
        self.lines.put_nowait(None)

    async def follow(self, log: Callable[[str], Awaitable[None]]) -> None:
        """Log every line as it comes, until the end."""
        while (line := await self.lines.get()) is not None:
            await log(line)

    def result(self) -> tuple[str, str]:
        """Standard output and standard error, each without its last newline."""
        return decoded(self.stdout).removesuffix("\n"), decoded(self.stderr).removesuffix("\n")


def decoded(data: bytes | bytearray) -> str:
    """The bytes as text; protobuf takes nothing but UTF-8."""
    return data.decode(errors="replace")


def failure(reason: str, command: str, output: Output) -> ProviderError:
    """The error of a failed command: it carries the whole command and all its output, logging or not."""
    return ProviderError(f"{reason}: running {quoted(command)}:\n{decoded(output.both)}")


def quoted(text: str) -> str:
    """The text in double quotes as Go's %q writes it."""
    escaped = json.dumps(text, ensure_ascii=False)
    return re.sub(r"(?<!\\)((?:\\\\)*)\\u00([01][0-9a-f])", r"\1\\x\2", escaped).replace("\x7f", "\\x7f")
