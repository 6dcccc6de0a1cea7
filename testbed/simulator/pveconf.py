"""Proxmox's own files, guest configurations and PCI mappings, and what its tools make of the mappings at a start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

PENDING = {"lxc": "pve:pending", "qemu": "PENDING"}
_SECTION = re.compile(r"^\[([^\]]+)\]\s*$")
_LINE = re.compile(r"^([a-z][\w.]*)\s*[:=]\s*(.*?)\s*$")
_NUMBERED = re.compile(r"^(\D+)(\d+)$")


class GuestError(Exception):
    """pct's or qm's message for what cannot be done with a guest."""


@dataclass
class GuestConfig:
    """A guest's configuration file; the section named "" is the current configuration."""

    kind: str
    sections: dict[str, list[str]]

    @classmethod
    def parse(cls, text: str, kind: str) -> GuestConfig:
        """Split a file's text into sections of lines."""
        sections: dict[str, list[str]] = {"": []}
        current = ""
        for line in text.splitlines():
            header = _SECTION.match(line)
            if header:
                current = header[1]
                sections[current] = []
            else:
                sections[current].append(line)
        return cls(kind, sections)

    def text(self) -> str:
        """The file's text, an empty line before each further section."""
        parts = []
        for name, lines in self.sections.items():
            body = "\n".join(lines).strip("\n")
            if name and not body and name == PENDING[self.kind]:
                continue
            parts.append(f"[{name}]\n{body}" if name else body)
        return "\n\n".join(parts) + "\n"

    def items(self, section: str = "") -> list[tuple[str, str]]:
        """The keys and values of a section in order; keys such as lxc.mount.entry repeat."""
        matches = (_LINE.match(line) for line in self.sections.get(section, ()))
        return [(m[1], m[2]) for m in matches if m]

    def get(self, key: str, default: str = "") -> str:
        """The current value of a key."""
        return next((v for k, v in self.items() if k == key), default)

    def effective(self) -> list[tuple[str, str]]:
        """The keys and values as they will be once pending changes are applied."""
        changes = self.pending
        kept = [(k, changes.pop(k, v)) for k, v in self.items()]
        return [(k, v) for k, v in kept + list(changes.items()) if v is not None]

    def change(self, values: dict[str, str], delete: set[str]) -> None:
        """Set and delete keys of the current configuration, each in its place."""
        lines = self.sections[""]
        rest = dict(values)
        for number, line in enumerate(list(lines)):
            match = _LINE.match(line)
            if match and match[1] in rest:
                lines[number] = f"{match[1]}: {rest.pop(match[1])}"
        self.sections[""] = [x for x in lines if not ((m := _LINE.match(x)) and m[1] in delete)]
        for key, value in rest.items():
            self._insert(f"{key}: {value}")

    @property
    def pending(self) -> dict[str, str | None]:
        """The pending changes; None deletes a key."""
        changes: dict[str, str | None] = dict(self.items(PENDING[self.kind]))
        deleted = changes.pop("delete", None) or ""
        return changes | dict.fromkeys(_names(deleted))

    @pending.setter
    def pending(self, changes: dict[str, str | None]) -> None:
        name = PENDING[self.kind]
        ordered = sorted(changes, key=_natural)
        lines = [f"{key}: {changes[key]}" for key in ordered if changes[key] is not None]
        deleted = [key for key in ordered if changes[key] is None]
        if deleted:
            lines.append(f"delete: {','.join(deleted)}")
        rest = {k: v for k, v in self.sections.items() if k not in ("", name)}
        self.sections = {"": self.sections[""], **({name: lines} if lines else {}), **rest}

    def postpone(self, values: dict[str, str], delete: set[str]) -> None:
        """Set and delete keys at the next start: devices are not hot-plugged, so Proxmox keeps them pending."""
        kept = {k: v for k, v in self.pending.items() if k not in values and k not in delete}
        wanted = {k: v for k, v in values.items() if self.get(k) != v}
        self.pending = kept | wanted | dict.fromkeys(k for k in delete if self.get(k))

    def apply_pending(self) -> bool:
        """Move pending changes into the current configuration, as a start does; gives whether there were any."""
        changes = self.pending
        self.pending = {}
        self.change({k: v for k, v in changes.items() if v is not None}, {k for k, v in changes.items() if v is None})
        return bool(changes)

    def _insert(self, line: str) -> None:
        """Put a new key where Proxmox would: by name, before raw lxc lines and after the description."""
        lines = self.sections[""]
        for number, other in enumerate(lines):
            if other.startswith("#") or not other.strip():
                continue
            if other.startswith("lxc.") or _natural(other.split(":")[0]) > _natural(line.split(":", maxsplit=1)[0]):
                lines.insert(number, line)
                return
        while lines and not lines[-1].strip():
            lines.pop()
        lines.append(line)


