"""Serve: the service on the unit that is deployed, proven by a generated token."""

from __future__ import annotations

import datetime as dt
import re
import shlex
import time
from functools import partial
from typing import TYPE_CHECKING, cast

from .container_live import visible_gpus
from .diagnose import Suspect, diagnose
from .drain import record_revision
from .facts_services import NCCL_CONF, assignments
from .guests import container_config, need_inside, run_inside, status
from .outgoing import make_way_for_service
from .processes import SECRET, identity, main_processes, process, unit_environment, unit_pids
from .readiness import NotReadyError, Server, wait_for_token
from .request import Managed, Request, Service
from .result import FailedError, Json, RefusedError
from .unit import UNITS, need_running, read_file, replace, set_enabled, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .operation import Operation
    from .system import System

RESTART_LIMIT = 400.0
"""Seconds for `systemctl restart`: a hung rank is killed only after the unit's stop timeout (90 s by default)."""
CLOCK_SLACK = 2.0
"""Seconds by which the boot's clock and a file's may disagree."""
TP_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size")


def serve(operation: Operation, request: Request) -> dict[str, Json]:
    """Restart the service if its process isn't as wanted, wait for a token, compare what runs with the plan."""
    server = Server.of(request)
    service, system = server.service, operation.system
    need_running(system, service)
    shown = show(system, service)
    if shown.get("LoadState") != "loaded":
        raise RefusedError(
            f"{service.unit} is not known to systemd ({shown.get('LoadState')}): its unit file comes first"
        )
    outdated = operation.ledger.table("outdated")
    reasons = differences(system, server, request.environment("environment"), shown)
    current = identity(system, service, int(shown.get("MainPID") or 0))
    if not reasons and current is not None and current == outdated.get(f"unit:{service.name}"):
        reasons = ["its unit file was written after its start"]
    enabled = shown.get("UnitFileState") == "enabled"
    if request.has("enabled") and request.flag("enabled", default=True) != enabled:
        set_enabled(operation, service, enabled=not enabled)
    if reasons:
        operation.note(f"{service.unit} is to be started: {'; '.join(reasons)}")
        operation.undo_with(f"{service.unit} as before", partial(_back_to_previous, operation, request, server))
        make_way_for_service(operation, service, request.addresses("devices"), RESTART_LIMIT)
        _restart(operation, server, reload=shown.get("NeedDaemonReload") == "yes")
    try:
        seconds, answer = wait_for_token(system, server)
        verify_running(system, server, answer)
    except NotReadyError as error:
        raise _diagnosed(system, request, server, error) from error
    operation.note(f"{service.unit} generated a token after {seconds:.0f} s, with tp {answer.get('tp')}")
    outdated.pop(f"unit:{service.name}", None)
    operation.ledger.manage(Managed((service,)))
    operation.ledger.forget_drained({"kind": "service", "container": service.container, "unit": service.unit})
    record_revision(operation, f"service:{service.name}", request)
    return {"ready_s": round(seconds, 1), "tp": server.tp, "gpus": server.gpus, "restarted": bool(reasons)}


def stop(operation: Operation, request: Request) -> dict[str, Json]:
    """Stop the service, and wait for its end."""
    service, system = request.service(), operation.system
    if _reachable(system, service) and show(system, service).get("ActiveState") not in ("inactive", "failed"):
        operation.undo_with(
            f"start {service.unit}", partial(need_inside, system, service.container, "systemctl", "start", service.unit)
        )
        operation.begin(f"stop {service.unit}")
        limit = request.seconds("stop_timeout_s", 180.0)
        need_inside(system, service.container, "systemctl", "stop", service.unit, limit=limit)
        left = show(system, service).get("ActiveState")
        if left not in ("inactive", "failed"):
            raise FailedError(f"{service.unit} is {left} after `systemctl stop` returned")
    operation.ledger.unmanage_service(service)
    operation.ledger.table("revisions").pop(f"service:{service.name}", None)
    return {"unit": service.unit}


def differences(system: System, server: Server, environment: dict[str, str], shown: dict[str, str]) -> list[str]:
    """Why the running process isn't the wanted one; none if it is, even while it still loads."""
    service = server.service
    if shown.get("ActiveState") not in ("active", "activating", "reloading") or not int(shown.get("MainPID") or 0):
        return [f"it is {shown.get('ActiveState')}"]
    if shown.get("NeedDaemonReload") == "yes":
        return ["its unit file changed"]
    pid = main_processes(system, {service: int(shown["MainPID"])}).get(service)
    main = process(system, pid) if pid else None
    if not main:
        return ["its main process can't be found"]
    found = []
    tp = running_tp(system, service)
    if tp != server.tp:
        found.append(f"it runs with tp {tp}, not {server.tp}")
    has = assignments(read_file(system, service.container, NCCL_CONF) or "") | unit_environment(system, service)
    wrong = [key for key, value in environment.items() if has.get(key) != value]
    found += [
        f"{key} differs in its process"
        if SECRET.search(key)
        else f"{key} is {has.get(key) or 'not set'} in its process, not {environment[key]}"
        for key in wrong
    ]
    written = _written(system, service, shown)
    if written is not None and _epoch(main["started"]) + CLOCK_SLACK < written:
        found.append("its unit file is newer than its process")
    return found


