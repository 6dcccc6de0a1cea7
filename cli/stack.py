"""A stack file, read without the engine: what the command line needs of it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from host.errors import HostError
from host.target import Target, target
from topology.load import load_topology

if TYPE_CHECKING:
    from pathlib import Path

    from topology.config import Topology

PROJECT = "gpu-topology"


@dataclass(frozen=True)
class Stack:
    """A stack's name, its topology, and the folder that its relative paths start from."""

    name: str
    topology: Topology
    base: Path
    has_private_key: bool

    def target(self) -> Target:
        """How to reach the stack's host, with the private key that the stack keeps, if any."""
        key = _secret(self, "sshPrivateKey") if self.has_private_key else None
        return target(self.topology.host, private_key=key, base=self.base)


def load_stack(name: str, base: Path) -> Stack:
    """Read `Pulumi.NAME.yaml` in `base`.

    Raises:
        HostError: there is no such file, or it is no YAML.
        TopologyError: its topology breaks rules.
    """
    path = base / f"Pulumi.{name}.yaml"
    try:
        loaded = YAML(typ="safe").load(path.read_text())
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise HostError(
            f"the stack file {path.name} cannot be read ({error}). Fix: run in the project's folder, with --stack and "
            "the name of one of its Pulumi.NAME.yaml files",
        ) from error
    config = loaded.get("config") if isinstance(loaded, dict) else None
    if not isinstance(config, dict):
        raise HostError(
            f"the stack file {path.name} has no section `config`. Rule: settings stand below `config:`, each as "
            f"`{PROJECT}:NAME`. Fix: write the topology below `{PROJECT}:topology:` there",
        )
    topology = load_topology(config.get(f"{PROJECT}:topology"))
    return Stack(name, topology, base, f"{PROJECT}:sshPrivateKey" in config)


def _secret(stack: Stack, key: str) -> str:
    command = ["pulumi", "config", "get", key, "--stack", stack.name, "--non-interactive"]
    try:
        done = subprocess.run(command, cwd=stack.base, capture_output=True, text=True, check=False)
    except OSError as error:
        raise HostError(
            f"the stack's secret {key} cannot be decrypted: pulumi cannot be run ({error.strerror}). Fix: install "
            "Pulumi, or put the folder it is in on PATH",
        ) from error
    if done.returncode != 0:
        raise HostError(
            f"the stack's secret {key} cannot be decrypted: {done.stderr.strip()}. Fix: set "
            "PULUMI_CONFIG_PASSPHRASE or log in to the stack's backend, as for `pulumi preview`",
        )
    return done.stdout