@dataclass(frozen=True)
class Mapping:
    """A PCI mapping: its entries are dictionaries of id, iommugroup, node, path and subsystem-id."""

    name: str
    entries: tuple[dict[str, str], ...] = ()
    options: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> str:
        """The entries' paths, joined."""
        return ",".join(entry.get("path", "") for entry in self.entries)


def parse_mappings(text: str) -> dict[str, Mapping]:
    """Parse /etc/pve/mapping/pci.cfg."""
    found: dict[str, Mapping] = {}
    name = ""
    for line in text.splitlines():
        if line.strip() and not line[0].isspace():
            name = line.strip()
            found[name] = Mapping(name)
        elif line.strip() and name:
            key, _, value = line.strip().partition(" ")
            mapping = found[name]
            if key == "map":
                found[name] = Mapping(name, (*mapping.entries, properties(value)), mapping.options)
            else:
                found[name] = Mapping(name, mapping.entries, {**mapping.options, key: value})
    return found


def format_mappings(mappings: dict[str, Mapping]) -> str:
    """Format /etc/pve/mapping/pci.cfg as Proxmox does."""
    parts = []
    for name, mapping in sorted(mappings.items()):
        lines = [name, *(f"\t{k} {v}" for k, v in mapping.options.items())]
        lines += [f"\tmap {join_properties(entry)}" for entry in mapping.entries]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def entries_on(mappings: dict[str, Mapping], name: str, node: str) -> list[dict[str, str]]:
    """The entries of a mapping on a node.

    Raises:
        GuestError: there is none.
    """
    mapping = mappings.get(name, Mapping(name))
    found = [entry for entry in mapping.entries if entry.get("node") == node]
    if not found:
        raise GuestError(f"PCI device mapping not found for '{name}'")
    return found


def check_entry(name: str, entry: dict[str, str], live: dict[str, str] | None) -> None:
    """Compare a mapping's entry with the device, as Proxmox does before a start (PVE/Mapping/PCI.pm, assert_valid).

    `live` holds the device's id, iommugroup and subsystem-id, without those that it does not have; None for no device.

    Raises:
        GuestError: they differ.
    """
    path = first_function(entry["path"])
    invalid = "PCI device mapping invalid (hardware probably changed):"
    if live is None:
        raise GuestError(f"{invalid} pci device '{path}' not found")
    for key in ("id", "iommugroup", "subsystem-id"):
        expected, configured = live.get(key), entry.get(key)
        if configured is None and expected is not None:
            raise GuestError(f"{invalid} missing expected property '{key}' for device '{path}'")
        if expected is None and configured is not None:
            raise GuestError(f"{invalid} unexpected property '{key}' configured for device '{path}'")
        if expected != configured:
            raise GuestError(f"{invalid} '{key}' does not match for '{name}' ({expected} != {configured})")


def first_function(path: str) -> str:
    """The function that stands for a whole slot, which is named without one."""
    return path if "." in path else f"{path}.0"


def choose_devices(wanted: list[tuple[str, list[list[str]]]], users: dict[str, int]) -> list[str]:
    """Pick the first free alternative for every hostpci entry (PVE/QemuServer/PCI.pm, choose_hostpci_devices).

    Args:
        wanted: each entry's key and its alternatives, each a device by the addresses of its functions.
        users: the VM that has a function, by address.

    Raises:
        GuestError: an entry's devices are all taken.
    """
    chosen: list[str] = []
    for key, alternatives in wanted:
        free = next((a for a in alternatives if not {*chosen, *users} & {*a}), None)
        if free is None and len(alternatives) > 1:
            raise GuestError(f"could not find a free device for '{key}'")
        if free is None:
            taken = next(address for address in alternatives[0] if address in {*chosen, *users})
            if taken in chosen:
                raise GuestError(f"device '{taken}' assigned more than once")
            raise GuestError(f"PCI device '{taken}' already in use by VMID '{users[taken]}'")
        chosen += free
    return chosen


def properties(text: str, default_key: str = "") -> dict[str, str]:
    """Parse `key=value,…`; a part without a key belongs to `default_key`."""
    pairs = (part.partition("=") for part in text.split(",") if part)
    return {(k if eq else default_key): (v if eq else k) for k, eq, v in pairs}


def join_properties(values: dict[str, str]) -> str:
    """Format `key=value,…`, keys sorted."""
    return ",".join(f"{k}={v}" for k, v in sorted(values.items()))


def _names(text: str) -> list[str]:
    return [name for name in re.split(r"[\s,;]+", text) if name]


def _natural(key: str) -> tuple[str, int]:
    match = _NUMBERED.match(key)
    return (match[1], int(match[2])) if match else (key, -1)
