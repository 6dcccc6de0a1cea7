"""Whether a model fits a GPU, and for how many tokens and requests, by SGLang's own way of dividing memory.

SGLang (python/sglang/srt/model_executor/model_runner_kv_cache_mixin.py, profile_max_num_token and
handle_max_mamba_cache) takes the memory that was free before loading, keeps `mem_fraction` of it for weights and
caches, and deals what the weights leave to recurrent state and KV cache in a fixed ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topology.spec import ModelSpec

_MIB = 1 << 20

RUNTIME_MIB = 1024
"""CUDA context, libraries and NCCL of one rank, gone before SGLang counts free memory.

Own estimate, on the safe side: a context alone measures some 350 to 600 MiB on such cards.
"""

DEFAULT_MEM_FRACTION = 0.85
"""What SGLang chooses by itself on a card of 90 to 160 GiB, rounded down: 0.85 to 0.86.

Source: python/sglang/srt/server_args.py, reserve of 12 GiB and half a GiB per rank.
"""

HIGHEST_MEM_FRACTION = 0.93
"""The highest fraction known to work on 96 GB cards; with 0.95 NCCL itself ran out of memory.

Source: local-inference-lab/rtx6kpro optimization/nccl-tuning.md, NCCL Graph OOM.
"""

STATE_RATIO = 0.9
"""Recurrent state against KV cache: SGLang's --mamba-full-memory-ratio, its default."""

STATES_PER_REQUEST = 3
"""State slots SGLang keeps per running request with its prefix cache on; 1 with it off."""

EXTRA_BUFFER_STATES = 2
"""Further slots per request with --mamba-scheduler-strategy extra_buffer."""

_CONV_TAPS = 3
"""Inputs a linear layer's convolution remembers: linear_conv_kernel_dim 4 (Qwen3-Next, Qwen3.5) minus one."""

_CONV_BYTES = 2
"""The convolution's state is bfloat16 whatever the recurrent state is."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Memory of one GPU in MiB, and what it holds.

    `static` is what SGLang uses for weights and caches: `weights` + `state` + `kv_cache` + `draft`; `margin` is left
    for activations and CUDA graphs. `tokens` fit the KV cache of one replica; `requests` run at once, each with
    `context` tokens at most `full_requests` of them. `shortfall` is missing to one request of the whole context, 0
    where it fits.
    """

    memory_mib: int
    runtime_mib: int
    static_mib: int
    margin_mib: int
    weights_mib: int
    state_mib: int
    draft_mib: int
    kv_cache_mib: int
    kv_bytes_per_token: int
    state_bytes_per_slot: int
    context: int
    tokens: int
    requests: int | None
    shortfall_mib: int

    @property
    def fits(self) -> bool:
        """At least one request of the whole context fits."""
        return self.shortfall_mib == 0

    @property
    def full_requests(self) -> int:
        """Requests of the whole context whose tokens fit at once."""
        return self.tokens // self.context

    def __str__(self) -> str:
        parts = [f"weights {self.weights_mib:,}", f"KV cache {self.kv_cache_mib:,}"]
        parts += [f"state {self.state_mib:,}"] if self.state_bytes_per_slot else []
        parts += [f"draft states {self.draft_mib:,}"] if self.draft_mib else []
        holds = f"{self.tokens:,} tokens, {self.full_requests} requests of {self.context:,} tokens at once"
        running = f", at most {self.requests} running" if self.requests is not None else ""
        return (
            f"of {self.memory_mib:,} MiB per GPU: runtime {self.runtime_mib:,}, {', '.join(parts)}, "
            f"margin for activations and CUDA graphs {self.margin_mib:,} MiB; holds {holds}{running}"
        )


def fit(  # noqa: PLR0913  what SGLang's own command line leaves open
    model: ModelSpec,
    *,
    tp: int,
    memory_mib: int,
    context: int,
    pipeline: int = 1,
    kv_dtype: str = "auto",
    state_dtype: str = "float32",
    mem_fraction: float = DEFAULT_MEM_FRACTION,
    state_ratio: float = STATE_RATIO,
    states_per_request: int = STATES_PER_REQUEST,
    draft_states: int = 0,
) -> Fit:
    """Divide one GPU's memory as SGLang does.

    `tp` x `pipeline` GPUs hold one replica; `context` is the longest request in tokens; `draft_states` are recurrent
    states kept for speculative decoding, draft tokens x running requests.
    """
    static = int((memory_mib - RUNTIME_MIB) * mem_fraction)
    weights = math.ceil(model.weights_bytes / (tp * pipeline) / _MIB)
    kv_token = kv_bytes_per_token(model, tp=tp, pipeline=pipeline, kv_dtype=kv_dtype)
    slot = state_bytes(model, tp=tp, pipeline=pipeline, state_dtype=state_dtype)
    draft = math.ceil(slot * draft_states / _MIB)
    rest = static - weights - draft
    state = int(rest * state_ratio / (1 + state_ratio)) if slot and rest > 0 else 0
    kv_cache = max(rest - state, 0)
    kv_needed = math.ceil(kv_token * context / _MIB)
    state_needed = math.ceil(slot * states_per_request / _MIB)
    return Fit(
        memory_mib=memory_mib,
        runtime_mib=RUNTIME_MIB,
        static_mib=static,
        margin_mib=memory_mib - RUNTIME_MIB - static,
        weights_mib=weights,
        state_mib=state,
        draft_mib=draft,
        kv_cache_mib=kv_cache,
        kv_bytes_per_token=kv_token,
        state_bytes_per_slot=slot,
        context=context,
        tokens=kv_cache * _MIB // kv_token if kv_token else 0,
        requests=state * _MIB // slot // states_per_request if slot else None,
        shortfall_mib=max(-rest, 0) + max(kv_needed - kv_cache, state_needed - state, 0),
    )


def kv_bytes_per_token(model: ModelSpec, *, tp: int, pipeline: int = 1, kv_dtype: str = "auto") -> int:
    """Bytes one token takes in one GPU's KV cache: keys and values of its share of the heads, at least one head."""
    heads = max(math.ceil(model.kv_heads / tp), 1)
    layers = math.ceil(model.full_attention_layers / pipeline)
    return 2 * heads * model.head_dim * layers * dtype_bytes(kv_dtype)


def state_bytes(model: ModelSpec, *, tp: int, pipeline: int = 1, state_dtype: str = "float32") -> int:
    """Bytes one slot of recurrent state takes on one GPU; 0 for a model without linear attention."""
    layers = math.ceil(model.linear_layers / pipeline)
    recurrent = model.linear_value_heads * model.linear_key_dim * model.linear_value_dim * dtype_bytes(state_dtype)
    channels = 2 * model.linear_key_heads * model.linear_key_dim + model.linear_value_heads * model.linear_value_dim
    return layers * math.ceil((recurrent + channels * _CONV_TAPS * _CONV_BYTES) / tp)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; an unknown type counts as two, which is what SGLang's `auto` is."""
    return _DTYPE_BYTES.get(dtype, 2)
