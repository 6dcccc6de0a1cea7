"""Rules on memory: does the model fit, with a margin, for the asked context."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from topology.fit import (
    DEFAULT_MEM_FRACTION,
    EXTRA_BUFFER_STATES,
    HIGHEST_MEM_FRACTION,
    STATE_RATIO,
    STATES_PER_REQUEST,
    Fit,
    fit,
)
from topology.rules.catalogue import broken
from topology.rules.command import arguments
from topology.tensor_parallel import valid_tp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.problem import Problem
    from topology.spec import ServiceSpec

_SPECULATIVE_REQUESTS = 48
"""Running requests SGLang assumes with speculative decoding where --max-running-requests is not given."""

_LARGEST_TP = 64


class _NotANumberError(ValueError):
    """An argument that should be a figure is none; the text says which."""


def service_fit(service: ServiceSpec) -> Fit:
    """Say how many tokens and requests fit a service as its arguments ask.

    Raises:
        ValueError: an argument that should be a figure is none.
    """
    given = arguments(service)
    speculative = "speculative-algorithm" in given or "speculative-algo" in given
    running = _whole(given, "max-running-requests", _SPECULATIVE_REQUESTS)
    return fit(
        service.model,
        tp=service.tp,
        pipeline=service.pipeline,
        memory_mib=service.memory_mib,
        context=_whole(given, "context-length", service.model.max_context),
        kv_dtype=given.get("kv-cache-dtype", "auto"),
        state_dtype=given.get("mamba-ssm-dtype", "float32"),
        mem_fraction=_fraction(given),
        state_ratio=_figure(given, "mamba-full-memory-ratio", STATE_RATIO),
        states_per_request=_slots(given),
        draft_states=running * _whole(given, "speculative-num-draft-tokens", 0) if speculative else 0,
    )


def memory_problems(service: ServiceSpec) -> Iterator[Problem]:
    """Judge a service's memory on one GPU of its pool."""
    subject = f"service {service.name}"
    try:
        needed = service_fit(service)
        fraction = mem_fraction(service)
    except _NotANumberError as error:
        why = "SGLang would not start with it"
        yield broken("argument-number", subject, str(error), why, "write a positive number without a unit")
        return
    if not needed.fits:
        yield broken(
            "model-fits",
            subject,
            f"misses {needed.shortfall_mib:,} MiB per GPU for {service.model.name} at tp {service.tp} with a context "
            f"of {needed.context:,} tokens",
            f"weights / TP + KV cache of one request + state must fit; now {needed}",
            _what_would_fit(service, needed),
        )
    if fraction > HIGHEST_MEM_FRACTION:
        yield broken(
            "memory-margin",
            subject,
            f"has mem-fraction-static {fraction:g}, which leaves {needed.margin_mib:,} MiB",
            f"activations, CUDA graphs and NCCL need the rest; {HIGHEST_MEM_FRACTION} is the highest known to work on "
            "96 GB cards",
            f"set arguments.mem-fraction-static to {HIGHEST_MEM_FRACTION} or less",
        )


def mem_fraction(service: ServiceSpec) -> float:
    """The part of a GPU's memory that a service takes for weights and caches.

    Raises:
        ValueError: the argument is no figure between 0 and 1.
    """
    return _fraction(arguments(service))


def _fraction(given: dict[str, str]) -> float:
    value = _figure(given, "mem-fraction-static", DEFAULT_MEM_FRACTION)
    if value >= 1:
        raise _NotANumberError(f"has {value:g} for --mem-fraction-static, which must be below 1")
    return value


def _what_would_fit(service: ServiceSpec, needed: Fit) -> str:
    larger = [
        tp
        for tp in valid_tp(service.model, largest=_LARGEST_TP)
        if tp > service.tp and service_fit(replace(service, tp=tp)).fits
    ]
    ways = [f"give the pool GPUs for tp {larger[0]}"] if larger else []
    if needed.tokens:
        ways.append(f"set arguments.context-length to {needed.tokens:,} or less")
    if needed.kv_bytes_per_token and arguments(service).get("kv-cache-dtype", "auto") == "auto":
        ways.append("set arguments.kv-cache-dtype to fp8_e4m3")
    return ", or ".join(ways) or "use a smaller model or a GPU with more memory"


def _slots(given: dict[str, str]) -> int:
    if "disable-radix-cache" in given:
        return 1
    extra = given.get("mamba-scheduler-strategy") == "extra_buffer"
    return STATES_PER_REQUEST + (EXTRA_BUFFER_STATES if extra else 0)


def _figure(given: dict[str, str], flag: str, default: float) -> float:
    text = given.get(flag)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise _NotANumberError(f"has {text!r} for --{flag}")
    return value


def _whole(given: dict[str, str], flag: str, default: int) -> int:
    value = _figure(given, flag, default) if flag in given else default
    if value != int(value):
        raise _NotANumberError(f"has {given[flag]!r} for --{flag}")
    return int(value)
