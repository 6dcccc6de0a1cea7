"""pct: containers."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from testbed.simulator.commands.call import Answer, Call, options
from testbed.simulator.commands.inside import run_inside
from testbed.simulator.pveconf import GuestError

if TYPE_CHECKING:
    from testbed.simulator.containers import Container, Containers

NO_CONFIG, FAILED = 2, 255
_DEV = re.compile(r"^--?(dev\d+)$")
_DEV_VALUE = re.compile(r"^(?:path=)?/dev/\S+?(?:,(?:mode=0?[0-7]{3}|uid=\d+|gid=\d+|deny-write=[01]))*$")


async def pct(call: Call) -> Answer:
    """Run pct."""
    try:
        return await _run(call)
    except GuestError as error:
        return Answer(stderr=f"{error}\n", code=NO_CONFIG if str(error).startswith("Configuration file") else FAILED)


async def _run(call: Call) -> Answer:
    args, containers = call.args, call.machine.containers
    if args[:1] == ("list",):
        return _list(containers)
    if len(args) < 2 or not args[1].isdigit():
        raise call.limit()
    verb, vmid, rest = args[0], int(args[1]), args[2:]
    container = containers.need(vmid)
    match verb:
        case "status":
            return Answer(f"status: {_status(container)}\n")
        case "config":
            _, given = options(rest, valued=("--current", "-current"))
            config = containers.config(vmid)
            return Answer("".join(f"{k}: {v}\n" for k, v in (config.items() if given else config.effective())))
        case "set":
            values, delete = _changes(call, rest)
            await containers.set(vmid, values, delete)
            return Answer()
        case "push" | "pull":
            return _copy(call, container, verb, rest)
    return await (_exec(call, container, rest) if verb == "exec" else _power(call, verb, vmid, rest))


async def _power(call: Call, verb: str, vmid: int, rest: tuple[str, ...]) -> Answer:
    containers = call.machine.containers
    valued = ("--timeout", "-timeout", "--forceStop", "-forceStop", "--skiplock", "-skiplock")
    if verb not in ("start", "stop", "shutdown", "reboot") or options(rest, valued=valued)[0]:
        raise call.limit()
    if verb != "start":
        await containers.stop(vmid)
    if verb in ("start", "reboot"):
        await containers.start(vmid)
    return Answer()


def _list(containers: Containers) -> Answer:
    rows = "".join(
        f"{c.vmid:<10} {_status(c):<10}              {containers.config(c.vmid).get('hostname')}\n"
        for c in containers.all.values()
    )
    return Answer("VMID       Status     Lock         Name\n" + rows)


def _status(container: Container) -> str:
    return "running" if container.running else "stopped"


def _changes(call: Call, args: tuple[str, ...]) -> tuple[dict[str, str], set[str]]:
    values: dict[str, str] = {}
    delete: set[str] = set()
    rest = list(args)
    while rest:
        word, eq, value = rest.pop(0).partition("=")
        if not eq and not rest:
            raise call.limit()
        value = value if eq else rest.pop(0)
        device = _DEV.match(word)
        if device:
            if not _DEV_VALUE.match(value):
                raise GuestError(f"400 Parameter verification failed.\n{device[1]}: invalid format - {value}")
            values[device[1]] = value
        elif word in ("-delete", "--delete"):
            delete |= set(re.split(r"[\s,;]+", value))
        elif word in ("-onboot", "--onboot"):
            values["onboot"] = value
        else:
            raise call.limit()
    return values, delete


async def _exec(call: Call, container: Container, rest: tuple[str, ...]) -> Answer:
    if not container.running:
        raise GuestError(f"Error: container '{container.vmid}' not running!")
    argv = rest[rest.index("--") + 1 :] if "--" in rest else rest
    if not argv:
        raise call.limit()
    return await run_inside(call, container, argv)


def _copy(call: Call, container: Container, verb: str, rest: tuple[str, ...]) -> Answer:
    words, given = options(rest, valued=("--perms", "-perms", "--user", "-user", "--group", "-group"))
    if len(words) != 2:
        raise call.limit()
    if not container.running:
        kind = "push files to a running CT" if verb == "push" else "pull files from a running VM"
        raise GuestError(f"can only {kind}")
    tree = call.machine.tree
    inner, outer = (words[1], words[0]) if verb == "push" else (words[0], words[1])
    inside, outside = tree.path(f"{container.rootfs}/{inner.lstrip('/')}"), call.path(outer)
    source, target = (outside, inside) if verb == "push" else (inside, outside)
    if not source.is_file():
        raise GuestError(f"failed to open {source.name}: No such file or directory")
    if not target.parent.is_dir():
        raise GuestError(f"failed to create {target.name}: No such file or directory")
    tree.check_space(target)
    shutil.copyfile(source, target)
    mode = (given.get("--perms", []) + given.get("-perms", []) + ["0644"])[0]
    target.chmod(int(mode, 8))
    return Answer()
