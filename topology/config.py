"""What a person writes in the stack file, checked and frozen.

One object, `gpu-topology:topology`, says which driver, guest and service every GPU belongs to. Tensor parallelism is
never among it: it is computed from the pool's device list.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from topology.address import PciAddress

VmId = Annotated[int, Field(ge=100, le=999_999_999, description="Proxmox VMID; `pct list` and `qm list` show them")]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
MappingName = Annotated[str, Field(pattern=r"^[a-zA-Z][a-zA-Z0-9_-]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
ArgumentValue = str | int | float | bool | tuple[str | int | float, ...]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _no_rsa(key: str) -> str:
    if key.startswith("ssh-rsa "):
        raise ValueError(
            "an RSA host key cannot be pinned, since pulumi-command's SSH client fails with one at a modern OpenSSH: "
            "take the ed25519 key, `ssh-keyscan -t ed25519 ADDRESS` prints it"
        )
    return key


HostKey = Annotated[str, AfterValidator(_no_rsa)]


class _Strict(BaseModel):
    """Frozen, camelCase in YAML, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, validate_by_name=True)


class Driver(StrEnum):
    """The kernel driver of a pool's devices."""

    NVIDIA = "nvidia"
    VFIO = "vfio-pci"


class Passthrough(StrEnum):
    """How a container is given its GPUs: Proxmox's `dev[n]` keys, or raw `lxc.mount.entry` lines as older ones have."""

    DEV = "dev"
    RAW = "raw"


class FactsSource(StrEnum):
    """Where preview learns about the host: the host itself, or `facts/<stack>.json` where none can be reached."""

    LIVE = "live"
    RECORDED = "recorded"


class Proxy(_Strict):
    """One SSH hop in front of the host."""

    address: str
    port: Port = 22
    user: str = "root"
    host_key: HostKey = Field(description="one line in authorized_keys format, of `ssh-keyscan -t ed25519 ADDRESS`")


class Host(_Strict):
    """How to reach the hypervisor: root over SSH, with a pinned host key."""

    node: str = Field(description="the Proxmox node's name, as `hostname` on it prints")
    address: str = Field(description="SSH address: a name or an IP address")
    port: Port = 22
    user: Literal["root"] = Field(default="root", description="sysfs, pct and qm need root")
    host_key: HostKey | None = Field(default=None, description="ed25519 host key: `ssh-keyscan -t ed25519 ADDRESS`")
    known_hosts: str | None = Field(default=None, description="a known_hosts file to take the host key from instead")
    identity_file: str | None = Field(
        default=None,
        description="private key file; without it the secret gpu-topology:sshPrivateKey, else the SSH agent, is used",
    )
    proxy: Proxy | None = None
    root: str = Field(default="/", description="the host's root folder; other than / only for a simulated host")
    facts: FactsSource = FactsSource.LIVE

    @model_validator(mode="after")
    def _host_key_is_pinned(self) -> Self:
        if (self.host_key is None) == (self.known_hosts is None):
            raise ValueError(
                "exactly one of hostKey and knownHosts is required, since this program gets root there and so pins "
                f"the host's key: run `ssh-keyscan -t ed25519 {self.address}`, compare the key with "
                "`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host's console, and write "
                '"ssh-ed25519 AAAA…" as host.hostKey',
            )
        return self


class Proxmox(_Strict):
    """Proxmox's API, for what it owns: PCI mappings and whole VMs. Its credentials are Pulumi secrets."""

    endpoint: str = Field(pattern=r"^(https://|<)", description="https://HOST:8006/")
    insecure: bool = Field(default=False, description="accept a self-signed certificate")
    username: str = Field(default="root@pam", description="used with the secret gpu-topology:proxmoxPassword")


class Gpu(_Strict):
    """A GPU model that is no preset: its PCI ids and its memory."""

    name: str
    pci_id: str = Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{4}$", description="vendor:device, as `lspci -nn` prints")
    memory_mib: int = Field(gt=0, description="as `nvidia-smi --query-gpu=memory.total --format=csv` prints")


