"""Facts of systemd services, in containers or on the host: text, state, and the process as it really runs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from .facts_devices import properties
from .guests import inside
from .processes import allowed, main_processes, process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import Service
    from .result import Json
    from .system import Completed, System

SHOWN = (
    "LoadState,ActiveState,SubState,UnitFileState,FragmentPath,DropInPaths,EnvironmentFiles,NeedDaemonReload,MainPID"
)
NCCL_CONF = "/etc/nccl.conf"


@dataclass
class _Look:
    """What was read of one service so far."""

    service: Service
    shown: dict[str, str] = field(default_factory=dict)
    files: dict[str, str | None] = field(default_factory=dict)


def first_commands(service: Service) -> list[tuple[str, ...]]:
    """The first round of commands for one service, three of them."""
    return [
        inside(service.container, "systemctl", "show", service.unit, "-p", SHOWN),
        inside(service.container, "cat", f"/etc/systemd/system/{service.unit}"),
        inside(service.container, "cat", NCCL_CONF),
    ]


def service_facts(system: System, services: Sequence[Service], first: Sequence[Completed], limit: float) -> list[Json]:
    """Services' facts from the answers to `first_commands`; what those point to is read in one second round."""
    looks = []
    for index, service in enumerate(services):
        shown, text, nccl = first[index * 3 : index * 3 + 3]
        look = _Look(service, properties(shown.out) if shown.ok else {})
        look.files[f"/etc/systemd/system/{service.unit}"] = text.out if text.ok else None
        look.files[NCCL_CONF] = nccl.out if nccl.ok else None
        looks.append(look)
    asked = [(look, path) for look in looks for path in _more_files(look)]
    done = system.run_all([inside(look.service.container, "cat", path) for look, path in asked], limit)
    for (look, path), answer in zip(asked, done, strict=True):
        look.files[path] = answer.out if answer.ok else None
    running = {look.service: int(look.shown.get("MainPID") or 0) for look in looks}
    pids = main_processes(system, {service: pid for service, pid in running.items() if pid})
    return [_facts(system, look, pids.get(look.service)) for look in looks]


def _drop_ins(look: _Look) -> list[str]:
    return look.shown.get("DropInPaths", "").split()


def _environment_files(look: _Look) -> list[str]:
    """Paths of `EnvironmentFiles`, shown by systemd as `/etc/x (ignore_errors=no)`, one per line or after another."""
    words = look.shown.get("EnvironmentFiles", "").split()
    return [word for word in words if word.startswith("/")]


def _more_files(look: _Look) -> list[str]:
    paths = [look.shown.get("FragmentPath", ""), *_drop_ins(look), *_environment_files(look)]
    return [path for path in dict.fromkeys(paths) if path and path not in look.files]


def _facts(system: System, look: _Look, pid: int | None) -> Json:
    shown, service = look.shown, look.service
    path = shown.get("FragmentPath") or None
    text = look.files.get(path) if path else None
    return {
        "name": service.name,
        "unit": service.unit,
        "container": service.container,
        "exists": shown.get("LoadState", "not-found") not in ("not-found", ""),
        "text": text,
        "path": path,
        "drop_ins": cast("Json", {one: look.files.get(one) or "" for one in _drop_ins(look)}),
        "environment_files": cast(
            "Json", {one: allowed(assignments(look.files.get(one) or "")) for one in _environment_files(look)}
        ),
        "enabled": None if not shown.get("UnitFileState") else shown["UnitFileState"].startswith("enabled"),
        "active": shown.get("ActiveState") or "inactive",
        "need_reload": shown.get("NeedDaemonReload") == "yes",
        "main_pid": pid,
        "process": process(system, pid) if pid else None,
        "nccl_conf": cast("Json", assignments(look.files.get(NCCL_CONF) or "")),
    }


def assignments(text: str) -> dict[str, str]:
    """KEY=VALUE lines of an environment file or of nccl.conf, quotes taken off as systemd does."""
    found = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if equals and not key.startswith(("#", ";")):
            try:
                found[key.strip()] = "".join(shlex.split(value)) if value[:1] in "\"'" else value.strip()
            except ValueError:
                found[key.strip()] = value.strip()
    return found
