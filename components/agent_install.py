"""AgentInstall: the host's hand, copied there and told what this program manages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pulumi
from pulumi_command import remote

from host.bundle import write_bundle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from components.access import HostAccess


class AgentInstall(pulumi.ComponentResource):
    """The agent on the host: copied again when its source changes, removed last on a destroy; depend on `ready`."""

    def __init__(
        self,
        name: str,
        *,
        access: HostAccess,
        managed: Mapping[str, object],
        bundle_folder: Path,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("gpu-topology:index:AgentInstall", name, {}, opts)
        child = pulumi.ResourceOptions(parent=self)
        copy = remote.CopyToRemote(
            f"{name}-file",
            connection=access.connection,
            source=pulumi.FileAsset(str(write_bundle(bundle_folder))),
            remote_path=access.agent_path,
            opts=child,
        )
        self.ready = access.action(
            f"{name}-register",
            "register",
            {"managed": managed},
            triggers=[],
            delete="uninstall",
            opts=pulumi.ResourceOptions(parent=self, depends_on=[copy], delete_before_replace=True),
        )
        self.register_outputs({"path": access.agent_path})
