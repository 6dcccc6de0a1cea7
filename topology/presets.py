"""Shapes of GPUs and models: shipped presets with their sources, or a Hugging Face config.json."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.alias_generators import to_camel

from topology.config import Gpu, Model, Pool
from topology.huggingface import read_config
from topology.load import nearest
from topology.problem import Problem, TopologyError
from topology.spec import ModelSpec

_FOLDER = Path(__file__).with_name("presets")


class _Preset(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)

    sources: tuple[str, ...]


class _GpuPreset(_Preset):
    name: str
    pci_id: str
    memory_mib: int


class _ModelPreset(_Preset):
    weights_bytes: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    full_attention_layers: int
    linear_layers: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    vision_heads: int
    expert_intermediate: int
    quant_block: int
    kernels_pad: bool
    max_context: int


@cache
def _gpus() -> dict[str, _GpuPreset]:
    return TypeAdapter(dict[str, _GpuPreset]).validate_json((_FOLDER / "gpus.json").read_bytes())


@cache
def _models() -> dict[str, _ModelPreset]:
    return TypeAdapter(dict[str, _ModelPreset]).validate_json((_FOLDER / "models.json").read_bytes())


def gpu_presets() -> tuple[str, ...]:
    """Names of the shipped GPU models."""
    return tuple(_gpus())


def model_presets() -> tuple[str, ...]:
    """Names of the shipped model shapes."""
    return tuple(_models())


def preset_sources(name: str) -> tuple[str, ...]:
    """Where the figures of a GPU's or a model's preset come from; empty for a name that is no preset."""
    preset = _gpus().get(name) or _models().get(name)
    return preset.sources if preset else ()


def gpu_preset(name: str) -> Gpu:
    """Look up a shipped GPU model: PCI ids, and memory in MiB as nvidia-smi counts it.

    Raises:
        TopologyError: no such preset.
    """
    preset = _gpus().get(name)
    if preset is None:
        raise TopologyError((_unknown("gpu", name, gpu_presets(), "or write name, pciId and memoryMib instead"),))
    return Gpu(name=preset.name, pci_id=preset.pci_id, memory_mib=preset.memory_mib)


def resolve_gpu(pool: Pool) -> Gpu:
    """Say which GPU model a pool declares.

    Raises:
        TopologyError: the pool names no preset.
    """
    return pool.gpu if isinstance(pool.gpu, Gpu) else gpu_preset(pool.gpu)


def model_preset(name: str) -> ModelSpec:
    """Look up a shipped model shape.

    Raises:
        TopologyError: no such preset.
    """
    preset = _models().get(name)
    if preset is None:
        fix = "or give model.config (a config.json) and model.weightsGb instead"
        raise TopologyError((_unknown("model.preset", name, model_presets(), fix),))
    return ModelSpec(name=name, **preset.model_dump(exclude={"sources"}))


def resolve_model(model: Model, base: Path) -> ModelSpec:
    """Take a service's model from its preset, or from a config.json relative to `base`.

    Raises:
        TopologyError: no such preset or file, or the file doesn't tell what the rules need.
    """
    if model.preset is not None:
        return model_preset(model.preset)
    if model.config is None or model.weights_gb is None:
        raise ValueError("a checked Model has a preset, or config and weights_gb")
    name = model.served_name or Path(model.path).name
    return read_config(base / model.config, name=name, weights_bytes=int(model.weights_gb * 1e9))


def _unknown(subject: str, name: str, known: tuple[str, ...], otherwise: str) -> Problem:
    return Problem(
        rule="preset",
        subject=subject,
        value=f"is {name!r}",
        why="there is no preset of that name",
        fix=f"{nearest(name, known)}; {otherwise}",
    )
