"""systemctl and journalctl, on the host and in containers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from testbed.simulator.commands.call import Answer, Call, options
from testbed.simulator.units import UnitError

if TYPE_CHECKING:
    from testbed.simulator.systemd import Manager

NOT_ACTIVE, NOT_FOUND, FAILED = 3, 4, 1
ACTIONS = ("start", "stop", "restart", "reload-or-restart", "try-restart")
ANSWERS = ("is-active", "is-enabled", "is-failed")
FLAGS = ("--no-pager", "--quiet", "-q", "--value", "--now", "--no-legend", "--plain", "--all", "-a", "--no-block",
         "--wait", "--no-ask-password", "--full", "-l")  # fmt: skip
VALUED = ("-p", "--property", "-n", "--lines", "-t", "--type", "--state", "--job-mode")


async def systemctl(call: Call) -> Answer:
    """Run systemctl."""
    words, given = options(call.args, flags=FLAGS, valued=VALUED)
    manager = call.machine.manager(call.container)
    verb, names = (words[0] if words else "list-units"), words[1:]
    try:
        if verb in ACTIONS:
            return await _act(manager, verb, names)
        if verb in ("enable", "disable"):
            return await _enable(manager, verb, names, now="--now" in given)
        if verb in ANSWERS:
            return _ask(manager, verb, names, quiet=bool({"-q", "--quiet"} & given.keys()))
        if verb == "show":
            wanted = [p for v in given.get("-p", []) + given.get("--property", []) for p in v.split(",")]
            return _show(call, manager, names, wanted, bare="--value" in given)
        return _other(call, manager, verb, names)
    except UnitError as error:
        not_found = "not found" in str(error)
        return Answer(stderr=f"Failed to {verb} {' '.join(names)}: {error}\n", code=5 if not_found else FAILED)


def _other(call: Call, manager: Manager, verb: str, names: list[str]) -> Answer:
    match verb:
        case "daemon-reload":
            manager.reload()
        case "reset-failed":
            for unit in [manager.need(n) for n in names] or list(manager.units.values()):
                manager.reset_failed(unit)
        case "is-system-running":
            failed = any(u.active == "failed" for u in manager.units.values())
            return Answer("degraded\n", code=1) if failed else Answer("running\n")
        case "cat":
            return _cat(manager, names)
        case "status":
            return _status(manager, names)
        case "list-units":
            return Answer("".join(f"{u.name} loaded {u.active} {u.sub}\n" for u in manager.units.values()))
        case _:
            raise call.limit()
    return Answer()


async def journalctl(call: Call) -> Answer:
    """Print the end of a unit's journal; only text, no filters by time."""
    valued = ("-u", "--unit", "-n", "--lines", "-o", "--output")
    _, given = options(call.args, flags=("--no-pager", "-q", "--quiet", "-b", "--no-hostname"), valued=valued)
    units = given.get("-u", []) + given.get("--unit", [])
    count = int((given.get("-n", []) + given.get("--lines", []) + ["0"])[0])
    form = (given.get("-o", []) + given.get("--output", []) + ["short"])[0]
    if len(units) != 1 or form not in ("cat", "short", "short-iso"):
        raise call.limit()
    manager = call.machine.manager(call.container)
    unit = manager.unit(units[0])
    lines = unit.journal[-count:] if unit else []
    if not lines:
        return Answer("-- No entries --\n")
    head = "" if form == "cat" else f"{time.strftime('%b %d %H:%M:%S')} {manager.scope} {units[0]}[1]: "
    return Answer("".join(f"{head}{line}\n" for line in lines))


async def _act(manager: Manager, verb: str, names: list[str]) -> Answer:
    for unit in [manager.need(name) for name in names]:
        if verb == "start":
            await manager.start(unit)
        elif verb == "stop":
            await manager.stop(unit)
        elif verb != "try-restart" or unit.running:
            await manager.restart(unit)
    return Answer()


async def _enable(manager: Manager, verb: str, names: list[str], *, now: bool) -> Answer:
    told = ""
    for name in names:
        unit = manager.need(name)
        if verb == "enable" and manager.enable(unit):
            told += f"Created symlink /etc/systemd/system/multi-user.target.wants/{unit.name}.\n"
        elif verb == "enable" and manager.enablement(unit.name) == "static":
            told += "The unit files have no installation config (WantedBy= and others), so they cannot be enabled.\n"
        if verb == "disable" and manager.disable(unit.name):
            told += f"Removed /etc/systemd/system/multi-user.target.wants/{unit.name}.\n"
        if now:
            await (manager.start(unit) if verb == "enable" else manager.stop(unit))
    return Answer(stderr=told)


