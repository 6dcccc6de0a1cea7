"""Plan and build: what the program does once the host has told what it is.

A module of its own, since it takes as long to load as the host takes to answer: the two happen at once.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pulumi
from pulumi_proxmoxve import Provider

from components.access import HostAccess
from components.hypervisor import HypervisorArgs, build_hypervisor
from components.settings import api_key_settings, secret_setting
from host.errors import HostError
from host.facts import live_facts
from host.resources.canonical import read_copy
from topology.config import FactsSource
from topology.export import topology_output
from topology.plan import make_plan
from topology.problem import Problem, TopologyError
from topology.rules import service_fit

if TYPE_CHECKING:
    from pathlib import Path

    from host.target import Target
    from topology.config import Proxmox, Topology
    from topology.facts import Facts
    from topology.plan import Plan

_BUNDLE_FOLDER = ".cache"
_CREDENTIALS = ("PROXMOX_VE_API_TOKEN", "PROXMOX_VE_PASSWORD", "PROXMOX_VE_AUTH_TICKET")
"""What the provider takes from the environment where the stack has no secret."""

_NO_CREDENTIALS = Problem(
    rule="proxmox-credentials",
    subject="proxmox",
    value="has no credentials",
    why="Proxmox's API answers nobody without",
    fix="set a token by `pulumi config set --secret proxmoxApiToken 'USER@REALM!NAME=SECRET'`, or take the section "
    "proxmox out, which only VMs need",
)


def carry_out(topology: Topology, facts: Facts, where: Target, base: Path) -> None:
    """Plan, say what differs, build the components, and export the topology.

    Raises:
        TopologyError: the host, or what is to be on it, breaks rules.
        HostError: the facts were recorded, and an `up` would carry out another plan on the live host.
    """
    planned = partial(make_plan, topology, base=base, read_local=lambda path: read_copy(path, base))
    plan = planned(facts)
    if topology.host.facts is FactsSource.RECORDED and not pulumi.runtime.is_dry_run():
        need_same_plan(plan, planned(live_facts(topology, where)))
    for warning in plan.warnings:
        pulumi.warn(str(warning))
    fits = [f"service {service.name} at tp {service.tp}: {service_fit(service)}" for service in plan.spec.services]
    for line in (*plan.changes, *fits):
        pulumi.info(str(line))
    build_hypervisor(
        HypervisorArgs(
            plan=plan,
            access=HostAccess.to(where),
            provider=proxmox_provider(topology.proxmox),
            bundle_folder=base / _BUNDLE_FOLDER,
            api_keys=api_key_settings(topology),
        ),
    )
    pulumi.export("topology", topology_output(plan.spec))


def need_same_plan(recorded: Plan, live: Plan) -> None:
    """Refuse to carry out a plan of recorded facts that the live host would not get, such as an older unit's text."""
    if recorded.spec == live.spec:
        return
    differing = "; ".join(sorted(map(str, {*recorded.changes} ^ {*live.changes}))) or "revisions"
    raise HostError(
        f"the recorded facts are not those of the host any more: planned on the live host, {differing} would differ. "
        "Rule: only what was previewed is carried out. Fix: record them again with `gpu-topology record`, and preview"
    )


def proxmox_provider(proxmox: Proxmox | None) -> Provider | None:
    """The provider of Proxmox's API, where the stack file has one; its credentials stay secret.

    Raises:
        TopologyError: there are none.
    """
    if proxmox is None:
        return None
    token, password = secret_setting("proxmoxApiToken"), secret_setting("proxmoxPassword")
    if token is None and password is None and not any(map(os.environ.get, _CREDENTIALS)):
        raise TopologyError((_NO_CREDENTIALS,))
    return Provider(
        "proxmox",
        endpoint=proxmox.endpoint,
        insecure=proxmox.insecure,
        api_token=_hidden(token),
        username=None if password is None else proxmox.username,
        password=_hidden(password),
    )


def _hidden(value: str | None) -> pulumi.Output[str] | None:
    return None if value is None else pulumi.Output.secret(value)
