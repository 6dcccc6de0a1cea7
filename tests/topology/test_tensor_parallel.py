from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.config import Parallelism
from topology.presets import model_preset
from topology.problem import Level, TopologyError
from topology.tensor_parallel import tensor_parallel, uneven, valid_tp

QWEN = model_preset("qwen3.5-397b-a17b-nvfp4")
FP8 = model_preset("qwen3-235b-a22b-fp8")


@given(tp=st.integers(1, 64), pipeline=st.integers(1, 8), data=st.integers(1, 8))
def test_tp_is_the_pool_over_the_other_parallelisms(tp: int, pipeline: int, data: int) -> None:
    """TP is computed from the pool's size alone."""
    parallelism = Parallelism(pipeline=pipeline, data=data)
    assert tensor_parallel(tp * pipeline * data, parallelism) == tp


@pytest.mark.parametrize(("gpus", "pipeline", "data"), [(7, 2, 1), (4, 1, 3), (1, 2, 2)])
def test_a_pool_that_does_not_divide_is_refused(gpus: int, pipeline: int, data: int) -> None:
    """Neither a remainder nor less than one GPU per rank passes."""
    with pytest.raises(TopologyError, match="tp-whole"):
        tensor_parallel(gpus, Parallelism(pipeline=pipeline, data=data))


def test_qwen_splits_over_powers_of_two() -> None:
    """32 heads, 2 KV heads, 16 and 64 linear heads and 16 vision heads allow 1 to 16, and never 3, 5, 6 or 7."""
    assert valid_tp(QWEN) == (1, 2, 4, 8, 16)
    assert valid_tp(QWEN, largest=4) == (1, 2, 4)


def test_eight_gpus_leave_partial_blocks_that_fp8_kernels_do_not_pad() -> None:
    """1536 over 8 is 192, no multiple of 128: SGLang refuses to load that."""
    assert valid_tp(FP8) == (1, 2, 4)
    (found,) = uneven(FP8, 8)
    assert (found.rule, found.level) == ("tp-fills-expert-blocks", Level.REFUSE)
    assert "192" in found.value


def test_a_partial_block_of_a_format_that_may_pad_is_a_warning() -> None:
    """A split that newer kernels pad stays valid."""
    padded = replace(FP8, kernels_pad=True)
    assert [u.level for u in uneven(padded, 8)] == [Level.WARN]
    assert 8 in valid_tp(padded)


def test_expert_parallelism_keeps_experts_whole() -> None:
    """With ep 4 at tp 8 an expert is split over two GPUs only."""
    assert uneven(FP8, 8, expert_parallel=4) == ()


@pytest.mark.parametrize(
    ("tp", "rules"),
    [
        (3, {"tp-divides-heads", "tp-fits-kv-heads", "tp-divides-linear-heads", "tp-divides-vision-heads"}),
        (32, {"tp-divides-linear-heads", "tp-divides-vision-heads"}),
        (16, set()),
    ],
)
def test_each_kind_of_head_has_its_rule(tp: int, rules: set[str]) -> None:
    """A message names the heads that do not divide."""
    refused = {u.rule for u in uneven(QWEN, tp) if u.level is Level.REFUSE}
    assert refused - {"tp-fills-expert-blocks"} == rules


def test_kv_heads_are_dealt_out_or_copied() -> None:
    """Six KV heads go over 3 or 12 GPUs, not over 4."""
    model = replace(QWEN, attention_heads=12, kv_heads=6, linear_key_heads=0, linear_value_heads=0, vision_heads=0)
    model = replace(model, expert_intermediate=0)
    assert [tp for tp in range(1, 13) if not uneven(model, tp)] == [1, 2, 3, 6, 12]
    assert [u.rule for u in uneven(model, 4)] == ["tp-fits-kv-heads"]


def test_a_whole_vision_encoder_needs_no_even_split() -> None:
    """Where each GPU runs the whole encoder, its heads are not split."""
    assert "tp-divides-vision-heads" in {u.rule for u in uneven(QWEN, 32)}
    assert "tp-divides-vision-heads" not in {u.rule for u in uneven(QWEN, 32, vision_whole=True)}
