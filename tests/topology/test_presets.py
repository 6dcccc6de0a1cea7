from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from topology.config import Gpu, Model, Pool
from topology.presets import (
    gpu_preset,
    gpu_presets,
    model_preset,
    model_presets,
    preset_sources,
    resolve_gpu,
    resolve_model,
)
from topology.problem import Problem, TopologyError

if TYPE_CHECKING:
    from pathlib import Path

CONFIG: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_hidden_layers": 60,
    "max_position_embeddings": 262144,
}
HYBRID: dict[str, Any] = CONFIG | {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 15,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "moe_intermediate_size": 1024,
}


def _problem(call: Any, *args: Any) -> Problem:
    with pytest.raises(TopologyError) as caught:
        call(*args)
    (problem,) = caught.value.problems
    return problem


def _write(folder: Path, config: object) -> Model:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return Model(path="/models/served", config="config.json", weights_gb=234)


@pytest.mark.parametrize("name", [*gpu_presets(), *model_presets()])
def test_a_preset_tells_its_sources(name: str) -> None:
    """No figure is shipped without saying where it comes from."""
    assert preset_sources(name)


def test_no_preset_has_no_sources() -> None:
    """An unknown name has none."""
    assert preset_sources("abacus") == ()


def test_the_gpu_of_kpro6_is_a_preset() -> None:
    """Server and Workstation Edition differ by id alone."""
    assert gpu_preset("rtx-pro-6000-blackwell-server").pci_id == "10de:2bb5"
    assert gpu_preset("rtx-pro-6000-blackwell-workstation").pci_id == "10de:2bb1"
    assert {gpu_preset(name).memory_mib for name in gpu_presets()} == {97887}


def test_a_pool_may_describe_its_gpu_itself() -> None:
    """A GPU that is no preset is taken as written."""
    gpu = Gpu(name="Abacus", pci_id="10de:0001", memory_mib=1024)
    pool = Pool.model_validate({"devices": ["01:00.0"], "driver": "nvidia", "gpu": gpu, "numaNode": 0})
    assert resolve_gpu(pool) == gpu


def test_an_unknown_preset_names_the_nearest() -> None:
    """A misspelt preset is refused with the nearest one and what to do without a preset."""
    gpu = _problem(gpu_preset, "rtx-pro-6000-server")
    assert "rtx-pro-6000-blackwell-server" in gpu.fix
    assert "pciId" in gpu.fix
    model = _problem(model_preset, "qwen3.5-397b")
    assert "qwen3.5-397b-a17b-nvfp4" in model.fix
    assert "weightsGb" in model.fix


def test_the_model_of_kpro6_is_a_preset(tmp_path: Path) -> None:
    """Its shape is that of its config.json."""
    config = {
        "text_config": HYBRID,
        "vision_config": {"num_heads": 16},
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    }
    read = resolve_model(_write(tmp_path, config), tmp_path)
    preset = resolve_model(Model(path="x", preset="qwen3.5-397b-a17b-nvfp4"), tmp_path)
    assert [(f.name, getattr(read, f.name)) for f in fields(read) if f.name != "name"] == [
        (f.name, getattr(preset, f.name)) for f in fields(preset) if f.name != "name"
    ]
    assert read.name == "served"


def test_a_dense_text_model_has_no_experts_and_no_vision(tmp_path: Path) -> None:
    """A flat config.json without experts leaves those figures 0, and every layer has a KV cache."""
    model = resolve_model(_write(tmp_path, CONFIG), tmp_path)
    assert (model.expert_intermediate, model.vision_heads, model.quant_block) == (0, 0, 0)
    assert (model.full_attention_layers, model.linear_layers) == (60, 0)


def test_the_head_size_follows_from_the_hidden_size(tmp_path: Path) -> None:
    """Old configurations have neither head_dim nor KV heads."""
    config = {k: v for k, v in CONFIG.items() if k not in {"head_dim", "num_key_value_heads"}} | {"hidden_size": 4096}
    model = resolve_model(_write(tmp_path, config), tmp_path)
    assert (model.head_dim, model.kv_heads) == (128, 32)


def test_latent_attention_caches_one_vector_per_token(tmp_path: Path) -> None:
    """DeepSeek's cache is one latent and a rotary part, whole on each GPU."""
    config = CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = resolve_model(_write(tmp_path, config), tmp_path)
    assert 2 * model.kv_heads * model.head_dim == 576


def test_linear_layers_are_counted_by_interval_where_no_list_is(tmp_path: Path) -> None:
    """Qwen3-Next has every fourth layer with full attention, said or not."""
    config = {k: v for k, v in HYBRID.items() if k != "layer_types"}
    assert resolve_model(_write(tmp_path, config), tmp_path).linear_layers == 45
    config["full_attention_interval"] = 6
    assert resolve_model(_write(tmp_path, config), tmp_path).linear_layers == 50


@pytest.mark.parametrize(
    ("quantisation", "block", "pads"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 128, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 16, True),
        ({"quant_method": "mxfp4"}, 32, True),
        ({"quant_method": "awq", "group_size": 64}, 64, True),
        ({"quant_method": "gptq", "group_size": -1}, 0, True),
        ({"config_groups": {"a": {"weights": {"strategy": "block", "block_structure": [128, 128]}}}}, 128, False),
        ({"config_groups": {"a": {"weights": {"strategy": "tensor_group", "group_size": 16}}}}, 16, True),
        ({"config_groups": {"a": {"weights": {"strategy": "channel"}}}}, 0, True),
        ({"config_groups": {"a": {"weights": None}}}, 0, True),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else str(value),
)
def test_quantisation_tells_the_block(tmp_path: Path, quantisation: dict[str, Any], block: int, pads: bool) -> None:
    """Only 8-bit block formats are known not to pad; of others the block is a hint."""
    model = resolve_model(_write(tmp_path, CONFIG | {"quantization_config": quantisation}), tmp_path)
    assert (model.quant_block, model.kernels_pad) == (block, pads)


def test_experts_may_be_under_either_name(tmp_path: Path) -> None:
    """Mixtral and gpt-oss call an expert's size intermediate_size."""
    config = CONFIG | {"num_local_experts": 8, "intermediate_size": 2880}
    assert resolve_model(_write(tmp_path, config), tmp_path).expert_intermediate == 2880


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("not json", "Expecting value"),
        ([], "no JSON object"),
        ({}, "num_attention_heads is missing"),
        (HYBRID | {"layer_types": ["mamba"]}, "mamba"),
        (CONFIG | {"quantization_config": {"weight_block_size": [None]}}, "cannot be read"),
    ],
    ids=["text", "list", "empty", "unknown layer", "garbled block"],
)
def test_an_unreadable_config_is_one_message(tmp_path: Path, config: object, says: str) -> None:
    """What the file lacks is said, with its path and the way without it."""
    problem = _problem(resolve_model, _write(tmp_path, config), tmp_path)
    assert says in problem.why
    assert "config.json" in problem.value
    assert "model.preset" in problem.fix


def test_a_missing_config_is_one_message(tmp_path: Path) -> None:
    """A path that leads nowhere is told as such."""
    problem = _problem(resolve_model, Model(path="x", config="nowhere.json", weights_gb=1), tmp_path)
    assert "No such file" in problem.why
