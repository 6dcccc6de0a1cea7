"""A found state of a hypervisor as a data file: what is plugged in, configured and running before anyone touches it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from pydantic import BaseModel, ConfigDict, Field
from ruamel.yaml import YAML

if TYPE_CHECKING:
    from collections.abc import Mapping

STATES = Path(__file__).parent / "states"


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FunctionState(_Data):
    """One PCI function of a card; `driver` is the one whose id table lists it, `bars` are bytes."""

    vendor: str
    device: str
    subsystem_vendor: str
    subsystem_device: str
    pci_class: str = Field(alias="class")
    driver: str | None = None
    bars: tuple[int, ...] = ()
    boot_vga: bool = False
    function_level_reset: bool = True


class ModelState(_Data):
    """A kind of card: its functions in order, and for a GPU the name and memory that nvidia-smi tells."""

    name: str
    memory_mib: int = 0
    functions: tuple[FunctionState, ...]


class CardState(_Data):
    """A card in a slot; functions share the group unless `iommu_groups` names one for each."""

    model: str
    numa_node: int
    iommu_group: int
    alive: bool = True


class KernelState(_Data):
    """The running kernel; `iommu` translated gives groups of type DMA-FQ, passthrough gives identity."""

    release: str
    cmdline: str
    iommu: Literal["translated", "passthrough"]
    snp: bool
    modules: tuple[str, ...] = ("nvidia",)


class NvidiaState(_Data):
    """The nvidia driver's version and the majors that /proc/devices gives its device nodes."""

    version: str
    uvm_major: int
    caps_major: int


class ContainerState(_Data):
    """An LXC container: its configuration file and files inside it."""

    config: str
    running: bool = True
    files: dict[str, str] = {}


class VmState(_Data):
    """A virtual machine: its configuration file."""

    config: str
    running: bool = False


class SglangState(_Data):
    """How the stub server behaves: seconds to load, GB of weights that a model path stands for."""

    load_s: float = 1.0
    stop_s: float = 0.05
    weights_gb: dict[str, float] = {}


class HostState(_Data):
    """A whole hypervisor. `files` are on the host; `containers` and `vms` are keyed by VMID, `cards` by slot."""

    version: Literal["v1"]
    hostname: str
    pve_version: str
    numa_nodes: int
    kernel: KernelState
    nvidia: NvidiaState
    models: dict[str, ModelState]
    cards: dict[str, CardState]
    containers: dict[int, ContainerState] = {}
    vms: dict[int, VmState] = {}
    files: dict[str, str] = {}
    sglang: SglangState = SglangState()

    @property
    def translated(self) -> bool:
        """Whether devices' DMA goes through the IOMMU's tables."""
        return self.kernel.iommu == "translated"


def load_state(name: str | Path) -> HostState:
    """Load a state by its name among the shipped ones, or from a file.

    Raises:
        ValueError: there is no such state, or its file breaks the format.
    """
    path = name if isinstance(name, Path) else _find(name)
    return HostState.model_validate(_read(path))


def _find(name: str) -> Path:
    shipped = STATES / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    if Path(name).is_file():
        return Path(name)
    known = ", ".join(sorted(p.stem for p in STATES.glob("*.yaml")))
    raise ValueError(f"no simulator state {name!r}: give one of {known}, or the path of a state file")


def _read(path: Path) -> dict[str, object]:
    data = cast("dict[str, object]", YAML(typ="safe").load(path.read_text("utf-8")))
    base = data.pop("extends", None)
    return dict(_merge(_read(path.with_name(f"{base}.yaml")), data)) if base else data


def _merge(base: Mapping[str, object], change: Mapping[str, object]) -> dict[str, object]:
    """Lay `change` over `base`, mapping by mapping; null takes a key away."""
    merged = dict(base)
    for key, value in change.items():
        below = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(below, dict) and isinstance(value, dict):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged
