"""What a translated IOMMU demands of a service's NCCL settings, and what the service's process really gets.

Under a translated IOMMU the GPUs' direct writes to each other (P2P) are lost or corrupted, and NCCL waits for ever:
full utilisation, no token (NVIDIA/nccl#1999, local-inference-lab/rtx6kpro#15). Through host memory all is well.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from topology.unit import parse_unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from topology.facts import ServiceFacts

P2P_OFF = {"NCCL_P2P_DISABLE": "1"}
"""NCCL's own switch (NVIDIA, NCCL user guide, Environment Variables)."""

COMPANIONS = {
    "NCCL_MIN_NCHANNELS": 16,
    "NCCL_MAX_NCHANNELS": 32,
    "NCCL_BUFFSIZE": 32 << 20,
    "CUDA_DEVICE_MAX_CONNECTIONS": 32,
}
"""The least that lets traffic through host memory fill its channels: slow without, but right.

Source: local-inference-lab/rtx6kpro optimization/nccl-tuning.md, High-Concurrency Configuration, lighter variant.
"""

P2P_LEVELS_OFF = frozenset({"LOC", "0"})
"""Values of NCCL_P2P_LEVEL that mean never; every other one asks for P2P."""

P2P_FLAGS = {
    "enable-mscclpp": "MSCCL++ reads and writes the peers' memory",
    "enable-symm-mem": "NCCL symmetric memory maps the peers' memory",
    "enable-torch-symm-mem": "torch symmetric memory maps the peers' memory",
    "enable-flashinfer-allreduce-fusion": "the fused all-reduce maps the peers' memory",
    "enable-pcie-oneshot-allreduce": "the one-shot all-reduce writes into the peers' memory",
}
"""SGLang flags, those of community images too, that reduce over P2P without asking NCCL.

Source: sgl-project/sglang python/sglang/srt/server_args.py; local-inference-lab/rtx6kpro
optimization/pcie-oneshot-allreduce.md.
"""

CUSTOM_ALL_REDUCE_OFF = "disable-custom-all-reduce"
CUSTOM_ALL_REDUCE_RANKS = 2
"""At exactly two ranks the custom all-reduce stays on without NVLink and ignores NCCL_P2P_DISABLE.

Source: vllm-project/vllm#45004, #51513; SGLang has the same code. Above two PCIe-only ranks it turns itself off.
"""


def required_environment(*, translated_iommu: bool | None, gpus: int) -> dict[str, str]:
    """What a service on several GPUs must have set under a translated IOMMU; empty elsewhere.

    A service's own values for the companions are kept as long as they are no smaller.
    """
    if not translated_iommu or gpus < 2:
        return {}
    return P2P_OFF | {name: str(least) for name, least in COMPANIONS.items()}


def effective_environment(found: ServiceFacts | None, text: str) -> dict[str, str]:
    """What a process started from the unit `text` gets on the host as found.

    systemd's order: `Environment=` of the unit and its drop-ins, then environment files; a command that starts with
    `env NAME=VALUE` sets more; NCCL reads /etc/nccl.conf itself and lets the environment win.
    """
    unit = parse_unit(text, found.drop_ins if found else {})
    files = found.environment_files if found else {}
    commands = unit.commands(files)
    prefixed = _env_prefix(commands[-1]) if commands else {}
    return {**(found.nccl_conf if found else {}), **unit.process_environment(files), **prefixed}


def _env_prefix(command: tuple[str, ...]) -> dict[str, str]:
    if PurePosixPath(command[0] if command else "").name != "env":
        return {}
    pairs = (word.partition("=") for word in takewhile(lambda word: "=" in word, command[1:]))
    return {name: value for name, _, value in pairs}


def too_small(environment: Mapping[str, str]) -> dict[str, str]:
    """Companions that are missing or below the least that helps: name -> what is there, empty if nothing."""
    return {
        name: environment.get(name, "")
        for name, least in COMPANIONS.items()
        if not environment.get(name, "").isdigit() or int(environment[name]) < least
    }
