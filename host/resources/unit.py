"""A service's systemd unit file, in its container or on the host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from host.resources.agent_resource import AgentResourceProvider, ObservedResource

if TYPE_CHECKING:
    from host.resources.session import Properties
    from topology.facts import Facts

# systemd itself puts a variable's value in where a word starts with $, the agent has *** in a secret's place, and a
# line ends in a backslash before its next.
_KEY_FLAG = re.compile(r"--(admin-)?api-key[=\s\\\"']+(?!\$|\*\*\*)[^\s=\\\"']")
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)=[\"']?(?!\$|\*\*\*)[^\s\"']", re.IGNORECASE)


def secret_in_clear(unit: str) -> bool:
    """Whether a unit's text gives a secret its value, on a command line, in the environment, or in a comment."""
    return bool(_KEY_FLAG.search(unit) or _SECRET_VARIABLE.search(unit))


class UnitFileProvider(AgentResourceProvider):
    """Writes the unit atomically and reloads systemd; never restarts the service."""

    apply_operation: ClassVar[str] = "unit"
    release_operation: ClassVar[str] = "unit-release"
    compared: ClassVar[tuple[str, ...]] = ("text", "enabled", "revision")
    placed: ClassVar[tuple[str, ...]] = ("container", "unit", "path")

    def identity(self, inputs: Properties) -> str:
        """The service's name."""
        return str(inputs["name"])

    def request(self, inputs: Properties) -> Properties:
        """The file's place and text."""
        return {name: inputs.get(name) for name in ("name", "unit", "container", "path", "text", "enabled", "revision")}

    def release_request(self, inputs: Properties) -> Properties:
        """The file's place: what was found is in the host's book."""
        return {name: inputs.get(name) for name in ("name", "unit", "container", "path")}

    def facts_request(self, inputs: Properties) -> Properties:
        """The service."""
        return {"services": [{name: inputs.get(name) for name in ("name", "unit", "container")}]}

    def observe(self, facts: Facts, inputs: Properties) -> object | None:
        """The text as deployed."""
        service = facts.service(str(inputs["name"]))
        return None if service is None else service.text

    def wanted(self, inputs: Properties) -> object:
        """The text."""
        return inputs["text"]


class UnitFile(ObservedResource, module="gpu-topology", name="UnitFile"):
    """The unit file in the state, with the tensor parallelism it was computed for."""

    provider_type = UnitFileProvider
