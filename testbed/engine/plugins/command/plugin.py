from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.engine.plugins._engine import Engine
from testbed.engine.plugins._schema import Schema
from testbed.engine.plugins._serve import Plugin
from testbed.engine.plugins.command.copying import CopyToRemote
from testbed.engine.plugins.command.local import LocalCommand
from testbed.engine.plugins.command.remote import RemoteCommand

if TYPE_CHECKING:
    import asyncssh


class CommandPlugin(Plugin):
    """The stand-in of pulumi-resource-command."""

    def __init__(self, address: str | None) -> None:
        schema = Schema.shipped("command")
        self.connections: list[asyncssh.SSHClientConnection] = []
        resources = [LocalCommand(schema), RemoteCommand(schema, self.connections), CopyToRemote(schema)]
        super().__init__(schema, {resource.token: resource for resource in resources}, {}, Engine(address))

    async def close(self) -> None:
        """Close the connections that the commands left open."""
        for connection in self.connections:
            connection.abort()
        await super().close()
