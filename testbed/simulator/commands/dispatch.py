"""Finds the command behind a shim and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.simulator.commands import host_tools
from testbed.simulator.commands.call import LIMIT_CODE, Answer, Call, LimitError
from testbed.simulator.commands.driverctl import driverctl
from testbed.simulator.commands.nvidia_smi import nvidia_smi
from testbed.simulator.commands.pct import pct
from testbed.simulator.commands.qm import qm
from testbed.simulator.commands.systemctl import journalctl, systemctl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

COMMANDS: dict[str, Callable[[Call], Awaitable[Answer]]] = {
    "dmesg": host_tools.dmesg,
    "driverctl": driverctl,
    "fuser": host_tools.fuser,
    "journalctl": journalctl,
    "lxc-info": host_tools.lxc_info,
    "modprobe": host_tools.modprobe,
    "nvidia-smi": nvidia_smi,
    "pct": pct,
    "pvesh": host_tools.pvesh,
    "pveversion": host_tools.pveversion,
    "qm": qm,
    "systemctl": systemctl,
    "udevadm": host_tools.udevadm,
    **dict.fromkeys(
        ("halt", "lsof", "lspci", "lxc-attach", "lxc-start", "lxc-stop", "poweroff", "reboot", "rmmod", "setpci",
         "shutdown", "update-grub", "update-initramfs"),
        host_tools.unsupported,
    ),
}  # fmt: skip


async def run_command(call: Call) -> Answer:
    """Run a command; what the simulator cannot do ends with exit code 2 and a message that says so."""
    try:
        return await COMMANDS[call.name](call)
    except LimitError as error:
        return Answer(stderr=f"{call.name}: simulator: {error}\n", code=LIMIT_CODE)
    except OSError as error:
        return Answer(stderr=f"{call.name}: {error.strerror}\n", code=1)
