"""The whole program's components, built from the plans of kpro6's story."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pulumi
from pulumi_proxmoxve import Provider

from components.access import HostAccess
from components.hypervisor import HypervisorArgs, build_hypervisor
from host.target import Hop, Target
from tests.components.recording import Recording, record
from tests.facts import hosts
from topology.facts import Facts
from topology.load import load_topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from topology.config import Topology
    from topology.plan import Plan

PRIVATE_KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nprivate-key-material\n-----END OPENSSH PRIVATE KEY-----\n"
API_KEY = "sk-the-services-own-key"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA"
BASTION = Hop(address="192.0.2.1", port=22, user="jump", host_key=HOST_KEY)
TARGET = Target(
    address="192.0.2.6", port=2222, user="root", host_key=HOST_KEY, root="/", private_key=PRIVATE_KEY, proxy=BASTION
)


@dataclass(frozen=True)
class Act:
    """One act of the story: the plan that an `up` carries out, and the plan of the preview after it."""

    plan: Plan
    again: Plan


def _swapped() -> Topology:
    raw = hosts.raw_split()
    serving, confidential = raw["pools"]["serving"], raw["pools"]["confidential"]
    for name in ("devices", "numaNode"):
        serving[name], confidential[name] = confidential[name], serving[name]
    return load_topology(raw)


STORY: tuple[tuple[str, Callable[[], Topology]], ...] = (
    ("adopt", hosts.whole),
    ("split", hosts.split),
    ("swap", _swapped),
    ("merge", hosts.whole),
)


@cache
def story() -> dict[str, Act]:
    """The host as found adopted, split, its halves swapped, and merged; each act begins where the last one ended."""
    raw, acts = hosts.raw_facts("kpro6", "found"), {}
    for name, topology in STORY:
        plan = hosts.plan(topology(), Facts.model_validate(raw))
        raw = hosts.applied(plan, raw)
        acts[name] = Act(plan, hosts.plan(topology(), Facts.model_validate(raw)))
    return acts


def built(plan: Plan, *, api_key: str | None = None, preview: bool = False) -> Recording:
    """What the program registers for a plan; `api_key` is that of every service."""

    def program() -> None:
        keys = {s.name: pulumi.Output.secret(api_key) for s in plan.spec.services} if api_key is not None else {}
        with TemporaryDirectory() as folder:
            build_hypervisor(
                HypervisorArgs(
                    plan=plan,
                    access=HostAccess.to(TARGET),
                    provider=Provider("proxmox", endpoint="https://192.0.2.6:8006/"),
                    bundle_folder=Path(folder),
                    api_keys=keys,
                )
            )

    return record(program, preview=preview)


@cache
def performed(act: str) -> Recording:
    """What the program registers for an act's plan."""
    return built(story()[act].plan)


@cache
def performed_again(act: str) -> Recording:
    """What it registers once the act is over."""
    return built(story()[act].again)
