"""What happened on the simulated host, in order: the tests' witness, independent of what the program says of itself."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Detail = str | int | float | bool | None


class EventKind(StrEnum):
    """What can happen. The subject is a PCI address, a VMID, a unit, a mapping's name or a path, as noted."""

    HOST_BOOT = "host.boot"  # host name
    SSH_CONNECT = "ssh.connect"  # user
    SSH_EXEC = "ssh.exec"  # command
    SSH_DROP = "ssh.drop"  # reason
    MODULE_LOAD = "module.load"  # module
    OVERRIDE = "override"  # address; driver
    UNBIND = "unbind"  # address; driver
    BIND = "bind"  # address; driver
    PERSIST = "persist"  # address; driver, None where the entry went away
    HOLDER_GONE = "holder.gone"  # address; node
    MAPPING = "mapping"  # mapping; devices, None where it went away
    CONTAINER_CONFIG = "container.config"  # VMID
    CONTAINER_START = "container.start"  # VMID; gpus
    CONTAINER_STOP = "container.stop"  # VMID
    VM_CONFIG = "vm.config"  # VMID
    VM_START = "vm.start"  # VMID; devices
    VM_STOP = "vm.stop"  # VMID
    UNIT_WRITE = "unit.write"  # unit; container, path
    UNIT_ENABLE = "unit.enable"  # unit; container
    UNIT_DISABLE = "unit.disable"  # unit; container
    SYSTEMD_RELOAD = "systemd.reload"  # "host" or VMID
    SERVICE_START = "service.start"  # unit; container, tp
    SERVICE_READY = "service.ready"  # unit; container, tp
    SERVICE_TOKEN = "service.token"  # unit; container, tp  # noqa: S105  a token of text, not a secret
    SERVICE_STOP = "service.stop"  # unit; container
    SERVICE_EXIT = "service.exit"  # unit; container, status: it ended by itself
    SERVER_INFO = "server_info"  # unit; container, tp
    FAULT = "fault"  # fault's name


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; `time` is seconds since the epoch, `detail` depends on the kind."""

    seq: int
    time: float
    kind: EventKind
    subject: str
    detail: dict[str, Detail]


class EventLog:
    """An append-only list of events, kept as JSON lines in a file too."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._events: list[Event] = []
        self.listeners: list[Callable[[Event], None]] = []
        self.before: Callable[[], None] = lambda: None

    def add(self, kind: EventKind, subject: object, **detail: Detail) -> Event:
        """Record that something happened, after what `before` finds out, and tell those who listen."""
        self.before()
        event = Event(len(self._events) + 1, time.time(), kind, str(subject), detail)
        self._events.append(event)
        self._file.write(json.dumps(asdict(event)) + "\n")
        for listener in tuple(self.listeners):
            listener(event)
        return event

    def all(self) -> list[Event]:
        """Give every event so far, oldest first."""
        return list(self._events)

    def close(self) -> None:
        """Close the file; events are kept."""
        self._file.close()
