"""How many GPUs one copy of a model is split over, and which splits a model's shape allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from topology.problem import Level, Problem, TopologyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.config import Parallelism
    from topology.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Uneven:
    """One part of a model that a tensor-parallel size does not divide."""

    rule: str
    value: str
    why: str
    level: Level = Level.REFUSE


def tensor_parallel(pool_size: int, parallelism: Parallelism) -> int:
    """Compute TP, never written by hand: GPUs of the pool / (pipeline x data).

    Raises:
        TopologyError: that is no whole number.
    """
    others = parallelism.pipeline * parallelism.data
    if pool_size % others or pool_size < others:
        raise TopologyError((_not_whole(pool_size, parallelism),))
    return pool_size // others


def valid_tp(model: ModelSpec, *, largest: int | None = None) -> tuple[int, ...]:
    """List the tensor-parallel sizes that the model's shape allows, up to one head per GPU or `largest`."""
    return tuple(
        tp
        for tp in range(1, min(model.attention_heads, largest or model.attention_heads) + 1)
        if not any(u.level is Level.REFUSE for u in uneven(model, tp))
    )


def uneven(
    model: ModelSpec,
    tp: int,
    *,
    expert_parallel: int = 1,
    vision_whole: bool = False,
) -> tuple[Uneven, ...]:
    """Name what a tensor-parallel size splits unevenly.

    `expert_parallel` ranks hold whole experts, so an expert is split over tp / expert_parallel; `vision_whole` says
    that each rank runs the whole vision encoder (SGLang's --mm-enable-dp-encoder).

    The rules are SGLang's and vLLM's own: heads are dealt out whole; KV heads are dealt out, or copied where there are
    fewer of them than ranks (sgl-project/sglang, python/sglang/srt/configs/model_config.py, get_num_kv_heads).
    """
    return tuple(_uneven(model, tp, expert_parallel, vision_whole=vision_whole))


def _uneven(model: ModelSpec, tp: int, expert_parallel: int, *, vision_whole: bool) -> Iterator[Uneven]:
    counted = [
        ("tp-divides-heads", "attention heads", model.attention_heads),
        ("tp-divides-linear-heads", "linear-attention key heads", model.linear_key_heads),
        ("tp-divides-linear-heads", "linear-attention value heads", model.linear_value_heads),
        ("tp-divides-vision-heads", "vision heads", 0 if vision_whole else model.vision_heads),
    ]
    for rule, what, count in counted:
        if count % tp:
            yield Uneven(
                rule=rule,
                value=f"tp {tp} over {count} {what}",
                why=f"every GPU holds whole heads, and {count} is not divisible by {tp}",
            )
    if model.kv_heads % tp and tp % model.kv_heads:
        yield Uneven(
            rule="tp-fits-kv-heads",
            value=f"tp {tp} over {model.kv_heads} KV heads",
            why="KV heads are dealt out evenly, or each copied to equally many GPUs; here neither works out",
        )
    yield from _experts(model, tp, expert_parallel)


def _experts(model: ModelSpec, tp: int, expert_parallel: int) -> Iterator[Uneven]:
    if not model.expert_intermediate:
        return
    split = max(tp // expert_parallel, 1)
    size, left = divmod(model.expert_intermediate, split)
    block = max(model.quant_block, 1)
    if not left and not size % block:
        return
    share = f"{model.expert_intermediate}/{split} = {model.expert_intermediate / split:g}"
    yield Uneven(
        rule="tp-fills-expert-blocks",
        value=f"tp {tp} gives each GPU {share} of an expert's intermediate size",
        why=(
            f"that is no whole number of its quantisation blocks of {block}, "
            + ("which not every kernel pads" if model.kernels_pad else "which the format's kernels do not pad")
        ),
        level=Level.WARN if model.kernels_pad else Level.REFUSE,
    )


def _not_whole(pool_size: int, parallelism: Parallelism) -> Problem:
    others = parallelism.pipeline * parallelism.data
    return Problem(
        rule="tp-whole",
        subject="parallelism",
        value=f"{pool_size} GPUs / (pipeline {parallelism.pipeline} x data {parallelism.data})",
        why=f"tensor parallelism is that quotient, and {pool_size} is not divisible by {others}",
        fix=f"give the pool a multiple of {others} GPUs, or lower parallelism.pipeline or parallelism.data",
    )
