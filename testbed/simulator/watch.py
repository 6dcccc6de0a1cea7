"""Finds out what was written, by whatever hand: files that matter are compared before every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.simulator.events import EventKind
from testbed.simulator.pveconf import parse_mappings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.simulator.events import EventLog
    from testbed.simulator.tree import Tree

Stamp = tuple[int, int, int]
PLACES = (
    "etc/driverctl.d/pci-*",
    "etc/pve/nodes/*/lxc/*.conf",
    "etc/pve/nodes/*/qemu-server/*.conf",
    "etc/pve/mapping/pci.cfg",
    "etc/systemd/system/*.service",
    "etc/systemd/system/*.service.d/*.conf",
    "var/lib/lxc/*/rootfs/etc/systemd/system/*.service",
    "var/lib/lxc/*/rootfs/etc/systemd/system/*.service.d/*.conf",
)


class Watch:
    """Compares the files at `PLACES` with what they were, and records the difference as events."""

    def __init__(self, tree: Tree, log: EventLog) -> None:
        self._tree, self._log = tree, log
        self._seen: dict[Path, tuple[Stamp, str]] = {}
        self._busy = True

    def start(self) -> None:
        """Take what is there as known."""
        self._seen = {path: (stamp, path.read_text("utf-8")) for path, stamp in self._files()}
        self._busy = False

    def pause(self) -> None:
        """Look no more until `start`."""
        self._busy = True

    def look(self) -> None:
        """Record what changed since the last look."""
        if self._busy:
            return
        self._busy = True
        try:
            for path, before, after in list(self._changes()):
                self._record(path, before, after)
        finally:
            self._busy = False

    def _changes(self) -> Iterator[tuple[Path, str, str]]:
        files = dict(self._files())
        for path, stamp in files.items():
            old_stamp, old = self._seen.get(path, (None, ""))
            if stamp != old_stamp:
                new = path.read_text("utf-8")
                self._seen[path] = (stamp, new)
                if new != old:
                    yield path, old, new
        for path in [p for p in self._seen if p not in files]:
            yield path, self._seen.pop(path)[1], ""

    def _files(self) -> Iterator[tuple[Path, Stamp]]:
        for place in PLACES:
            for path in sorted(self._tree.root.glob(place)):
                if path.name[0] != "." and path.is_file():
                    stat = path.stat()
                    yield path, (stat.st_mtime_ns, stat.st_ino, stat.st_size)

    def _record(self, path: Path, before: str, after: str) -> None:
        parts = path.relative_to(self._tree.root).parts
        match parts:
            case ("etc", "driverctl.d", name):
                self._log.add(EventKind.PERSIST, name.removeprefix("pci-"), driver=after.strip() or None)
            case ("etc", "pve", "nodes", _, "lxc", name):
                self._log.add(EventKind.CONTAINER_CONFIG, name.removesuffix(".conf"))
            case ("etc", "pve", "nodes", _, "qemu-server", name):
                self._log.add(EventKind.VM_CONFIG, name.removesuffix(".conf"))
            case ("etc", "pve", "mapping", _):
                self._record_mappings(before, after)
            case _:
                container = int(parts[3]) if parts[0] == "var" else None
                inside = "/" + "/".join(parts[5:] if parts[0] == "var" else parts)
                unit = parts[-1] if parts[-1].endswith(".service") else parts[-2].removesuffix(".d")
                self._log.add(EventKind.UNIT_WRITE, unit, container=container, path=inside)

    def _record_mappings(self, before: str, after: str) -> None:
        old, new = parse_mappings(before), parse_mappings(after)
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                self._log.add(EventKind.MAPPING, name, devices=new[name].paths if name in new else None)
