"""A service's main process as the host's /proc shows it."""

from __future__ import annotations

import datetime as dt
import os
import re
from functools import partial
from typing import TYPE_CHECKING, cast

from .holders import hide_secrets, process_place

if TYPE_CHECKING:
    from .request import Service
    from .result import Json
    from .system import System

ALLOWED = re.compile(r"(NCCL|CUDA|SGLANG|OMP|PYTORCH|SAFETENSORS|NVIDIA|HIP|TORCH|MKL)_")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def allowed(environment: dict[str, str]) -> dict[str, str]:
    """Only variables that decide how a GPU service runs, and no secret."""
    return {key: value for key, value in environment.items() if ALLOWED.match(key) and not SECRET.search(key)}


def main_processes(system: System, services: dict[Service, int]) -> dict[Service, int]:
    """Host PIDs of services' main processes, from the PID that systemd knows (a container's is of its namespace)."""
    found: dict[Service, int] = {}
    wanted: dict[tuple[str | None, int | None], Service] = {(one.unit, one.container): one for one in services}
    for name in system.root.names("/proc"):
        if not name.isdigit():
            continue
        service = wanted.get(process_place(system, int(name)))
        if service and services[service] in _pids_of(system, int(name)):
            found[service] = int(name)
    return found


def _pids_of(system: System, pid: int) -> set[int]:
    """A process's PID in every namespace that it is in."""
    status = system.root.text(f"/proc/{pid}/status") or ""
    match = re.search(r"^NSpid:((?:\s+\d+)+)", status, re.MULTILINE)
    return {int(word) for word in match.group(1).split()} if match else {pid}


def process(system: System, pid: int, limit: float = 1.0) -> dict[str, Json] | None:
    """Arguments without secrets, the allowed environment, and the start of a process; None when it can't be read."""
    root = system.root
    answers = system.read_apart(
        {
            "argv": lambda: root.text(f"/proc/{pid}/cmdline"),
            "environment": lambda: root.text(f"/proc/{pid}/environ"),
            "stat": lambda: root.text(f"/proc/{pid}/stat"),
        },
        limit,
    )
    argv, environment, stat = (answers.get(name) for name in ("argv", "environment", "stat"))
    if not argv:
        return None
    started = started_at(system, str(stat or ""))
    return {
        "argv": cast("list[Json]", hide_secrets(str(argv).rstrip("\0").split("\0"))),
        "environment": cast("dict[str, Json]", allowed(_variables(str(environment or "")))),
        "started": started.isoformat(timespec="seconds") if started else None,
    }


def started_at(system: System, stat: str) -> dt.datetime | None:
    """When a process started, from its /proc/PID/stat (field 22, clock ticks after boot) and the boot's time."""
    boot = re.search(r"^btime (\d+)", system.root.text("/proc/stat") or "", re.MULTILINE)
    fields = stat.rpartition(")")[2].split()
    if not boot or len(fields) < 20:
        return None
    seconds = int(boot.group(1)) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def identity(system: System, service: Service, inner_pid: int) -> str | None:
    """What tells a service's main process from its successors: its PID and its start in clock ticks."""
    pid = main_processes(system, {service: inner_pid}).get(service) if inner_pid else None
    fields = (system.root.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return f"{pid} {fields[19]}" if len(fields) > 19 else None


def unit_pids(system: System, service: Service) -> list[int]:
    """Host PIDs of every process of a service's unit."""
    numbers = [int(name) for name in system.root.names("/proc") if name.isdigit()]
    return sorted(pid for pid in numbers if process_place(system, pid) == (service.unit, service.container))


def unit_environment(system: System, service: Service) -> dict[str, str]:
    """The whole environment of the unit's processes, secrets included; where they differ, the oldest one's."""
    pids = unit_pids(system, service)
    paths = {str(pid): partial(system.root.text, f"/proc/{pid}/environ") for pid in pids}
    answers = system.read_apart(paths, 2.0)
    merged: dict[str, str] = {}
    for pid in pids:
        merged = _variables(str(answers.get(str(pid)) or "")) | merged
    return merged


def _variables(environ: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in environ.split("\0") if "=" in pair)
