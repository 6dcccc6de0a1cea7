"""The ledger: which pool owns which device, what was found, what was drained, and the running operation's journal."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from .request import Managed, Request, Service
from .result import FailedError, Json, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .root import Root

FOLDER = "/var/lib/gpu-topology"
FILE = f"{FOLDER}/ledger.json"
VERSION = "v1"

Object = dict[str, Json]


def empty() -> Object:
    """A host that this program never touched."""
    return {
        "version": VERSION,
        "sequence": 0,
        "devices": {},
        "revisions": {},
        "found": {},
        "passed": {},
        "previous": {},
        "outdated": {},
        "drained": [],
        "pending": [],
        "quieted": [],
        "managed": {"services": [], "vms": [], "containers": []},
        "configured": None,
        "operation": None,
    }


def write_atomically(path: Path, text: str, mode: int | None = 0o644) -> None:
    """Replace a file by one rename, so that a reader, or a crash, sees the old text or the new one.

    A mode of None leaves permissions to the file system: pmxcfs (/etc/pve) refuses chmod.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _mode_of(path) if mode is None else mode)
        with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 (an open descriptor, for the mode)
            file.write(text)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105 (as PVE and driverctl see it: one rename(2))
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise FailedError(
            f"{path} could not be written: {error.strerror}; free space or mend the file system"
        ) from error


def _mode_of(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return 0o640


KnownMajors = Mapping[str, frozenset[int]]


def numbers_by_name(told: Request) -> KnownMajors:
    """Read an object of lists of numbers."""
    return {name: frozenset(told.numbers(name)) for name in told.fields}


class Ledger:
    """The ledger's JSON in memory, with the few questions that operations ask of it."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.data = self._load()
        self._saved = copy.deepcopy(self.data)

    def _load(self) -> Object:
        text = self._root.text(FILE)
        if text is None:
            return empty()
        try:
            data = json.loads(text)
        except ValueError as error:
            raise RefusedError(
                f"the ledger {FILE} is not JSON ({error}): restore it, or move it away by hand"
            ) from error
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise RefusedError(f"the ledger {FILE} is not of version {VERSION}: it was written by another release")
        return empty() | cast("Object", data)

    def save(self) -> None:
        """Write it if it changed since the last save."""
        if self.data == self._saved:
            return
        folder = self._root.at(FOLDER)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise FailedError(f"{folder} could not be made: {error.strerror}") from error
        write_atomically(self._root.at(FILE), json.dumps(self.data, indent=1, sort_keys=True) + "\n", 0o600)
        self._saved = copy.deepcopy(self.data)

    def table(self, name: str) -> dict[str, Json]:
        """One of its objects, such as devices, revisions, found or passed."""
        return cast("dict[str, Json]", self.data[name])

    @property
    def drained(self) -> list[Json]:
        """What was stopped and not yet started again, in the order of stopping."""
        return cast("list[Json]", self.data["drained"])

    @property
    def pending(self) -> list[Json]:
        """Containers (vmid) whose found GPUs are not all back on the host: restarted when they are."""
        return cast("list[Json]", self.data["pending"])

    @property
    def quieted(self) -> list[Json]:
        """Units ({vmid, unit}) that were enabled and are disabled over their container's restart."""
        return cast("list[Json]", self.data["quieted"])

    def note_drained(self, entry: Object) -> None:
        """Remember that something was stopped."""
        if entry not in self.drained:
            self.drained.append(entry)

    def forget_drained(self, entry: Object) -> None:
        """It runs again, or is gone for good."""
        if entry in self.drained:
            self.drained.remove(entry)

    def note_found(self, key: str, value: Json) -> None:
        """Keep what was there before our first touch; later touches change nothing."""
        self.table("found").setdefault(key, value)

    def passed(self, vmid: int) -> Request:
        """What a container was given: `devices`, `style`, and the `majors` that its lines may have, by driver."""
        return Request.of(self.table("passed").get(str(vmid), {}))

    def known_majors(self, vmid: int) -> KnownMajors:
        """The dynamic majors that a container's lines may have."""
        return numbers_by_name(self.passed(vmid).object("majors"))

    def note_passed(self, vmid: int, devices: Iterable[str], style: str, majors: KnownMajors) -> None:
        """Remember what a container is given, for boots that give other numbers."""
        numbers: dict[str, Json] = {name: [*sorted(found)] for name, found in majors.items()}
        self.table("passed")[str(vmid)] = {"devices": [*devices], "style": style, "majors": numbers}

    @property
    def managed(self) -> Managed:
        """What this program manages, also from earlier configurations."""
        return Request({"managed": self.data["managed"]}).managed()

    @property
    def configured(self) -> frozenset[tuple[str, int | None]] | None:
        """Unit and container of each service of the present configuration; None where nobody told yet."""
        if self.data["configured"] is None:
            return None
        told = Request({"managed": {"services": self.data["configured"]}}).managed()
        return frozenset((one.unit, one.container) for one in told.services)

    def configure(self, services: Iterable[Service]) -> None:
        """Take these for the services of the present configuration."""
        self.data["configured"] = [{"name": one.name, "unit": one.unit, "container": one.container} for one in services]

    def manage(self, managed: Managed) -> None:
        """Add to what this program manages."""
        table = self.table("managed")
        services = cast("list[Json]", table["services"])
        known = {(one.unit, one.container) for one in self.managed.services}
        services += [
            {"name": one.name, "unit": one.unit, "container": one.container}
            for one in managed.services
            if (one.unit, one.container) not in known
        ]
        for vmid in managed.vms:
            self.manage_guest("vms", vmid)

    def manage_guest(self, kind: str, vmid: int) -> None:
        """Add a VM or container to what this program manages."""
        guests = cast("list[Json]", self.table("managed")[kind])
        if vmid not in guests:
            guests.append(vmid)

    def unmanage_guest(self, kind: str, vmid: int) -> None:
        """Forget a VM or container."""
        guests = cast("list[Json]", self.table("managed")[kind])
        if vmid in guests:
            guests.remove(vmid)

    def unmanage_service(self, service: Service) -> None:
        """Forget a service."""
        table = self.table("managed")
        services = cast("list[dict[str, Json]]", table["services"])
        table["services"] = [
            one for one in services if (one["unit"], one["container"]) != (service.unit, service.container)
        ]
        self.forget_drained({"kind": "service", "container": service.container, "unit": service.unit})
