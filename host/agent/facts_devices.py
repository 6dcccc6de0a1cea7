"""Facts of the host and its PCI devices, without ever waiting for a device that hangs."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import TYPE_CHECKING

from .boot_unit import is_installed
from .pci import NVIDIA, Address, Pci, parse_address, slot_of
from .result import BadRequestError, Json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .root import Root
    from .system import Completed, System

GPU_FIELDS = ("pci.bus_id", "name", "uuid", "memory.total", "mig.mode.current")
GPU_QUERY = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
PERSISTENCED = ("systemctl", "show", "nvidia-persistenced.service", "-p", "LoadState,ActiveState")
ATTRIBUTE_LIMIT = 1.5

Object = dict[str, Json]


def host_facts(root: Root, pveversion: Completed | None) -> Object:
    """Who the host is and how it booted."""
    version = re.match(r"pve-manager/([^/\s]+)", pveversion.out) if pveversion and pveversion.ok else None
    return {
        "hostname": root.word("/proc/sys/kernel/hostname") or root.word("/etc/hostname") or os.uname().nodename,
        "kernel": root.word("/proc/sys/kernel/osrelease") or os.uname().release,
        "boot_id": root.word("/proc/sys/kernel/random/boot_id"),
        "cmdline": root.word("/proc/cmdline") or "",
        "pve_version": version.group(1) if version else None,
        "agent_installed": is_installed(root),
    }


def numa_nodes(root: Root) -> list[Json]:
    """The numbers of the host's NUMA nodes."""
    names = root.names("/sys/devices/system/node")
    return sorted(int(name[4:]) for name in names if re.fullmatch(r"node\d+", name))  # type: ignore[return-value]


def snp(root: Root) -> bool | None:
    """Whether KVM has SEV-SNP on; None where the module doesn't say."""
    word = root.word("/sys/module/kvm_amd/parameters/sev_snp")
    return None if word is None else word in ("Y", "y", "1")


def majors(root: Root) -> dict[str, int]:
    """Character device majors of the NVIDIA drivers by name: all but nvidia's own are dynamic."""
    section = (root.text("/proc/devices") or "").partition("Block devices:")[0]
    return {name: int(number) for number, name in re.findall(r"^\s*(\d+)\s+(nvidia\S*)", section, re.MULTILINE)}


def nvidia_facts(root: Root, persistenced: Completed | None) -> Object:
    """The driver's version, its persistence daemon, and its dynamic majors."""
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", root.text("/proc/driver/nvidia/version") or "")
    shown = properties(persistenced.out) if persistenced and persistenced.ok else {}
    absent = shown.get("LoadState", "not-found") == "not-found"
    active = shown.get("ActiveState") in ("active", "activating", "reloading")
    numbers = majors(root)
    return {
        "version": version.group(1) if version else None,
        "persistenced": "absent" if absent else "active" if active else "inactive",
        "uvm_major": numbers.get("nvidia-uvm"),
        "caps_major": numbers.get("nvidia-caps"),
    }


def properties(text: str) -> dict[str, str]:
    """`systemctl show`'s lines as names and values; a name with several lines (EnvironmentFiles) has them joined."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found[name] = f"{found[name]} {value}" if name in found else value
    return found


def vfio_ids(root: Root) -> list[Json]:
    """Ids that vfio-pci claims at boot by `ids=`, in modprobe's files and on the kernel command line."""
    found: list[str] = []
    for name in root.names("/etc/modprobe.d"):
        text = root.text(f"/etc/modprobe.d/{name}") or "" if name.endswith(".conf") else ""
        found += re.findall(r"^\s*options\s+vfio[-_]pci\s+(?:\S+\s+)*?ids=(\S+)", text, re.MULTILINE)
    found += re.findall(r"(?:^|\s)vfio[-_]pci\.ids=(\S+)", root.text("/proc/cmdline") or "")
    return list(dict.fromkeys(one.lower() for ids in found for one in ids.split(",") if one))


def relevant(pci: Pci, asked: Iterable[Address]) -> list[Address]:
    """Display controllers, what shares a slot or an IOMMU group with one, and what was asked for."""
    everything = pci.all()
    displays = [address for address in everything if pci.is_display(address)]
    slots = {slot_of(address) for address in displays}
    groups = {group for address in displays if (group := pci.group(address)) is not None}
    wanted = set(asked)
    return [one for one in everything if one in wanted or slot_of(one) in slots or pci.group(one) in groups]


def gpu_table(done: Completed) -> dict[Address, dict[str, str]]:
    """nvidia-smi's answers by address."""
    table: dict[Address, dict[str, str]] = {}
    for line in done.out.splitlines() if done.ok else ():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(GPU_FIELDS):
            domain, _, rest = values[0].partition(":")
            try:
                table[parse_address(f"{domain[-4:]}:{rest}")] = dict(zip(GPU_FIELDS, values, strict=True))
            except BadRequestError:
                continue
    return table


def device_facts(
    system: System, addresses: list[Address], gpus: dict[Address, dict[str, str]], errors: list[Json]
) -> list[Json]:
    """Every device's facts; attributes that hang are null, and named in `errors`."""
    pci = Pci(system.root)
    slow = system.read_apart({one: partial(_slow, pci, one) for one in addresses}, ATTRIBUTE_LIMIT)
    facts: list[Json] = []
    for address in addresses:
        late = slow.get(address)
        if not isinstance(late, dict):
            errors.append(
                f"{address} did not let its driver_override, configuration or minor be read within "
                f"{ATTRIBUTE_LIMIT} s: a removal of this device probably hangs in the kernel (see `dmesg`)"
            )
            late = {"driver_override": None, "alive": False, "minor": None, "link": None}
        facts.append({**_quick(pci, address), **late, **_from_driver(gpus.get(address, {}))})
    return facts


def _quick(pci: Pci, address: Address) -> Object:
    """What no hanging driver can block."""
    group = pci.group(address)
    numa = pci.number(address, "numa_node")
    return {
        "address": address,
        "vendor": pci.identity(address, "vendor"),
        "device": pci.identity(address, "device"),
        "subsystem_vendor": pci.identity(address, "subsystem_vendor"),
        "subsystem_device": pci.identity(address, "subsystem_device"),
        "class": pci.device_class(address),
        "numa_node": -1 if numa is None else numa,
        "driver": pci.driver(address),
        "persisted": pci.persisted(address),
        "iommu_group": group,
        "iommu_type": None if group is None else pci.root.word(f"/sys/kernel/iommu_groups/{group}/type"),
        "boot_vga": pci.number(address, "boot_vga") == 1,
        "sriov_vfs": pci.number(address, "sriov_numvfs") or 0,
        "bars": pci.bars(address),
    }


def _slow(pci: Pci, address: Address) -> Object:
    """What waits for the device or its driver."""
    speed, width = pci.attribute(address, "current_link_speed"), pci.attribute(address, "current_link_width")
    return {
        "driver_override": pci.override(address),
        "alive": pci.alive(address),
        "minor": pci.minor(address) if pci.driver(address) == NVIDIA else None,
        "link": {"speed": speed, "width": width} if speed and width else None,
    }


def _from_driver(gpu: dict[str, str]) -> Object:
    """What only the NVIDIA driver knows of a card."""
    memory, mig = gpu.get("memory.total", ""), gpu.get("mig.mode.current")
    return {
        "mig": None if mig in (None, "[N/A]", "N/A", "[Not Supported]") else mig == "Enabled",
        "name": gpu.get("name"),
        "memory_mib": int(memory) if memory.isdigit() else None,
        "uuid": gpu.get("uuid"),
    }
