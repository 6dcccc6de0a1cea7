"""Stand-in for Proxmox's `pct`: it keeps Proxmox's files and drives the real LXC."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from .proxmox import (
    CONTAINERS,
    changes,
    config_path,
    fail,
    locked,
    option,
    quiet,
    read_config,
    show,
    unknown,
)

LOCKS = Path("/run/lock/lxc")


def main() -> None:
    """Run one command."""
    match sys.argv[1:]:
        case ["config", vmid]:
            show(read_config(config_path(CONTAINERS, vmid), "lxc"))
        case ["push", vmid, source, target, *options]:
            _push(_running(vmid), Path(source), target, int(option(options, "perms", "0644"), 8))
        case ["set", vmid, *options] if options:
            _set(_known(vmid), options)
        case [verb, vmid, *options]:
            _switch(verb, _known(vmid), option(options, "timeout", "60"))
        case arguments:
            unknown("pct", arguments)


def _switch(verb: str, vmid: str, timeout: str) -> None:
    match verb:
        case "start":
            start(vmid)
        case "stop":
            _stop(vmid, "--kill")
        case "shutdown":
            _stop(vmid, "--nokill", "--timeout", timeout)
        case "reboot":
            _stop(vmid, "--nokill", "--timeout", timeout)
            start(vmid)
        case _:
            unknown("pct", [verb, vmid])


def _known(vmid: str) -> str:
    config_path(CONTAINERS, vmid)
    return vmid


def _running(vmid: str) -> str:
    if _status(_known(vmid)) != "running":
        fail("can only push files to a running CT")
    return vmid


def _status(vmid: str) -> str:
    # The monitor's command socket is there as long as the container runs.
    sockets = Path("/proc/net/unix").read_text()
    return "running" if f"@/var/lib/lxc/{vmid}/command" in sockets else "stopped"


def start(vmid: str) -> None:
    """Start a container as Proxmox does: configuration for liblxc, then a systemd service that is its monitor."""
    from .liblxc import write_lxc_config  # noqa: PLC0415  as read_config's import

    if _status(vmid) == "running":
        fail(f"CT {vmid} already running")
    path = CONTAINERS / f"{vmid}.conf"
    with locked(LOCKS / f"pve-config-{vmid}.lock"):
        config = read_config(path, "lxc")
        if config.apply_pending():
            path.write_text(config.text())
        write_lxc_config(vmid, config)
    service = f"pve-container@{vmid}.service"
    quiet("systemctl", "reset-failed", service)
    if not quiet("systemctl", "start", service) or not _wait(vmid, "running", 60):
        journal = ["journalctl", "-q", "-u", service, "-n", "20", "-o", "cat"]
        said = subprocess.run(journal, stdout=subprocess.PIPE, text=True, check=False).stdout
        fail(f"startup for container '{vmid}' failed\n{said}")


def _stop(vmid: str, *how: str) -> None:
    if _status(vmid) != "running":
        fail(f"CT {vmid} not running")
    stopped = quiet("lxc-stop", "--name", vmid, *how)
    if not stopped or not _wait(vmid, "stopped", 30):
        fail(f"container {vmid} did not stop")
    # The service ends after its container; a start right behind would find it still stopping.
    quiet("systemctl", "stop", f"pve-container@{vmid}.service")


def _wait(vmid: str, state: str, limit: float) -> bool:
    deadline = time.monotonic() + limit
    while _status(vmid) != state:
        failed = state == "running" and quiet("systemctl", "is-failed", f"pve-container@{vmid}.service")
        if failed or time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _inside(vmid: str, path: str) -> Path:
    """A path in the container as its processes see it."""
    pid = subprocess.run(["lxc-info", "-n", vmid, "-p", "-H"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(f"/proc/{pid.stdout.strip()}/root", path.lstrip("/"))


def _push(vmid: str, source: Path, target: str, mode: int) -> None:
    place = _inside(vmid, target)
    shutil.copyfile(source, place)
    place.chmod(mode)


def _set(vmid: str, options: list[str]) -> None:
    values, delete = changes(options)
    if unusual := [key for key in {*values, *delete} if not (key.startswith("dev") and key[3:].isdigit())]:
        unknown("pct", ["set", vmid, *(f"-{key}" for key in unusual)])
    for value in values.values():
        node = value.split(",")[0].removeprefix("path=")
        if not Path("/", node).exists():
            fail(f"Device {node} does not exist")
    path = CONTAINERS / f"{vmid}.conf"
    with locked(LOCKS / f"pve-config-{vmid}.lock"):
        config = read_config(path, "lxc")
        if _status(vmid) == "running":
            config.postpone(values, delete)
        else:
            config.change(values, delete)
        path.write_text(config.text())
