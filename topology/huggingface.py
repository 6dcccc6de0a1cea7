"""A model's shape from its Hugging Face config.json, as far as tensor parallelism and memory depend on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from topology.problem import Problem, TopologyError
from topology.spec import ModelSpec

if TYPE_CHECKING:
    from pathlib import Path

_FULL = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Layers with a KV cache. Sliding ones keep fewer tokens; counting them whole errs on the safe side."""
_LINEAR = "linear_attention"


class _UnreadableError(ValueError):
    """The file lacks or garbles something; the text says what."""


@dataclass(frozen=True, slots=True)
class _Quantisation:
    block: int
    kernels_pad: bool


def read_config(path: Path, *, name: str, weights_bytes: int) -> ModelSpec:
    """Read a config.json: nested `text_config`, `vision_config` and `quantization_config` where there are such.

    Raises:
        TopologyError: no such file, no JSON, or it lacks a figure that the rules need.
    """
    try:
        return _shape(json.loads(path.read_text(encoding="utf-8")), name=name, weights_bytes=weights_bytes)
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TopologyError((_unreadable(path, why),)) from error


def _unreadable(path: Path, why: str) -> Problem:
    return Problem(
        rule="model-config",
        subject="model.config",
        value=f"is {str(path)!r}",
        why=f"the model's shape cannot be read from it: {why}",
        fix="point model.config at the model's config.json on this workstation, or use model.preset",
    )


def _shape(whole: object, *, name: str, weights_bytes: int) -> ModelSpec:
    if not isinstance(whole, dict):
        raise _UnreadableError("it is no JSON object")
    text = _mapping(whole, "text_config") or whole
    vision = _mapping(whole, "vision_config")
    heads = _number(text, "num_attention_heads")
    kv_heads, head_dim = _kv(text, heads)
    full, linear = _layers(text)
    quantisation = _quantisation(_mapping(whole, "quantization_config") or _mapping(text, "quantization_config"))
    return ModelSpec(
        name=name,
        weights_bytes=weights_bytes,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        full_attention_layers=full,
        linear_layers=linear,
        linear_key_heads=_number(text, "linear_num_key_heads") if linear else 0,
        linear_value_heads=_number(text, "linear_num_value_heads") if linear else 0,
        linear_key_dim=_number(text, "linear_key_head_dim") if linear else 0,
        linear_value_dim=_number(text, "linear_value_head_dim") if linear else 0,
        vision_heads=_number(vision, "num_heads", "num_attention_heads") if vision else 0,
        expert_intermediate=_experts(text),
        quant_block=quantisation.block,
        kernels_pad=quantisation.kernels_pad,
        max_context=_number(text, "max_position_embeddings"),
    )


def _mapping(config: dict[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def _number(config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        if isinstance(value := config.get(key), int) and not isinstance(value, bool):
            return value
    raise _UnreadableError(f"{' or '.join(keys)} is missing")


def _kv(text: dict[str, Any], heads: int) -> tuple[int, int]:
    if text.get("kv_lora_rank"):
        # Latent attention caches one vector per token, whole on every rank: one head of half that size, K and V.
        return 1, (_number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")) // 2
    head_dim = text.get("head_dim")
    return (
        _number(text, "num_key_value_heads") if text.get("num_key_value_heads") else heads,
        head_dim if isinstance(head_dim, int) else _number(text, "hidden_size") // heads,
    )


def _layers(text: dict[str, Any]) -> tuple[int, int]:
    total = _number(text, "num_hidden_layers")
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        unknown = sorted({str(kind) for kind in kinds} - _FULL - {_LINEAR})
        if unknown:
            raise _UnreadableError(f"layer_types has {', '.join(unknown)}, whose memory this program cannot count")
        linear = kinds.count(_LINEAR)
    elif text.get("linear_num_value_heads"):
        # Qwen3-Next's configuration class fills the interval with 4 where the file has none.
        linear = total - total // (_number(text, "full_attention_interval") if "full_attention_interval" in text else 4)
    else:
        linear = 0
    return total - linear, linear


def _experts(text: dict[str, Any]) -> int:
    if not any(text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return 0
    return _number(text, "moe_intermediate_size", "intermediate_size")


def _quantisation(config: dict[str, Any]) -> _Quantisation:
    """Tell the block that a TP share of an expert must fill.

    8-bit formats with 128 x 128 blocks are known not to pad: SGLang and vLLM refuse to load a partial block
    (sgl-project/sglang#10852, vllm-project/vllm#39046). For every other format nothing so firm is known.
    """
    blocks = config.get("weight_block_size")
    if isinstance(blocks, list) and blocks:
        return _Quantisation(max(int(b) for b in blocks), kernels_pad=False)
    for group in _mapping(config, "config_groups").values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        if weights.get("strategy") == "block" and weights.get("block_structure"):
            return _Quantisation(max(int(b) for b in weights["block_structure"]), kernels_pad=False)
        if weights.get("group_size"):
            return _Quantisation(int(weights["group_size"]), kernels_pad=True)
    if str(config.get("quant_algo", "")).upper() == "NVFP4":
        return _Quantisation(int(config.get("group_size") or 16), kernels_pad=True)
    if config.get("quant_method") == "mxfp4":
        # The OCP microscaling format's block; its configuration doesn't repeat it.
        return _Quantisation(32, kernels_pad=True)
    return _Quantisation(max(int(config.get("group_size") or 0), 0), kernels_pad=True)
