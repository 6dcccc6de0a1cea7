from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from typing import TYPE_CHECKING

from testbed.engine.plugins._diff import changes
from testbed.engine.plugins._resource import Resource
from testbed.engine.plugins._wire import UNKNOWN
from testbed.engine.plugins.command.output import Output

if TYPE_CHECKING:
    from testbed.engine.plugins._diff import Change
    from testbed.engine.plugins._resource import Job
    from testbed.engine.plugins._schema import Schema
    from testbed.engine.plugins._wire import Props


class CommandResource(Resource):
    """A command to run on creation, on every change, and on deletion; there is nothing that can be read back."""

    def __init__(self, schema: Schema) -> None:
        self._inputs = schema.inputs(self.token)

    def diff(self, olds: Props, news: Props) -> dict[str, Change]:
        """Every changed input counts, the text of `delete` and the connection included."""
        return changes({name: olds.get(name) for name in self._inputs}, news)

    def preview(self, olds: Props | None, inputs: Props) -> Props:  # noqa: ARG002 - any change runs a command anew
        """The inputs, and output that nobody knows yet."""
        return inputs | {"stdout": UNKNOWN, "stderr": UNKNOWN}

    async def create(self, job: Job, inputs: Props) -> tuple[str, Props]:
        """Run `create`, if there is one."""
        outputs = await self._run(job, inputs, "create", {"stdout": "", "stderr": ""})
        return f"{job.name}{secrets.token_hex(4)}", inputs | outputs

    async def update(self, job: Job, identifier: str, olds: Props, news: Props) -> Props:  # noqa: ARG002
        """Run `update`, or else `create` again; with neither, the old output stays."""
        name = "create" if news.get("update") is None else "update"
        return news | await self._run(job, news, name, _previous(olds))

    async def delete(self, job: Job, identifier: str, olds: Props) -> None:  # noqa: ARG002
        """Run `delete` as the old inputs say."""
        await self._run(job, olds, "delete", _previous(olds))

    async def _run(self, job: Job, inputs: Props, name: str, previous: Props) -> Props:
        text = inputs.get(name)
        if not isinstance(text, str):
            return previous
        logging = inputs.get("logging") or "stdoutAndStderr"
        output = Output(log_stdout="stdout" in str(logging), log_stderr="err" in str(logging).lower())
        carried: dict[str, str] = {}
        if inputs.get("addPreviousOutputInEnv") is not False:
            carried = {f"PULUMI_COMMAND_{key.upper()}": str(value) for key, value in previous.items() if value}
        logger = asyncio.ensure_future(output.follow(job.status))
        try:
            await self.execute(job, inputs, text, carried, output)
        finally:
            output.end()
            await logger
        stdout, stderr = output.result()
        return {"stdout": stdout, "stderr": stderr}

    @abstractmethod
    async def execute(self, job: Job, inputs: Props, command: str, carried: dict[str, str], output: Output) -> None:
        """Run the command, feeding `output`; `carried` is the previous output as environment."""


def _previous(state: Props) -> Props:
    return {"stdout": state.get("stdout") or "", "stderr": state.get("stderr") or ""}


def environment(inputs: Props) -> dict[str, str]:
    """The `environment` input."""
    found = inputs.get("environment")
    return {key: str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def stdin(inputs: Props) -> str:
    """The `stdin` input, empty if there is none."""
    return str(inputs.get("stdin") or "")
