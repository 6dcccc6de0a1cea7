"""What was seen on a host, as the agent reports it (format v1), parsed at the edge."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from topology.address import PciAddress


class _Facts(BaseModel):
    """Frozen; unknown keys are ignored, so that a newer agent's facts still load."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class HostFacts(_Facts):
    """The machine: its name, kernel and kernel command line, and whether the agent's file is there for commands."""

    hostname: str
    kernel: str
    boot_id: str
    cmdline: str
    pve_version: str | None = None
    agent_installed: bool = True  # with its boot unit


class NvidiaFacts(_Facts):
    """The nvidia driver: version, persistence daemon's state, majors of /proc/devices."""

    version: str | None = None
    persistenced: Literal["active", "inactive", "absent"] = "absent"
    uvm_major: int | None = None
    caps_major: int | None = None


class DeviceFacts(_Facts):
    """One PCI function; `numa_node` -1 is unknown, `bars` are bytes, `minor` is N of /dev/nvidiaN."""

    address: PciAddress
    vendor: str
    device: str
    subsystem_vendor: str
    subsystem_device: str
    pci_class: str = Field(alias="class", description="six hexadecimal digits, as sysfs has them without 0x")
    numa_node: int
    driver: str | None
    driver_override: str | None
    persisted: str | None
    iommu_group: int | None
    iommu_type: str | None
    boot_vga: bool
    alive: bool
    sriov_vfs: int
    mig: bool | None
    bars: tuple[int, ...]
    minor: int | None
    name: str | None
    memory_mib: int | None
    uuid: str | None = None

    @property
    def pci_id(self) -> str:
        """`vendor:device`, as lspci prints."""
        return f"{self.vendor}:{self.device}"

    @property
    def subsystem_id(self) -> str:
        """`vendor:device` of the subsystem, as a PCI mapping holds it."""
        return f"{self.subsystem_vendor}:{self.subsystem_device}"


class MappingEntryFacts(_Facts):
    """One device of a PCI mapping, as /etc/pve/mapping/pci.cfg holds it."""

    node: str
    path: str
    id: str
    subsystem_id: str | None = None
    iommu_group: int | None = None


class MappingFacts(_Facts):
    """A PCI mapping."""

    id: str
    description: str | None = None
    entries: tuple[MappingEntryFacts, ...] = ()


class ContainerFacts(_Facts):
    """An LXC container: state and configuration file."""

    vmid: int
    exists: bool
    status: str | None = None
    config: str | None = None
    unprivileged: bool = False


class VmFacts(_Facts):
    """A virtual machine: state and configuration file."""

    vmid: int
    exists: bool
    status: str | None = None
    config: str | None = None


class ProcessFacts(_Facts):
    """A service's main process: arguments (secrets masked), allow-listed environment, start time in ISO format."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    started: str


class ServiceFacts(_Facts):
    """A systemd unit as deployed and as it runs."""

    name: str
    unit: str
    container: int | None
    exists: bool
    text: str | None = None
    path: str | None = None
    drop_ins: dict[str, str] = {}
    environment_files: dict[str, dict[str, str]] = {}
    enabled: bool | None = None
    active: str = "inactive"
    need_reload: bool = False
    main_pid: int | None = None
    process: ProcessFacts | None = None
    nccl_conf: dict[str, str] = {}


class LedgerDevice(_Facts):
    """Which pool owns a device by the host's own book."""

    pool: str
    driver: str


class LedgerService(_Facts):
    """A service by its unit and container, None for the host itself."""

    unit: str
    container: int | None


class LedgerManaged(_Facts):
    """What the host's own book lets a drain stop."""

    services: tuple[LedgerService, ...] = ()
    vms: tuple[int, ...] = ()
    containers: tuple[int, ...] = ()


class LedgerFacts(_Facts):
    """The host's own book: owners, revisions of what was applied, what is managed, what was drained and not started."""

    version: str = "v1"
    sequence: int = 0
    devices: dict[PciAddress, LedgerDevice] = {}
    revisions: dict[str, str] = {}
    managed: LedgerManaged = LedgerManaged()
    drained: tuple[dict[str, str | int | None], ...] = ()


class Facts(_Facts):
    """A host at one moment."""

    version: Literal["v1"]
    host: HostFacts
    numa_nodes: tuple[int, ...]
    snp: bool | None
    nvidia: NvidiaFacts = NvidiaFacts()
    vfio_ids: tuple[str, ...] = ()
    devices: tuple[DeviceFacts, ...]
    missing: tuple[PciAddress, ...] = ()
    mappings: tuple[MappingFacts, ...] = ()
    containers: tuple[ContainerFacts, ...] = ()
    vms: tuple[VmFacts, ...] = ()
    services: tuple[ServiceFacts, ...] = ()
    ledger: LedgerFacts = LedgerFacts()
    errors: tuple[str, ...] = ()

    def device(self, address: PciAddress) -> DeviceFacts | None:
        """The function at `address`, if the host has it."""
        return next((d for d in self.devices if d.address == address), None)

    def container(self, vmid: int) -> ContainerFacts | None:
        """The container, if the host knows its VMID."""
        return next((c for c in self.containers if c.vmid == vmid and c.exists), None)

    def vm(self, vmid: int) -> VmFacts | None:
        """The virtual machine, if the host knows its VMID."""
        return next((v for v in self.vms if v.vmid == vmid and v.exists), None)

    def service(self, name: str) -> ServiceFacts | None:
        """The service by its name in the configuration, if its unit exists."""
        return next((s for s in self.services if s.name == name and s.exists), None)
