from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from testbed.engine.plugins._resource import ProviderError
from testbed.engine.plugins.command.commands import CommandResource, environment, stdin

if TYPE_CHECKING:
    import asyncssh

    from testbed.engine.plugins._resource import Job
    from testbed.engine.plugins._schema import Schema
    from testbed.engine.plugins._wire import Props
    from testbed.engine.plugins.command.output import Output

_REFUSED = (
    "Unable to set '{}'. The SSH server must accept the variable (AcceptEnv); or put it before the command itself, "
    "as in 'VAR=value command'."
)


class RemoteCommand(CommandResource):
    """`remote.Command`: a connection of its own for every command, open until the plugin ends."""

    token: ClassVar[str] = "command:remote:Command"  # noqa: S105 - a type token

    def __init__(self, schema: Schema, connections: list[asyncssh.SSHClientConnection]) -> None:
        super().__init__(schema)
        self._connections = connections

    async def execute(self, job: Job, inputs: Props, command: str, carried: dict[str, str], output: Output) -> None:
        """Run the command over SSH."""
        # Loading asyncssh costs more than the rest of the plugin together, and a preview runs nothing.
        from testbed.engine.plugins.command import connection, session  # noqa: PLC0415

        async def warn(name: str) -> None:
            await job.warn(_REFUSED.format(name))

        client = await connection.dial(connection.Endpoint.parse(inputs["connection"]), job.status)
        self._connections.append(client)
        task = session.Command(command, stdin(inputs), environment(inputs), carried)
        try:
            await session.execute(client, task, output, warn)
        except session.RefusedEnvironmentError as error:
            await job.engine.error(job.urn, _REFUSED.format(error))
            reason = f'could not set environment variable "{error}": ssh: setenv failed'
            raise ProviderError(reason) from error
