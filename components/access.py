"""How the components' commands reach the host, and the agent they run there."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pulumi
from pulumi_command import remote

from host.bundle import AGENT_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from host.target import Hop, Target

_DIAL_ERROR_LIMIT = 3
"""Four dials of at most 5 s each: by then the host has answered once already, for its facts."""
_DIAL_TIMEOUT_S = 5


@dataclass(frozen=True, kw_only=True)
class HostAccess:
    """A connection for pulumi_command (a secret as a whole), the host's root folder, and the agent's installation."""

    connection: pulumi.Output[remote.ConnectionArgs]
    root: str
    installed: pulumi.Resource | None = None

    @classmethod
    def to(cls, target: Target) -> HostAccess:
        """Reach `target`; the private key leaves this process only inside a secret."""
        hop = target.proxy
        proxy = None if hop is None else remote.ProxyConnectionArgs(**_hop(hop, target.private_key))
        connection = remote.ConnectionArgs(**_hop(target, target.private_key), proxy=proxy)
        return cls(connection=pulumi.Output.secret(connection), root=target.root)

    @property
    def agent_path(self) -> str:
        """Where the agent is on the host."""
        return f"{self.root.rstrip('/')}/{AGENT_PATH}"

    def agent_command(self, operation: str) -> str:
        """The command line of an operation; its request comes on standard input, so no secret stands here."""
        return shlex.join(["python3", self.agent_path, "--root", self.root, "--format", "text", operation])

    def action(  # noqa: PLR0913  what a command is made of
        self,
        name: str,
        operation: str,
        request: Mapping[str, object] | pulumi.Output[str],
        *,
        triggers: Sequence[object],
        opts: pulumi.ResourceOptions,
        delete: str | None = None,
    ) -> remote.Command:
        """An operation as a command: run when created, and again when a trigger or its request changes."""
        command = self.agent_command(operation)
        installed = pulumi.ResourceOptions(depends_on=[self.installed] if self.installed else [])
        return remote.Command(
            name,
            connection=self.connection,
            create=command,
            delete=delete and self.agent_command(delete),
            stdin=request if isinstance(request, pulumi.Output) else json.dumps(request, sort_keys=True),
            triggers=list(triggers),
            # Every update would warn about it otherwise, and sshd refuses the variables.
            add_previous_output_in_env=False,
            opts=pulumi.ResourceOptions.merge(installed, opts),
        )


def _hop(hop: Hop, private_key: str | None) -> dict[str, Any]:
    return {
        "host": hop.address,
        "port": hop.port,
        "user": hop.user,
        "host_key": hop.host_key,
        "private_key": private_key,
        "dial_error_limit": _DIAL_ERROR_LIMIT,
        "per_dial_timeout": _DIAL_TIMEOUT_S,
    }
