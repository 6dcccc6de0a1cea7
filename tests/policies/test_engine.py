"""The pack on the real engine, over a program of bare components."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from testbed.engine.cache import REPOSITORY, find_cache
from testbed.engine.environment import engine_environment
from tests.topology.specs import (
    HOST,
    binding,
    container,
    device,
    mapping,
    pool,
    service,
    sized,
    vm,
    vm_pool,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

PROGRAM = """\
import json
import pulumi

for made in json.load(open("components.json")):
    component = pulumi.ComponentResource("gpu-topology:index:" + made["type"], made["name"], made["props"])
    component.register_outputs(made["outputs"])
"""

Made = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class Preview:
    """How a preview ended and what it said, white space folded."""

    status: int
    output: str


def _gpu_pool(spec: Any) -> Made:
    return "GpuPool", spec.name, {"pool": spec, "host": HOST}


def _service(spec: Any) -> Made:
    return "SglangService", spec.name, {"service": spec, "host": HOST}


SPLIT: list[Made] = [
    _gpu_pool(pool()),
    _gpu_pool(vm_pool()),
    ("VfioBinding", "serving-binding", {"binding": binding()}),
    ("PciMapping", "gpu-confidential", {"mapping": mapping()}),
    ("LxcGpuPassthrough", "lxc-129", {"container": container()}),
    ("ConfidentialVm", "vm-200", {"vm": vm(), "host": HOST}),
    _service(service()),
]


def _preview(folder: Path, components: list[Made], *options: str) -> Preview:
    for path in ("home", "state"):
        (folder / path).mkdir()
    (folder / "Pulumi.yaml").write_text("name: policies\nruntime: python\n")
    (folder / "__main__.py").write_text(PROGRAM)
    described = [
        {
            "type": component,
            "name": name,
            "props": {key: asdict(spec) for key, spec in specs.items()},
            "outputs": {"devices": list(specs["pool"].addresses)} if "pool" in specs else {},
        }
        for component, name, specs in components
    ]
    (folder / "components.json").write_text(json.dumps(described))
    environment = engine_environment(find_cache(), home=folder / "home", backend=folder / "state")

    def pulumi(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["pulumi", *arguments, "--non-interactive", "--color", "never", "--cwd", str(folder)]
        return subprocess.run(command, env=environment, check=False, text=True, capture_output=True)

    pulumi("stack", "init", "dev").check_returncode()
    done = pulumi("preview", "--stack", "dev", "--policy-pack", str(REPOSITORY / "policies"), *options)
    return Preview(done.returncode, " ".join((done.stdout + done.stderr).split()))


def test_the_split_passes_with_its_warning(tmp_path: Path) -> None:
    """A sound stack passes in preview, and what is only a warning is shown as advisory."""
    preview = _preview(tmp_path, SPLIT)
    assert preview.status == 0, preview.output
    assert "[advisory]" in preview.output
    assert "[mandatory]" not in preview.output
    assert "Rule gpu-confidential-computing-off: NVIDIA supports GPU confidential computing" in preview.output


@pytest.mark.parametrize(
    ("components", "says"),
    [
        ([_service(sized(3))], "service sglang-qwen: has qwen3.5-397b-a17b-nvfp4 with tp 3 over 32 attention heads"),
        (
            [_gpu_pool(pool()), _gpu_pool(vm_pool(devices=(device("0000:71:00.0", numa_node=1),)))],
            "both have 0000:71:00. Rule one-device-one-owner",
        ),
        (
            [_gpu_pool(pool(driver="vfio-pci"))],
            "pool serving: gives devices on driver vfio-pci to lxc/129. Rule container-on-nvidia",
        ),
        (
            [_service(service(effective_environment={}))],
            "service sglang-qwen: gets NCCL_P2P_DISABLE not set",
        ),
        ([_service(service(arguments={"tp": "8"}))], "has --tp among its arguments. Rule argument-computed"),
        ([_service(sized(2))], "at tp 2 with a context of 262,144 tokens. Rule model-fits"),
        (
            [("ConfidentialVm", "vm-200", {"vm": vm(), "host": replace(HOST, kernel_command_line="iommu=pt")})],
            "has iommu=pt on its kernel's command line. Rule snp-needs-translated-iommu",
        ),
        ([("PciMapping", "gpus", {})], "gpus: input mapping is missing. Rule inputs-known"),
    ],
    ids=[
        "heads",
        "two pools",
        "vfio pool in a container",
        "P2P on",
        "tp among the arguments",
        "no fit",
        "SEV-SNP and iommu=pt",
        "no inputs",
    ],
)
def test_a_broken_rule_is_refused_in_preview(tmp_path: Path, components: list[Made], says: str) -> None:
    """A mandatory violation ends preview with an error and the rule's whole message."""
    preview = _preview(tmp_path, components)
    assert preview.status != 0
    assert "[mandatory]" in preview.output
    assert says in preview.output
    assert "Fix: " in preview.output
    assert "Traceback" not in preview.output


def test_a_rules_level_can_be_set(tmp_path: Path) -> None:
    """A policy configuration makes one rule advisory by its name and leaves the others mandatory."""
    config = tmp_path / "levels.json"
    config.write_text(json.dumps({"model-fits": {"enforcementLevel": "advisory"}}))
    fitting = _preview(
        tmp_path,
        [_service(sized(2, arguments={"disable-custom-all-reduce": True}))],
        "--policy-pack-config",
        str(config),
    )
    assert fitting.status == 0, fitting.output
    assert "Rule model-fits" in fitting.output
