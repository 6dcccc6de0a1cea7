"""What must be, as plain values: the plan makes these, rules judge them, components and policies pass them on.

Every field is plain on purpose, never a Pulumi Output: a mandatory policy that reads an unknown value turns advisory,
and a preview could not show what it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """A GPU as the facts have it; `bar_bytes` is the sum of its BARs, `numa_node` -1 is unknown."""

    address: str
    pci_id: str
    subsystem_id: str
    numa_node: int
    iommu_group: int
    bar_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """The hypervisor: `translated_iommu` is None where no device told; `numa_nodes` counts them."""

    node: str
    snp: bool | None
    translated_iommu: bool | None
    kernel_command_line: str
    numa_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """A pool: who owns it (`lxc/129`, `vm/200`, `host` or empty) and memory of one GPU in MiB."""

    name: str
    driver: str
    devices: tuple[DeviceSpec, ...]
    numa_node: int | None
    span_numa_nodes: bool
    gpu: str
    memory_mib: int
    owners: tuple[str, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The devices' PCI addresses, in the order of the configuration."""
        return tuple(d.address for d in self.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class BindingSpec:
    """A pool's devices on the pool's driver; `others` are devices of the configuration's other pools."""

    pool: str
    driver: str
    devices: tuple[str, ...]
    others: tuple[str, ...]
    drain_revision: str
    revision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingEntry:
    """One device of a PCI resource mapping."""

    path: str
    id: str
    subsystem_id: str
    iommu_group: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingSpec:
    """A PCI resource mapping on one node."""

    name: str
    node: str
    pool: str
    entries: tuple[MappingEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerSpec:
    """A container and exactly the GPUs it is given; `units` are the managed services inside."""

    vmid: int
    pool: str
    driver: str
    devices: tuple[str, ...]
    passthrough: str
    units: tuple[str, ...]
    revision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeVmSpec:
    """A VM this program creates whole; sizes in MiB and GiB."""

    name: str
    cores: int
    memory_mib: int
    cpu_type: str
    disk_storage: str
    disk_gib: int
    network_bridge: str
    on_boot: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class VmSpec:
    """A virtual machine, its mapping and devices; `cpu` and `args` are as its Proxmox configuration holds them."""

    vmid: int
    pool: str
    driver: str
    mapping: str
    devices: tuple[str, ...]
    bar_bytes: int
    sev_snp: bool
    start: bool
    cpu: str
    args: str
    whole: WholeVmSpec | None
    revision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model's shape, as far as tensor parallelism and memory depend on it. Sources stand in the preset.

    Counts of heads and layers; sizes in bytes. `linear_*` is 0 for a model without linear attention, `vision_heads` 0
    for one without vision. `quant_block` is the quantisation block of the expert weights along their intermediate size,
    0 for none; `kernels_pad` says that the format's kernels pad a partial block.
    """

    name: str
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSpec:
    """An SGLang service: `tp` is computed, `text` is the unit as it must stand.

    `environment` is what the unit sets, `effective_environment` what the process really gets: drop-ins, environment
    files and /etc/nccl.conf of the live host count. `text` is the unit found on the host where that already means what
    is wanted.
    """

    name: str
    unit: str
    container: int | None
    pool: str
    devices: tuple[str, ...]
    driver: str
    memory_mib: int
    tp: int
    pipeline: int
    data: int
    port: int
    address: str
    served_name: str
    model: ModelSpec
    arguments: tuple[tuple[str, str], ...]
    environment: dict[str, str]
    effective_environment: dict[str, str]
    translated_iommu: bool | None
    text: str
    path: str
    canonical_unit: str
    enabled: bool
    deadline_s: int
    token_timeout_s: int
    unit_revision: str
    revision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologySpec:
    """Everything that must be on one hypervisor."""

    host: HostSpec
    pools: tuple[PoolSpec, ...]
    bindings: tuple[BindingSpec, ...]
    mappings: tuple[MappingSpec, ...]
    containers: tuple[ContainerSpec, ...]
    vms: tuple[VmSpec, ...]
    services: tuple[ServiceSpec, ...]