def tp_of(words: Sequence[str]) -> int | None:
    """The tensor parallelism among a command's arguments; None when it isn't named. The last one counts."""
    tp = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in TP_FLAGS:
            text = value if equals else "".join(words[index + 1 : index + 2])
            tp = int(text) if text.isdigit() else tp
    return tp


def unit_tp(text: str) -> int | None:
    """The tensor parallelism that a unit file's ExecStart asks for; 1 when it names none."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    command = next((line.partition("=")[2] for line in lines if line.strip().startswith("ExecStart=")), None)
    if command is None:
        return None
    try:
        return tp_of(shlex.split(command)) or 1
    except ValueError:
        return None


def running_tp(system: System, service: Service) -> int:
    """The tensor parallelism on the command line of the unit's processes (a wrapper script may be the main one)."""
    for pid in unit_pids(system, service):
        seen = process(system, pid)
        tp = tp_of(cast("list[str]", seen["argv"])) if seen else None
        if tp is not None:
            return tp
    return 1


def verify_running(system: System, server: Server, answer: dict[str, Json]) -> None:
    """Compare what the server says of itself, and the GPUs visible to it, with the plan."""
    if answer.get("tp") != server.tp:
        raise NotReadyError(f"{server.service.unit} answers, with tp {answer.get('tp')} where {server.tp} is wanted")
    visible = visible_gpus(system, server.service.container) if server.service.container is not None else None
    if visible is not None and visible != server.gpus:
        raise NotReadyError(
            f"nvidia-smi beside {server.service.unit} shows {visible} GPUs where {server.gpus} are wanted"
        )


def _restart(operation: Operation, server: Server, *, reload: bool) -> None:
    system, service, container = operation.system, server.service, server.service.container
    if reload:
        operation.begin("systemd reads its units again")
        need_inside(system, container, "systemctl", "daemon-reload")
    operation.begin(f"restart {service.unit}")
    run_inside(system, container, "systemctl", "reset-failed", service.unit)  # fails when there is nothing to reset
    # A unit whose start waits for its own readiness blocks this for as long as the model loads.
    limit = RESTART_LIMIT + server.deadline
    need_inside(system, container, "systemctl", "restart", service.unit, limit=limit)


def _diagnosed(system: System, request: Request, server: Server, error: NotReadyError) -> FailedError:
    visible = visible_gpus(system, server.service.container)
    path = show(system, server.service).get("FragmentPath") or f"{UNITS}/{server.service.unit}"
    asked = unit_tp(read_file(system, server.service.container, path) or "") or server.tp
    suspect = Suspect(
        server.service,
        request.addresses("devices"),
        asked,
        visible,
        translated=request.flag("translated_iommu", default=False),
        secret=server.api_key,
    )
    found = diagnose(system, suspect)
    return FailedError(f"{error.message}. {found.text()}", found.details())


def _back_to_previous(operation: Operation, request: Request, server: Server) -> None:
    """Put the previous unit back where the GPUs of now still allow its parallelism; else stop the service."""
    system, service = operation.system, server.service
    shown = show(system, service)
    path = shown.get("FragmentPath") or f"{UNITS}/{service.unit}"
    recorded = operation.ledger.table("previous").get(f"unit:{service.name}")
    previous = request.text_or_none("previous_text") or (recorded if isinstance(recorded, str) else None)
    current = read_file(system, service.container, path)
    tp = unit_tp(previous) if previous else None
    if previous is None or previous == current or tp is None or tp > server.gpus:
        need_inside(system, service.container, "systemctl", "stop", service.unit, limit=RESTART_LIMIT)
        why = (
            f"the previous unit asks for tp {tp} and there are {server.gpus} GPUs"
            if previous is not None and previous != current
            else "there is no previous unit"
        )
        raise FailedError(f"the service is stopped, since {why}; correct the configuration and run again")
    replace(system, service, path, previous)
    run_inside(system, service.container, "systemctl", "reset-failed", service.unit)
    need_inside(system, service.container, "systemctl", "restart", service.unit, limit=RESTART_LIMIT)
    time.sleep(2.0)
    if (state := show(system, service).get("ActiveState")) not in ("active", "activating"):
        raise FailedError(f"the previous unit was put back, and it is {state} after its start")
    operation.note(f"the previous unit of {service.unit} is back and loads again, with tp {tp}")


def _written(system: System, service: Service, shown: dict[str, str]) -> float | None:
    """When the unit's files were last written, in seconds since 1970."""
    paths = [path for path in [shown.get("FragmentPath", ""), *shown.get("DropInPaths", "").split()] if path]
    if service.container is None:
        times = [system.root.at(path).stat().st_mtime for path in paths if system.root.at(path).exists()]
    else:
        done = run_inside(system, service.container, "stat", "-c", "%Y", *paths)
        times = [float(line) for line in done.out.split() if line.isdigit()]
    return max(times, default=None)


def _epoch(started: Json) -> float:
    return dt.datetime.fromisoformat(started).timestamp() if isinstance(started, str) else 0.0


def _reachable(system: System, service: Service) -> bool:
    vmid = service.container
    return vmid is None or (container_config(system, vmid) is not None and status(system, "pct", vmid) == "running")
