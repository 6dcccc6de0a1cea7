"""Whether what was found means what is wanted; each difference is a change, and none is adoption as found."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from topology.changes import ABSENT, Change, listed, shown
from topology.flags import Flags, same_value, split_command
from topology.unit import VARIABLE, parse_unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from topology.facts import Facts, MappingFacts, ProcessFacts, ServiceFacts, VmFacts
    from topology.spec import MappingEntry, MappingSpec
    from topology.unit import Unit

_VISIBLE = re.compile(r"(NCCL|CUDA|SGLANG|OMP|PYTORCH|SAFETENSORS|NVIDIA|HIP|TORCH|MKL)_")
_HIDDEN = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
"""Of a process's environment the agent reports the visible names that are not hidden."""

_PARALLELISM = {"tp", "pp", "dp"}
_INSTALLING = ("Alias", "RequiredBy", "UpheldBy", "WantedBy")
"""Directives of [Install] (systemd.unit(5)) that make `systemctl enable` do something."""
_HOSTPCI = re.compile(r"(hostpci\d+):\s*(.*?)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedUnit:
    """What a service's unit must mean. `numa_node` is where all its GPUs sit, None where that says nothing."""

    service: str
    command: tuple[str, ...]
    flags: Flags
    environment: dict[str, str]
    environment_files: tuple[str, ...]
    working_directory: str | None
    user: str | None
    numa_node: int | None
    to_be_enabled: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlay:
    """What a host lays over a unit: drop-ins (path -> text), environment files' variables, /etc/nccl.conf."""

    drop_ins: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    nccl_conf: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: ServiceFacts | None) -> Overlay:
        """The overlay that a host has for a service."""
        if found is None:
            return cls()
        return cls(drop_ins=found.drop_ins, files=found.environment_files, nccl_conf=found.nccl_conf)


def unit_changes(text: str, wanted: WantedUnit, overlay: Overlay) -> tuple[Change, ...]:
    """What must differ for the unit `text`, under what the host lays over it, to mean what is wanted.

    Empty if it does. A directive of which the configuration does not speak, such as TimeoutStartSec, never differs;
    nor does a variable that only a drop-in or an environment file sets, since the unit can't take it away.
    """
    subject = f"service {wanted.service}"
    own, unit = parse_unit(text), parse_unit(text, overlay.drop_ins)
    environment = {**overlay.nccl_conf, **unit.process_environment(overlay.files)}
    # A command that only a drop-in sets is written into the unit, which must say by itself what runs.
    commands = [one.commands(overlay.files) for one in (unit, own)]
    changes = list(dict.fromkeys(c for one in commands for c in _command_changes(subject, one, wanted, overlay)))
    changes += _environment_changes(subject, environment, wanted.environment)
    changes += [
        Change(subject, f"environment {name}", shown(name, value), ABSENT)
        for name, value in sorted(own.environment.items())
        if name not in wanted.environment and name in unit.environment
    ]
    changes += _directive_changes(subject, unit, wanted)
    return tuple(changes)


def process_changes(process: ProcessFacts, wanted: WantedUnit, overlay: Overlay) -> tuple[Change, ...]:
    """How a running process differs from what its unit would start now, as far as the agent may see it.

    Behind a wrapper script, which may add flags of its own, only the parallelism is compared.
    """
    subject = f"service {wanted.service} (running)"
    command, flags = split_command(process.argv)
    due = _expanded(wanted, overlay)
    if command != wanted.command:
        flags = {name: value for name, value in flags.items() if name in _PARALLELISM}
        due = {name: value for name, value in due.items() if name in flags}
    visible = {name: value for name, value in wanted.environment.items() if _VISIBLE.match(name)}
    visible = {name: value for name, value in visible.items() if not _HIDDEN.search(name)}
    return (
        *_flag_changes(subject, flags, due),
        *_environment_changes(subject, {**overlay.nccl_conf, **process.environment}, visible),
    )


def _command_changes(
    subject: str, commands: tuple[tuple[str, ...], ...], wanted: WantedUnit, overlay: Overlay
) -> Iterator[Change]:
    if len(commands) != 1:
        before = f"{len(commands)} commands" if commands else ABSENT
        yield Change(subject, "ExecStart", before, shlex.join(wanted.command))
        return
    command, flags = split_command(commands[0])
    if command != wanted.command:
        yield Change(subject, "command", shlex.join(command), shlex.join(wanted.command))
    yield from _flag_changes(subject, flags, _expanded(wanted, overlay))


def _expanded(wanted: WantedUnit, overlay: Overlay) -> Flags:
    """The wanted flags with variables put in that are known, as systemd does when it starts the command."""
    known = dict(wanted.environment)
    for path in wanted.environment_files:
        known |= overlay.files.get(path.removeprefix("-"), {})
    return {
        name: tuple(VARIABLE.sub(lambda match: known.get(match[1], match[0]), word) for word in words)
        for name, words in wanted.flags.items()
    }


def _flag_changes(subject: str, found: Flags, wanted: Flags) -> Iterator[Change]:
    for name in sorted({*found, *wanted}):
        before, after = found.get(name), wanted.get(name)
        if before is None or after is None or not same_value(before, after):
            what = name if name == "tp" else f"--{name}"
            yield Change(subject, what, _shown_flag(name, before), _shown_flag(name, after))


def _shown_flag(name: str, value: tuple[str, ...] | None) -> str:
    return shown(name, None if value is None else " ".join(value) or "set")


