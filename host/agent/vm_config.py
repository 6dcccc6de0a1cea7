"""A VM's hostpci entries: parsing, meaning, and which devices they refer to. No commands here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .pci import Address, slot_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .root import Root

MAPPINGS = "/etc/pve/mapping/pci.cfg"
MOST_ENTRIES = 16


def main_section(text: str) -> str:
    """A guest configuration without its pending changes and snapshots."""
    return re.split(r"^\[", text, maxsplit=1, flags=re.MULTILINE)[0]


def hostpci(text: str) -> dict[str, str]:
    """Each hostpciN's value of a VM's configuration, in the order of N."""
    found = re.findall(r"^(hostpci\d+):[ \t]*(.*?)[ \t]*$", main_section(text), re.MULTILINE)
    return dict(sorted(found, key=lambda item: int(item[0].removeprefix("hostpci"))))


def options(value: str) -> dict[str, str]:
    """An entry's options by name; PVE's short form without a name is `host=`."""
    first, *rest = value.split(",")
    named = [first if "=" in first else f"host={first}", *rest]
    return dict(part.split("=", 1) for part in named if "=" in part)


def same_meaning(one: str, other: str) -> bool:
    """Whether two entries ask for the same: order and PVE's defaults (pcie 0, rombar 1) aside."""
    defaults = {"pcie": "0", "rombar": "1"}
    return defaults | options(one) == defaults | options(other)


def mappings(text: str) -> dict[str, list[dict[str, str]]]:
    """Mapping name → its entries, of /etc/pve/mapping/pci.cfg."""
    found: dict[str, list[dict[str, str]]] = {}
    entries: list[dict[str, str]] = []
    for line in text.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            entries = found.setdefault(line.split()[-1], [])
        elif (words := line.split(None, 1)) and words[0] == "map" and len(words) > 1:
            entries.append(dict(part.split("=", 1) for part in words[1].split(",") if "=" in part))
    return found


def descriptions(text: str) -> dict[str, str]:
    """Mapping name → its description."""
    return dict(re.findall(r"^(\S+)[ \t]*\n(?:[ \t]+\S.*\n)*?[ \t]+description[ \t]+(.*)$", text + "\n", re.MULTILINE))


def paths_of(value: str, root: Root) -> list[str]:
    """PCI addresses or slots that an entry may take: of its mapping (alternatives) or of its `host=`."""
    asked = options(value)
    if name := asked.get("mapping"):
        entries = mappings(root.text(MAPPINGS) or "").get(name, [])
        return [path for entry in entries for path in entry.get("path", "").split(";") if path]
    return [_canonical(path) for path in asked.get("host", "").split(";") if path]


def refers_to(text: str, devices: Iterable[Address], root: Root) -> tuple[Address, ...]:
    """Which of the devices a VM's configuration refers to."""
    paths = {path for value in hostpci(text).values() for path in paths_of(value, root)}
    return tuple(device for device in devices if device in paths or slot_of(device) in paths)


def _canonical(path: str) -> str:
    """`81:00.0` and `81:00` with their domain: PVE lets both be left out."""
    return (path if path.count(":") > 1 else f"0000:{path}").lower()
