"""AgentInstall: the host's hand, copied there and told what this program manages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pulumi
from pulumi_command import remote

from host.bundle import write_bundle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from components.access import HostAccess


@dataclass(frozen=True, kw_only=True)
class AgentInstallArgs:
    """What this program manages on the host, and the revisions under which the host's book knows it and the file.

    A new `revision` has the book told again, a new `file_revision` the file copied again. `bundle_folder` is where the
    agent's file is made on the workstation.
    """

    access: HostAccess
    managed: Mapping[str, object]
    revision: str
    file_revision: str
    bundle_folder: Path


class AgentInstall(pulumi.ComponentResource):
    """The agent on the host: copied again when its source changes, removed last on a destroy; depend on `ready`."""

    def __init__(self, name: str, args: AgentInstallArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpu-topology:index:AgentInstall", name, {}, opts)
        access = args.access
        copy = remote.CopyToRemote(
            f"{name}-file",
            connection=access.connection,
            source=pulumi.FileAsset(str(write_bundle(args.bundle_folder))),
            remote_path=access.agent_path,
            triggers=[args.file_revision],
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.ready = access.action(
            f"{name}-register",
            "register",
            {"managed": args.managed, "revision": args.revision, "file_revision": args.file_revision},
            # A trigger would replace it, and so uninstall the agent under everything that needs it.
            triggers=[],
            delete="uninstall",
            opts=pulumi.ResourceOptions(parent=self, depends_on=[copy], delete_before_replace=True),
        )
        self.register_outputs({"path": access.agent_path})
