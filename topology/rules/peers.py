"""Rules on GPUs that reach into each other's memory (P2P), which a translated IOMMU breaks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from topology.nccl import (
    COMPANIONS,
    CUSTOM_ALL_REDUCE_OFF,
    CUSTOM_ALL_REDUCE_RANKS,
    P2P_FLAGS,
    P2P_LEVELS_OFF,
    P2P_OFF,
    too_small,
)
from topology.rules.catalogue import broken
from topology.rules.command import given_flags

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.problem import Problem
    from topology.spec import ServiceSpec

_FORCED = re.compile(r"ForceP2P\s*=\s*(?P<value>0x[0-9a-f]+|\d+)", re.IGNORECASE)
_SWITCH, _ON = next(iter(P2P_OFF.items()))


def peer_problems(service: ServiceSpec, *, translated: bool | None) -> Iterator[Problem]:
    """Judge what a service's process really gets; a service on one GPU has no peers and passes."""
    subject = f"service {service.name}"
    environment = service.effective_environment
    if len(service.devices) < 2 or translated is False:
        return
    if translated is None:
        if environment.get(_SWITCH) != _ON:
            yield broken(
                "p2p-unsure",
                subject,
                f"runs on {len(service.devices)} GPUs with P2P on",
                "the host's facts do not tell whether its IOMMU translates, and if it does, NCCL hangs",
                f"look at /sys/kernel/iommu_groups/*/type on the host, or set {_SWITCH} to 1",
            )
        return
    if environment.get(_SWITCH) != _ON:
        found = repr(environment[_SWITCH]) if _SWITCH in environment else "not set"
        yield broken(
            "p2p-disabled",
            subject,
            f"gets {_SWITCH} {found} (its unit says {service.environment.get(_SWITCH, 'nothing of it')})",
            "under this host's translated IOMMU direct writes between GPUs are lost, and NCCL waits for ever",
            f'set environment.{_SWITCH} to "1", and take a contrary value out of drop-ins and environment files',
        )
    yield from _asked_for(subject, service)
    yield from _around_nccl(subject, service)
    for name, value in too_small(environment).items():
        yield broken(
            "p2p-companions",
            subject,
            f"gets {name} {value or 'not set'}",
            "through host memory NCCL needs more channels and larger buffers, else it is needlessly slow",
            f"set environment.{name} to {COMPANIONS[name]} or more",
        )


def forced_p2p(subject: str, text: str) -> Iterator[Problem]:
    """Refuse the nvidia driver's ForceP2P, on a kernel command line or wherever else it is written."""
    for match in _FORCED.finditer(text):
        if int(match["value"], 0):
            yield broken(
                "p2p-not-asked-for",
                subject,
                f"has {match[0]}",
                "it forces the P2P that a translated IOMMU breaks",
                "remove ForceP2P from NVreg_RegistryDwords",
            )


def _asked_for(subject: str, service: ServiceSpec) -> Iterator[Problem]:
    level = service.effective_environment.get("NCCL_P2P_LEVEL")
    if level is not None and level.upper() not in P2P_LEVELS_OFF:
        yield broken(
            "p2p-not-asked-for",
            subject,
            f"gets NCCL_P2P_LEVEL {level}",
            "it asks for the P2P that a translated IOMMU breaks",
            "remove NCCL_P2P_LEVEL from environment, drop-ins, environment files and /etc/nccl.conf",
        )
    for name, value in service.effective_environment.items():
        yield from forced_p2p(f"{subject}, {name}", value)


def _around_nccl(subject: str, service: ServiceSpec) -> Iterator[Problem]:
    flags = given_flags(service)
    for flag in sorted(flags & P2P_FLAGS.keys()):
        yield broken(
            "p2p-all-reduce-off",
            subject,
            f"has --{flag}",
            f"{P2P_FLAGS[flag]} directly, whatever {_SWITCH} says",
            f"remove {flag} from the arguments",
        )
    if service.tp == CUSTOM_ALL_REDUCE_RANKS and CUSTOM_ALL_REDUCE_OFF not in flags:
        yield broken(
            "p2p-all-reduce-off",
            subject,
            f"runs at tp 2 without --{CUSTOM_ALL_REDUCE_OFF}",
            f"at exactly two ranks the custom all-reduce stays on and ignores {_SWITCH}",
            f"set arguments.{CUSTOM_ALL_REDUCE_OFF} to true",
        )
