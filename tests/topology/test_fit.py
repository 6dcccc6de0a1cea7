from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.fit import RUNTIME_MIB, dtype_bytes, fit, kv_bytes_per_token, state_bytes
from topology.presets import model_preset

QWEN = model_preset("qwen3.5-397b-a17b-nvfp4")
DENSE = model_preset("qwen3-235b-a22b-fp8")
CARD = 97887
CONTEXT = 262144


@pytest.mark.parametrize(("tp", "fits"), [(2, False), (4, True), (8, True)])
def test_qwen_fits_four_and_eight_cards_and_not_two(tp: int, fits: bool) -> None:
    """117 GB of weights per GPU do not fit 96 GB, 58 and 29 do with the whole context."""
    assert fit(QWEN, tp=tp, memory_mib=CARD, context=CONTEXT, kv_dtype="fp8_e4m3").fits is fits


def test_a_token_takes_7680_bytes_at_tp_4() -> None:
    """15 layers, keys and values, one copied KV head of 256, one byte: own arithmetic from the model card."""
    assert kv_bytes_per_token(QWEN, tp=4, kv_dtype="fp8_e4m3") == 7680
    assert kv_bytes_per_token(QWEN, tp=4) == 15360
    assert kv_bytes_per_token(QWEN, tp=1, kv_dtype="fp8_e4m3") == 15360


def test_kv_heads_are_never_split_below_one() -> None:
    """More GPUs than KV heads do not shrink the cache further, since heads are copied."""
    assert kv_bytes_per_token(QWEN, tp=2) == kv_bytes_per_token(QWEN, tp=16)


def test_a_request_takes_47_megabytes_of_state_at_tp_4() -> None:
    """45 layers of 64 x 128 x 128 in float32 are 189 MB; bfloat16 halves that."""
    assert state_bytes(QWEN, tp=4) == pytest.approx(47.2e6, rel=0.03)
    assert state_bytes(QWEN, tp=4, state_dtype="bfloat16") == pytest.approx(state_bytes(QWEN, tp=4) / 2, rel=0.03)
    assert state_bytes(DENSE, tp=4) == 0


@given(tp=st.sampled_from([1, 2, 4, 8, 16]), fraction=st.floats(0.3, 0.95), context=st.integers(1024, 1 << 20))
def test_the_parts_add_up_to_the_card(tp: int, fraction: float, context: int) -> None:
    """Nothing of a card's memory is lost or counted twice, where the weights fit at all."""
    found = fit(QWEN, tp=tp, memory_mib=CARD, context=context, mem_fraction=fraction)
    assert found.static_mib + found.margin_mib + RUNTIME_MIB == CARD
    if found.weights_mib <= found.static_mib:
        assert found.weights_mib + found.state_mib + found.kv_cache_mib == found.static_mib


@given(tp=st.sampled_from([4, 8, 16]), context=st.integers(1024, 1 << 22))
def test_what_fits_is_what_the_cache_holds(tp: int, context: int) -> None:
    """A context fits exactly if its tokens do; a shorter one than one that fits always fits."""
    found = fit(QWEN, tp=tp, memory_mib=CARD, context=context)
    assert found.fits is (found.tokens >= context)
    if found.fits:
        assert fit(QWEN, tp=tp, memory_mib=CARD, context=context // 2).fits
        assert found.full_requests >= 1


def test_the_shortfall_is_what_is_missing() -> None:
    """A card larger by the shortfall, and by what of it goes to the state and the margin, holds the context."""
    short = fit(QWEN, tp=2, memory_mib=CARD, context=CONTEXT)
    assert short.shortfall_mib > 0
    larger = CARD + int(short.shortfall_mib * 1.9 / 0.85) + 1
    assert fit(QWEN, tp=2, memory_mib=larger, context=CONTEXT).fits


def test_speculative_decoding_reserves_states() -> None:
    """Draft tokens of running requests take state before the caches are dealt out."""
    plain = fit(QWEN, tp=4, memory_mib=CARD, context=CONTEXT)
    drafting = fit(QWEN, tp=4, memory_mib=CARD, context=CONTEXT, draft_states=64 * 4)
    assert drafting.draft_mib > 0
    assert drafting.tokens < plain.tokens
    assert "draft states" in str(drafting)


def test_state_slots_bound_the_running_requests() -> None:
    """Each running request keeps three state slots with the prefix cache on, and five with the extra buffer."""
    three = fit(QWEN, tp=4, memory_mib=CARD, context=CONTEXT)
    five = fit(QWEN, tp=4, memory_mib=CARD, context=CONTEXT, states_per_request=5)
    assert three.requests is not None
    assert five.requests is not None
    assert five.requests == three.requests * 3 // 5


def test_a_model_without_state_is_bound_by_tokens_alone() -> None:
    """Of a model with full attention only, no limit of running requests is told."""
    found = fit(DENSE, tp=4, memory_mib=CARD, context=32768)
    assert found.requests is None
    assert "state" not in str(found)


def test_pipeline_stages_share_layers_and_weights() -> None:
    """Two stages halve both weights and cache of a GPU."""
    one, two = (fit(DENSE, tp=2, pipeline=p, memory_mib=CARD, context=32768) for p in (1, 2))
    assert two.weights_mib == pytest.approx(one.weights_mib / 2, abs=1)
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token


def test_a_fit_reads_as_a_sentence() -> None:
    """Preview says how many tokens and requests fit, and what takes the memory."""
    text = str(fit(QWEN, tp=4, memory_mib=CARD, context=CONTEXT, kv_dtype="fp8_e4m3"))
    for part in ("97,887 MiB", "weights 55,790", "KV cache", "state", "margin", "tokens", "requests of 262,144"):
        assert part in text


@pytest.mark.parametrize(("dtype", "size"), [("fp8_e4m3", 1), ("bfloat16", 2), ("float32", 4), ("auto", 2), ("?", 2)])
def test_an_unknown_type_counts_as_two_bytes(dtype: str, size: int) -> None:
    """SGLang's auto is the model's own type."""
    assert dtype_bytes(dtype) == size
