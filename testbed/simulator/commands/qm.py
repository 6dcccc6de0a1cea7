"""qm: virtual machines."""

from __future__ import annotations

import asyncio
import re

from testbed.simulator.commands.call import Answer, Call, options
from testbed.simulator.pveconf import GuestError

NO_CONFIG, FAILED = 2, 255
SHUTDOWN_S = 0.05
_SETTABLE = re.compile(r"^--?(hostpci\d+|onboot|args|cpu)$")
_HOSTPCI_OPTIONS = {"host", "mapping", "pcie", "rombar", "x-vga", "romfile", "driver"}


async def qm(call: Call) -> Answer:
    """Run qm."""
    try:
        return await _run(call)
    except GuestError as error:
        return Answer(stderr=f"{error}\n", code=NO_CONFIG if str(error).startswith("Configuration file") else FAILED)


async def _run(call: Call) -> Answer:
    args, vms = call.args, call.machine.vms
    if args[:1] == ("list",):
        rows = (
            f"{v:>10} {vms.config(v).get('name'):<20} {'running' if vms.need(v).running else 'stopped':<10} "
            f"{vms.config(v).get('memory'):<10} 0.00 {vms.need(v).pid or 0}\n"
            for v in vms.ids()
        )
        return Answer("      VMID NAME                 STATUS     MEM(MB)    BOOTDISK(GB) PID\n" + "".join(rows))
    if len(args) < 2 or not args[1].isdigit():
        raise call.limit()
    verb, vmid, rest = args[0], int(args[1]), args[2:]
    vm = vms.need(vmid)
    match verb:
        case "status":
            return Answer(f"status: {'running' if vm.running else 'stopped'}\n")
        case "config":
            _, given = options(rest, valued=("--current", "-current"))
            config = vms.config(vmid)
            items = config.items() if given else config.effective()
            return Answer("".join(f"{k}: {v}\n" for k, v in sorted(items)))
        case "set":
            values, delete = _changes(call, rest)
            await vms.set(vmid, values, delete)
            return Answer(f"update VM {vmid}: " + " ".join(rest) + "\n")
        case "start":
            options(rest, valued=("--timeout", "-timeout"))
            await vms.start(vmid)
        case "stop" | "shutdown":
            options(rest, flags=("--skiplock",), valued=("--timeout", "-timeout", "--forceStop", "-forceStop"))
            await asyncio.sleep(SHUTDOWN_S * call.machine.faults.factor)
            if vm.running or verb == "shutdown":
                vms.stop(vmid)
        case _:
            raise call.limit()
    return Answer()


def _changes(call: Call, args: tuple[str, ...]) -> tuple[dict[str, str], set[str]]:
    values: dict[str, str] = {}
    delete: set[str] = set()
    rest = list(args)
    while rest:
        word, eq, value = rest.pop(0).partition("=")
        if (word.startswith(("-hostpci", "--hostpci")) and not eq) or not eq:
            value = rest.pop(0) if rest else ""
        key = _SETTABLE.match(word)
        if key and value:
            values[key[1]] = value
            _check(key[1], value)
        elif word in ("-delete", "--delete"):
            delete |= set(re.split(r"[\s,;]+", value))
        else:
            raise call.limit()
    return values, delete


def _check(key: str, value: str) -> None:
    if not key.startswith("hostpci"):
        return
    number = int(key.removeprefix("hostpci"))
    names = [part.partition("=")[0] if "=" in part else "host" for part in value.split(",")]
    if number > 15 or not set(names) <= _HOSTPCI_OPTIONS:
        raise GuestError(f"400 Parameter verification failed.\n{key}: invalid format - {value}")
