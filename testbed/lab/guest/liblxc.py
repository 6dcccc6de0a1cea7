"""Turn a container's Proxmox configuration into one for liblxc, as Proxmox does at each start."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from testbed.simulator.pveconf import GuestConfig, properties

from .proxmox import fail

LXC = Path("/var/lib/lxc")

BASE = """\
lxc.include = /usr/share/lxc/config/common.conf
lxc.uts.name = {name}
lxc.rootfs.path = dir:{rootfs}
lxc.net.0.type = empty
lxc.cgroup.relative = 0
lxc.cgroup.dir.monitor = lxc.monitor/{vmid}
lxc.cgroup.dir.container = lxc/{vmid}
lxc.cgroup.dir.container.inner = ns
lxc.signal.halt = SIGRTMIN+3
lxc.tty.max = 0
"""


def write_lxc_config(vmid: str, config: GuestConfig) -> None:
    """Write /var/lib/lxc/VMID/config; devN become device nodes of their own, raw lines go through as they are."""
    rootfs = LXC / vmid / "rootfs"
    text = BASE.format(name=config.get("hostname", f"CT{vmid}"), rootfs=rootfs, vmid=vmid)
    if config.get("unprivileged") == "1":
        text += "lxc.include = /usr/share/lxc/config/userns.conf\n"
        text += "lxc.idmap = u 0 100000 65536\nlxc.idmap = g 0 100000 65536\n"
    for key, value in config.items():
        if key.startswith("dev") and key[3:].isdigit():
            text += _pass_device(vmid, value)
        elif key.startswith("lxc."):
            text += f"{key} = {value}\n"
    (LXC / vmid / "config").write_text(text)


def _pass_device(vmid: str, value: str) -> str:
    """Make a node with the device's numbers of this moment, mount it, and allow just it."""
    asked = properties(value, "path")
    path = Path("/", asked["path"])
    try:
        status = path.stat()
    except FileNotFoundError:
        fail(f"Device {path} does not exist")
    kind = "c" if stat.S_ISCHR(status.st_mode) else "b" if stat.S_ISBLK(status.st_mode) else ""
    if not kind:
        fail(f"{path} is not a device")
    node = LXC / vmid / "passthrough" / path.relative_to("/")
    node.parent.mkdir(parents=True, exist_ok=True)
    node.unlink(missing_ok=True)
    os.mknod(node, stat.S_IFMT(status.st_mode) | 0o660, status.st_rdev)
    node.chmod(int(asked.get("mode", "0660"), 8))
    numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    inner = path.relative_to("/")
    return f"lxc.mount.entry = {node} {inner} none bind,create=file\nlxc.cgroup2.devices.allow = {kind} {numbers} rw\n"