def _ask(manager: Manager, verb: str, names: list[str], *, quiet: bool) -> Answer:
    answers = []
    for name in names:
        unit = manager.unit(name)
        if verb == "is-enabled":
            answers.append(manager.enablement(unit.name if unit else name) or "not-found")
        else:
            answers.append(unit.active if unit else "inactive")
    good = {"is-active": ("active",), "is-failed": ("failed",), "is-enabled": ("enabled", "static")}[verb]
    bad = {"is-active": NOT_ACTIVE, "is-failed": 1, "is-enabled": 1}[verb]
    code = 0 if any(a in good for a in answers) else bad
    if verb == "is-enabled" and answers == ["not-found"]:
        code = NOT_FOUND
    return Answer("" if quiet else "".join(f"{a}\n" for a in answers), code=code)


def _show(call: Call, manager: Manager, names: list[str], wanted: list[str], *, bare: bool) -> Answer:
    blocks = []
    for name in names:
        values = _properties(call, manager, name)
        unknown = [w for w in wanted if w not in values]
        if unknown:
            raise call.limit()
        picked = {k: v for k, v in values.items() if not wanted or k in wanted}
        blocks.append("".join(f"{v}\n" if bare else f"{k}={v}\n" for k, v in picked.items()))
    return Answer("\n".join(blocks))


def _properties(call: Call, manager: Manager, name: str) -> dict[str, str]:
    unit = manager.unit(name)
    full = unit.name if unit else name
    pid = 0
    if unit and unit.running:
        process = call.machine.processes.get(unit.running.pid)
        # Inside a container systemd tells the PID of the container's own PID namespace.
        pid = (process.inner_pid or process.pid) if process else 0
    on_disk = manager.fragment(full)
    definition = unit.definition if unit else None
    since = time.strftime("%a %Y-%m-%d %H:%M:%S UTC", time.gmtime(unit.since)) if unit and unit.since else ""
    return {
        "Id": full,
        "Names": full,
        "Description": definition.last("Unit", "Description", full) if definition else full,
        "LoadState": "loaded" if unit and unit.fragments else "not-found",
        "ActiveState": unit.active if unit else "inactive",
        "SubState": unit.sub if unit else "dead",
        "Result": unit.result if unit else "success",
        "UnitFileState": manager.enablement(full),
        "FragmentPath": on_disk or "",
        "DropInPaths": " ".join(manager.drop_ins(full)),
        "NeedDaemonReload": "yes" if unit and manager.need_reload(unit) else "no",
        "MainPID": str(pid),
        "ExecMainPID": str(pid),
        "ExecMainStatus": str(unit.status if unit else 0),
        "ExecMainStartTimestamp": since,
        "ActiveEnterTimestamp": since,
        "NRestarts": str(unit.restarts if unit else 0),
        "ControlGroup": f"/system.slice/{full}" if unit and unit.running else "",
        "Type": definition.last("Service", "Type", "simple") if definition else "",
        "Restart": definition.last("Service", "Restart", "no") if definition else "",
        "Environment": " ".join(definition.values("Service", "Environment")) if definition else "",
        "EnvironmentFiles": " ".join(definition.values("Service", "EnvironmentFile")) if definition else "",
    }


def _cat(manager: Manager, names: list[str]) -> Answer:
    parts = []
    for name in names:
        unit = manager.unit(name)
        if unit is None or manager.fragment(unit.name) is None:
            return Answer(stderr=f"No files found for {name}.\n", code=FAILED)
        paths = [manager.fragment(unit.name) or "", *manager.drop_ins(unit.name)]
        parts += [f"# {path}\n{manager.inside(path)}" for path in paths]
    return Answer("\n".join(parts))


def _status(manager: Manager, names: list[str]) -> Answer:
    text, code = "", 0
    for name in names:
        unit = manager.unit(name)
        if unit is None:
            return Answer(stderr=f"Unit {name} could not be found.\n", code=NOT_FOUND)
        text += f"● {unit.name} - {unit.definition.last('Unit', 'Description')}\n"
        text += f"     Active: {unit.active} ({unit.sub})\n\n" + "".join(f"{x}\n" for x in unit.journal[-10:])
        code = code or (0 if unit.active == "active" else NOT_ACTIVE)
    return Answer(text, code=code)
