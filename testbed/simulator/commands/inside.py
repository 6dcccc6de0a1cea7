"""Commands inside a container: systemctl, nvidia-smi and a few file tools on its root folder."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from testbed.simulator.commands.call import Answer, Call, LimitError
from testbed.simulator.commands.nvidia_smi import nvidia_smi
from testbed.simulator.commands.systemctl import journalctl, systemctl

if TYPE_CHECKING:
    from testbed.simulator.containers import Container

FILE_TOOLS = ("cat", "chmod", "chown", "cp", "install", "ls", "mkdir", "mv", "readlink", "rm", "rmdir", "sha256sum",
              "stat", "sync", "test", "touch", "true")  # fmt: skip
WRITERS = ("cp", "install", "mkdir", "touch")
_PROC = re.compile(r"^/proc/(\d+|self)(/|$)")


async def run_inside(call: Call, container: Container, argv: tuple[str, ...]) -> Answer:
    """Run a command in a container, as `pct exec` does."""
    name = argv[0].rsplit("/", 1)[-1]
    inner = replace(call, name=name, args=argv[1:], container=container.vmid)
    match name:
        case "systemctl":
            return await systemctl(inner)
        case "journalctl":
            return await journalctl(inner)
        case "nvidia-smi":
            return await nvidia_smi(inner)
        case "hostname":
            return Answer(call.machine.tree.read(f"{container.rootfs}/etc/hostname") or "")
    if name in FILE_TOOLS:
        return await _file_tool(inner, container)
    raise LimitError(
        f"in a container the simulator runs systemctl, journalctl, nvidia-smi, hostname and "
        f"{', '.join(FILE_TOOLS)} only, not: {' '.join(argv)}"
    )


async def _file_tool(call: Call, container: Container) -> Answer:
    """Run the real tool with the container's absolute paths turned into those below its root folder."""
    tree = call.machine.tree
    root = str(tree.path(container.rootfs))
    args = [_translate(call, container, a) if a.startswith("/") else a for a in call.args]
    if call.name in WRITERS:
        tree.check_space(tree.path(container.rootfs))
    program = shutil.which(call.name, path="/usr/bin:/bin")
    if program is None:
        return Answer(stderr=f"{call.name}: not found\n", code=127)
    process = await asyncio.create_subprocess_exec(
        call.name,
        *args,
        executable=program,
        cwd=root,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", **call.machine.environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = (out.decode("utf-8", "replace").replace(root, "") for out in await process.communicate())
    return Answer(stdout, stderr, process.returncode or 0)


def _translate(call: Call, container: Container, path: str) -> str:
    tree = call.machine.tree
    proc = _PROC.match(path)
    if proc and proc[1] != "self":
        process = call.machine.processes.inner(container.vmid, int(proc[1]))
        return str(tree.path(f"proc/{process.pid if process else 0}{path[proc.end(1) :]}"))
    return str(tree.path(f"{container.rootfs}{path}"))