def _environment_changes(subject: str, found: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[Change]:
    for name, value in sorted(wanted.items()):
        if found.get(name) != value:
            yield Change(subject, f"environment {name}", shown(name, found.get(name)), shown(name, value))


def _directive_changes(subject: str, unit: Unit, wanted: WantedUnit) -> Iterator[Change]:
    before = [file.path for file in unit.environment_files]
    after = [path.removeprefix("-") for path in wanted.environment_files]
    if before != after:
        yield Change(subject, "environment files", listed(before), listed(after))
    for key, value, default in (
        ("WorkingDirectory", wanted.working_directory, ABSENT),
        ("User", wanted.user, "root"),
    ):
        found = unit.value("Service", key) or default
        if value is not None and found != value:
            yield Change(subject, key, found, value)
    if wanted.to_be_enabled and not any(unit.values("Install", key) for key in _INSTALLING):
        # A unit without any of them can't be enabled.
        yield Change(subject, "[Install]", ABSENT, "WantedBy=multi-user.target")
    mask = unit.value("Service", "NUMAMask")
    if mask is not None and mask != str(wanted.numa_node):
        yield Change(subject, "NUMA node", mask, ABSENT if wanted.numa_node is None else str(wanted.numa_node))


def hostpci(config: str) -> dict[str, dict[str, str]]:
    """A VM's hostpci entries (`hostpci0` -> options by name) as they are now, without snapshots and pending changes."""
    found: dict[str, dict[str, str]] = {}
    for line in config.splitlines():
        if line.startswith("["):
            break
        if match := _HOSTPCI.fullmatch(line):
            first, *rest = match[2].split(",")
            named = [first if "=" in first else f"host={first}", *rest]
            found[match[1]] = dict(_pair(part) for part in named)
    return found


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def mapped_hostpci_count(vm: VmFacts, mapping: str) -> int:
    """How many of the VM's hostpci entries use a mapping; each takes one of its devices."""
    return sum(entry.get("mapping") == mapping for entry in hostpci(vm.config or "").values())


def hostpci_changes(vm: VmFacts, mapping: MappingSpec, facts: Facts) -> tuple[Change, ...]:
    """What must differ for the VM to have exactly the mapping's devices; entries of other devices are not looked at."""
    subject, count = f"vm {vm.vmid}", len(mapping.entries)
    gpus = {d.address.slot for d in facts.devices if d.pci_class.startswith("03")}
    entries = hostpci(vm.config or "").values()
    ours = [entry for entry in entries if entry.get("mapping") == mapping.name]
    foreign = [e for e in entries if e.get("mapping") != mapping.name and _slots(e, facts) & gpus]
    changes: list[Change] = []
    if len(ours) != count:
        changes.append(Change(subject, "GPUs", str(len(ours)), f"{count} through mapping {mapping.name}"))
    if foreign:
        named = [e.get("mapping") or e.get("host", "") for e in foreign]
        changes.append(Change(subject, "other GPU entries", listed(named), "none"))
    # As aleph-im/aleph-vm#1198 found for several cards in one SEV-SNP guest: on PCI Express ports, without ROM BARs.
    if any(entry.get("pcie", "0") != "1" or entry.get("rombar", "1") != "0" for entry in ours):
        changes.append(Change(subject, "hostpci options", "others", "pcie=1,rombar=0"))
    return tuple(changes)


def _slots(entry: Mapping[str, str], facts: Facts) -> set[str]:
    """The slots an entry may take, with their domain."""
    if name := entry.get("mapping"):
        paths = [e.path for mapping in facts.mappings if mapping.id == name for e in mapping.entries]
    else:
        paths = entry.get("host", "").split(";")
    return {_slot(path) for path in paths if path}


def _slot(path: str) -> str:
    full = path.lower() if path.count(":") > 1 else f"0000:{path.lower()}"
    return full.split(".", maxsplit=1)[0]


def vm_devices(vm: VmFacts, facts: Facts) -> set[str]:
    """The slots of all devices that the VM's entries may take."""
    return {slot for entry in hostpci(vm.config or "").values() for slot in _slots(entry, facts)}


def same_devices(found: MappingFacts, wanted: MappingSpec) -> bool:
    """Whether a mapping has, of its node, exactly the wanted devices, whatever it says of them."""
    return {_slot(e.path) for e in found.entries if e.node == wanted.node} == {_slot(e.path) for e in wanted.entries}


def mapping_changes(found: MappingFacts | None, wanted: MappingSpec) -> tuple[Change, ...]:
    """What must differ for the mapping to say, of this node, exactly what sysfs says."""
    subject = f"mapping {wanted.name}"
    before = {_slot(e.path): e for e in (found.entries if found else ()) if e.node == wanted.node}
    after = {_slot(e.path): e for e in wanted.entries}
    if before.keys() != after.keys():
        return (Change(subject, "devices", _short(before) if found else ABSENT, _short(after)),)
    changes = []
    for slot, entry in after.items():
        have = before[slot]
        was, now = _facts_of(have.id, have.subsystem_id, have.iommu_group), _entry_facts(entry)
        if was != now:
            changes.append(Change(subject, slot.removeprefix("0000:"), was, now))
    return tuple(changes)


def _entry_facts(entry: MappingEntry) -> str:
    return _facts_of(entry.id, entry.subsystem_id, entry.iommu_group)


def _facts_of(pci_id: str, subsystem_id: str | None, iommu_group: int | None) -> str:
    return f"{pci_id}/{subsystem_id or 'no subsystem'}/group {iommu_group}"


def _short(slots: Mapping[str, object]) -> str:
    return listed(slot.removeprefix("0000:") for slot in slots)
