"""Rules on an SGLang service: tensor parallelism, memory, arguments, NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topology.problem import Level
from topology.rules.arguments import argument_problems
from topology.rules.catalogue import broken
from topology.rules.command import arguments, unit_flags
from topology.rules.memory import memory_problems
from topology.rules.peers import peer_problems
from topology.rules.pools import wrong_driver
from topology.tensor_parallel import uneven, valid_tp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.problem import Problem
    from topology.spec import ServiceSpec


def check_service(service: ServiceSpec) -> tuple[Problem, ...]:
    """Judge one service by all that its spec tells."""
    subject = f"service {service.name}"
    where = f"lxc/{service.container}" if service.container is not None else "the host"
    counted = tuple(_counted(subject, service))
    return (
        *wrong_driver("service-on-nvidia", subject, f"{subject} in {where}", service.driver),
        *counted,
        *_unit(subject, service),
        # What a wrong TP splits unevenly or does not fit would only hide that it is wrong.
        *(() if counted else _shape(subject, service)),
        *(() if counted else memory_problems(service)),
        *argument_problems(subject, service.arguments, service.environment),
        *peer_problems(service, translated=service.translated_iommu),
    )


def _counted(subject: str, service: ServiceSpec) -> Iterator[Problem]:
    others = service.pipeline * service.data
    gpus = len(service.devices)
    if service.tp < 1 or others < 1 or gpus % others:
        yield broken(
            "tp-whole",
            subject,
            f"has {gpus} GPUs / (pipeline {service.pipeline} x data {service.data})",
            "tensor parallelism is that quotient, and must be a whole number of at least 1",
            "change the pool's size, parallelism.pipeline or parallelism.data",
        )
    elif service.tp != gpus // others:
        yield broken(
            "tp-equals-pool",
            subject,
            f"has tp {service.tp} on {gpus} GPUs / (pipeline {service.pipeline} x data {service.data})",
            f"tensor parallelism is that quotient, {gpus // others}",
            f"let tp be {gpus // others}, or change the pool's device list",
        )


def _unit(subject: str, service: ServiceSpec) -> Iterator[Problem]:
    """Compare the unit's own command line, where a forgotten --tp means 1."""
    flags = unit_flags(service)
    if flags is None:
        why = "without a command there is no service"
        yield broken("tp-equals-pool", f"unit {service.unit}", "has no ExecStart", why, "let the program write it")
        return
    for flag, wanted in {"tp": service.tp, "pp": service.pipeline, "dp": service.data}.items():
        found = " ".join(flags.get(flag, ("1",)))
        if found != str(wanted):
            yield broken(
                "tp-equals-pool",
                f"unit {service.unit}",
                f"says --{flag} {found}" if flag in flags else f"says no --{flag}, which means 1",
                f"{subject} has {flag} {wanted} by its pool of {len(service.devices)} GPUs",
                "let the program write the unit, or correct it where it is kept",
            )


def _shape(subject: str, service: ServiceSpec) -> Iterator[Problem]:
    given = arguments(service)
    expert_parallel = given.get("ep", "1")
    if not expert_parallel.isdigit() or int(expert_parallel) < 1 or service.tp % int(expert_parallel):
        yield broken(
            "expert-parallel-divides-tp",
            subject,
            f"has --ep {expert_parallel} at tp {service.tp}",
            "the ranks of tensor parallelism are dealt out to the expert groups evenly",
            f"set arguments.ep to a divisor of {service.tp}",
        )
        expert_parallel = "1"
    if "enable-dp-attention" in given and service.data > 1:
        yield broken(
            "dp-attention",
            subject,
            f"has --enable-dp-attention with parallelism.data {service.data}",
            "SGLang then counts data parallelism inside of TP, this program beside it, so the GPUs would not add up",
            "remove enable-dp-attention, or set parallelism.data to 1",
        )
    vision_whole = "mm-enable-dp-encoder" in given
    for part in uneven(service.model, service.tp, expert_parallel=int(expert_parallel), vision_whole=vision_whole):
        padded = part.rule == "tp-fills-expert-blocks" and part.level is Level.WARN
        yield broken(
            "tp-pads-expert-blocks" if padded else part.rule,
            subject,
            f"has {service.model.name} with {part.value}",
            part.why,
            _sizes(service),
        )


def _sizes(service: ServiceSpec) -> str:
    sizes = valid_tp(service.model)
    others = service.pipeline * service.data
    listed = ", ".join(str(tp * others) for tp in sizes)
    return f"give its pool one of these numbers of GPUs: {listed} (tp {', '.join(map(str, sizes))})"
