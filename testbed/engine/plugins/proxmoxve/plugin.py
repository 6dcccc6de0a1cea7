from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from testbed.engine.plugins._engine import Engine
from testbed.engine.plugins._schema import Schema
from testbed.engine.plugins._serve import Plugin
from testbed.engine.plugins.proxmoxve import facts
from testbed.engine.plugins.proxmoxve.connection import Connection
from testbed.engine.plugins.proxmoxve.mapping import PciMapping, read_mapping
from testbed.engine.plugins.proxmoxve.settings import failures
from testbed.engine.plugins.proxmoxve.vm import VmLegacy

if TYPE_CHECKING:
    from testbed.engine.plugins._schema import Failure
    from testbed.engine.plugins._wire import Props

_FUNCTIONS = {
    "proxmoxve:index/getVersion:getVersion": facts.get_version,
    "proxmoxve:index/getNodesLegacy:getNodesLegacy": facts.get_nodes,
    "proxmoxve:index/getNodeLegacy:getNodeLegacy": facts.get_node,
    "proxmoxve:hardware/getPci:getPci": facts.get_pci,
    "proxmoxve:hardware/mapping/getPci:getPci": read_mapping,
}


class ProxmoxPlugin(Plugin):
    """The stand-in of pulumi-resource-proxmoxve."""

    def __init__(self, address: str | None) -> None:
        schema, connection = Schema.shipped("proxmoxve"), Connection()
        resources = {PciMapping.token: PciMapping(connection), VmLegacy.token: VmLegacy(connection)}
        functions = {token: functools.partial(function, connection) for token, function in _FUNCTIONS.items()}
        super().__init__(schema, resources, functions, Engine(address))
        self._connection = connection

    def config_failures(self, config: Props) -> list[Failure]:
        """What is wrong with the configuration, values never shown."""
        return super().config_failures(config) or failures(self.schema.parse_config(config))

    async def configure(self, config: Props) -> None:
        """Take the configuration; the API is reached when something is first asked of it."""
        self._connection.configure(config)

    async def close(self) -> None:
        """End the connections to the API and the engine."""
        await self._connection.close()
        await super().close()
