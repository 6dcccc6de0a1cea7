"""How the inputs of `VmLegacy` and the keys of a VM's configuration translate, for those that are one value each.

Defaults are those of bpg/terraform-provider-proxmox; what a missing key means is Proxmox's (qemu-server).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.engine.plugins.proxmoxve.propstring import flag, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from testbed.engine.plugins._wire import Props, Value


@dataclass(frozen=True)
class Field:
    """One input that is one key: its default as an input, and what the key's absence means."""

    key: str
    default: Value
    absent: Value
    always: bool = False  # written even where absence would mean the same to the provider

    def writes(self, value: Value) -> bool:
        """Whether the key is written for this value."""
        return self.always or value != self.absent

    def read(self, config: Mapping[str, Any]) -> Value:
        """The value in a VM's configuration."""
        found = config.get(self.key)
        if found is None:
            return self.absent
        if isinstance(self.absent, bool):
            return flag(found)
        if isinstance(self.absent, int):
            number = float(found)
            return int(number) if number.is_integer() else number
        return str(found)


def _field(key: str, default: Value, absent: Value = None, *, always: bool = False) -> Field:
    return Field(key, default, default if absent is None else absent, always)


Block = dict[str, Field]

TOP: Block = {
    "bios": _field("bios", "seabios"),
    "description": _field("description", ""),
    "kvmArguments": _field("args", ""),
    "machine": _field("machine", ""),
    "name": _field("name", ""),
    "onBoot": _field("onboot", True, absent=False),
    "protection": _field("protection", False),
    "scsiHardware": _field("scsihw", "virtio-scsi-pci", absent="lsi"),
}

BLOCKS: dict[str, Block] = {
    "cpu": {
        "affinity": _field("affinity", ""),
        "cores": _field("cores", 1),
        "hotplugged": _field("vcpus", 0),
        "limit": _field("cpulimit", 0),
        "numa": _field("numa", False),
        "sockets": _field("sockets", 1),
        "units": _field("cpuunits", 1024),
    },
    "memory": {
        "dedicated": _field("memory", 512),
        "floating": _field("balloon", 0, always=True),
        "hugepages": _field("hugepages", ""),
        "keepHugepages": _field("keephugepages", False),
    },
    "operatingSystem": {"type": _field("ostype", "other")},
}


def defaults(block: Block) -> Props:
    """The values of inputs that are not given."""
    return {name: field.default for name, field in block.items()}


def write(block: Block, values: Props) -> dict[str, str]:
    """The keys for a block's values; a value that absence means is left out."""
    given = ((field, values.get(name)) for name, field in block.items())
    return {field.key: text(value) for field, value in given if value is not None and field.writes(value)}


def read(block: Block, config: Mapping[str, Any]) -> Props:
    """The values of a block in a VM's configuration."""
    return {name: field.read(config) for name, field in block.items()}
