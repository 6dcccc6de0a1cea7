from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, ClassVar

from testbed.engine.plugins._resource import ProviderError
from testbed.engine.plugins._schema import Failure
from testbed.engine.plugins.command.commands import CommandResource, environment, stdin
from testbed.engine.plugins.command.output import failure

if TYPE_CHECKING:
    from testbed.engine.plugins._resource import Job
    from testbed.engine.plugins._wire import Props
    from testbed.engine.plugins.command.output import Output

_NOT_CARRIED = ("archivePaths", "assetPaths")


class LocalCommand(CommandResource):
    """`local.Command`: a command on the machine that runs the engine."""

    token: ClassVar[str] = "command:local:Command"  # noqa: S105 - a type token

    def faults(self, inputs: Props) -> list[Failure]:
        """Refuse to collect files, which the real plugin does."""
        return [Failure(name, f"this stand-in doesn't carry {name}") for name in _NOT_CARRIED if inputs.get(name)]

    async def execute(self, job: Job, inputs: Props, command: str, carried: dict[str, str], output: Output) -> None:  # noqa: ARG002
        """Run the command with `interpreter`, by default a shell, in `dir`."""
        interpreter = inputs.get("interpreter") or ["/bin/sh", "-c"]
        arguments = [str(part) for part in interpreter] if isinstance(interpreter, list) else []
        folder = inputs.get("dir")
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                command,
                cwd=folder if isinstance(folder, str) else None,
                env=os.environ | environment(inputs) | carried,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise ProviderError(f"cannot start {arguments[0]}: {error.strerror}") from error
        try:
            await asyncio.gather(
                _feed(process, stdin(inputs)),
                _drain(process.stdout, output, is_stderr=False),
                _drain(process.stderr, output, is_stderr=True),
            )
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        if status != 0:
            reason = f"exit status {status}" if status > 0 else f"signal: {signal.strsignal(-status)}".lower()
            raise failure(reason, command, output)


async def _feed(process: asyncio.subprocess.Process, text: str) -> None:
    if process.stdin is not None:
        process.stdin.write(text.encode())
        process.stdin.close()


async def _drain(stream: asyncio.StreamReader | None, output: Output, *, is_stderr: bool) -> None:
    while stream is not None and (data := await stream.read(65536)):
        output.add(data, is_stderr=is_stderr)