class Pool(_Strict):
    """A set of GPUs with one driver and one owner."""

    devices: tuple[PciAddress, ...] = Field(min_length=1)
    driver: Driver
    gpu: str | Gpu = Field(description="a preset's name (`gpu-topology presets`), or ids and memory")
    numa_node: int | None = Field(default=None, ge=0, description="where every device must sit")
    span_numa_nodes: bool = Field(default=False, description="devices on several NUMA nodes are meant")

    @model_validator(mode="after")
    def _devices_are_distinct(self) -> Self:
        twice = sorted({str(d) for d in self.devices if self.devices.count(d) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} stands twice in one pool: list a GPU once")
        if (self.numa_node is None) != self.span_numa_nodes:
            raise ValueError(
                "exactly one of numaNode and spanNumaNodes is required: write the NUMA node the devices sit on "
                "(`cat /sys/bus/pci/devices/ADDRESS/numa_node`), or spanNumaNodes: true where several are meant",
            )
        return self


class Container(_Strict):
    """An LXC container and the pool whose GPUs, and no others, it is given."""

    pool: Name
    passthrough: Passthrough = Passthrough.DEV


class WholeVm(_Strict):
    """A VM that this program creates and owns whole."""

    name: str
    cores: int = Field(gt=0)
    memory_mib: int = Field(gt=0)
    cpu_type: str = "host"
    disk_storage: str
    disk_gib: int = Field(gt=0)
    network_bridge: str = "vmbr0"
    on_boot: bool = False


class Vm(_Strict):
    """A virtual machine and the pool whose GPUs it is given through a PCI resource mapping."""

    pool: Name
    mapping: MappingName
    sev_snp: bool = False
    start: bool = Field(default=False, description="running after `up`; false leaves its power state alone")
    whole: WholeVm | None = Field(default=None, description="without it only the hostpci entries of an existing VM")


class Parallelism(_Strict):
    """Parallelism other than tensor, which is computed from the pool: TP = GPUs / (pipeline x data)."""

    pipeline: int = Field(default=1, ge=1)
    data: int = Field(default=1, ge=1)


class Model(_Strict):
    """The served model: a preset or a config.json for the rules, and where the container finds it."""

    path: str = Field(description="what --model-path gets: a folder in the container or a hub name")
    preset: str | None = Field(default=None, description="a shipped shape (`gpu-topology presets`)")
    config: str | None = Field(default=None, description="a config.json on the workstation, instead of a preset")
    weights_gb: float | None = Field(default=None, gt=0, description="with config: size of the weights, 10^9 bytes")
    served_name: str | None = None

    @model_validator(mode="after")
    def _shape_is_known(self) -> Self:
        if (self.preset is None) == (self.config is None):
            raise ValueError(
                "exactly one of preset and config says the model's shape: `gpu-topology presets` lists the presets"
            )
        if self.config is not None and self.weights_gb is None:
            raise ValueError(
                "weightsGb is required with config: write how large the weights are (`du -sB 1000M` of their folder)",
            )
        return self


class Readiness(_Strict):
    """How long a start may take until a token is generated, in seconds."""

    deadline: int = Field(default=1200, gt=0)
    token_timeout: int = Field(default=120, gt=0)


class Service(_Strict):
    """An SGLang server as a systemd unit, in a container or on the host itself."""

    pool: Name
    container: VmId | None = None
    unit: str = Field(default="", pattern=r"^([A-Za-z0-9@_.-]+\.service)?$", description="default: NAME.service")
    description: str = ""
    command: tuple[str, ...] = ("/usr/bin/python3", "-m", "sglang.launch_server")
    working_directory: str | None = None
    user: str | None = None
    model: Model
    port: Port = 30000
    address: str = Field(default="0.0.0.0", description="what --host gets")  # noqa: S104  SGLang's own choice of bind
    parallelism: Parallelism = Parallelism()
    arguments: dict[str, ArgumentValue] = Field(
        default={}, description="SGLang flags without --; true for a bare flag, a list for several values"
    )
    environment: dict[EnvironmentName, str] = {}
    environment_files: tuple[str, ...] = ()
    enabled: bool = Field(default=True, description="started with its container")
    readiness: Readiness = Readiness()
    canonical_unit: str = Field(description="the workstation's copy of the unit, kept equal to the deployed one")


class Topology(_Strict):
    """The whole of one hypervisor."""

    version: Literal["v1"]
    host: Host
    proxmox: Proxmox | None = None
    pools: dict[Name, Pool] = Field(min_length=1)
    containers: dict[VmId, Container] = {}
    vms: dict[VmId, Vm] = {}
    services: dict[Name, Service] = {}
