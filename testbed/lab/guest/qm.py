"""Stand-in for Proxmox's `qm`: it keeps Proxmox's files, and a running VM is a process that holds real VFIO groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.simulator.pveconf import (
    GuestError,
    check_entry,
    choose_devices,
    entries_on,
    first_function,
    parse_mappings,
    properties,
)

from .proxmox import VMS, changes, config_path, fail, guest_ids, locked, option, read_config, show, unknown

if TYPE_CHECKING:
    from testbed.simulator.pveconf import GuestConfig

LOCKS = Path("/run/lock/qemu-server")
RUN = Path("/run/qemu-server")
DEVICES = Path("/sys/bus/pci/devices")
MAPPINGS = Path("/etc/pve/mapping/pci.cfg")
VFIO = Path("/sys/bus/pci/drivers/vfio-pci")
VFIO_WORD = "vfio-pci,host="


def main() -> None:
    """Run one command."""
    match sys.argv[1:]:
        case ["config", vmid]:
            show(read_config(config_path(VMS, vmid), "qemu"))
        case ["start", vmid]:
            start(_known(vmid))
        case ["stop", vmid]:
            _stop(_known(vmid), signal.SIGKILL, 30)
        case ["shutdown", vmid, *options]:
            _stop(_known(vmid), signal.SIGTERM, float(option(options, "timeout", "60")))
        case ["set", vmid, *options] if options:
            _set(_known(vmid), options)
        case arguments:
            unknown("qm", arguments)


def _known(vmid: str) -> str:
    config_path(VMS, vmid)
    return vmid


def _pid(vmid: str) -> int:
    """The VM's process, 0 where it does not run."""
    try:
        pid = int((RUN / f"{vmid}.pid").read_text())
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (OSError, ValueError):
        return 0
    return pid if vmid in words else 0


def _status(vmid: str) -> str:
    return "running" if _pid(vmid) else "stopped"


def start(vmid: str) -> None:
    """Start a VM: check its mappings against the live devices, bring those to vfio-pci, run the process."""
    if _status(vmid) == "running":
        fail(f"VM {vmid} already running")
    path = VMS / f"{vmid}.conf"
    with locked(LOCKS / f"lock-{vmid}.conf"):
        config = read_config(path, "qemu")
        if config.apply_pending():
            path.write_text(config.text())
    try:
        devices = _choose(config)
    except GuestError as error:
        fail(str(error))
    for device in devices:
        _give_to_vfio(device)
    RUN.mkdir(exist_ok=True)
    kvm = ["/usr/bin/kvm", "-id", vmid, "-pidfile", str(RUN / f"{vmid}.pid")]
    for device in devices:
        kvm += ["-device", f"{VFIO_WORD}{device}"]
    scope = ["systemd-run", "--quiet", "--scope", "--slice=qemu.slice", f"--unit={vmid}", "--", *kvm, "-daemonize"]
    with subprocess.Popen(scope, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as ran:
        said = ran.stdout.read().decode() if ran.stdout else ""
    if ran.returncode:
        fail(f"start failed: QEMU exited with code {ran.returncode}\n{said}")


def _choose(config: GuestConfig) -> list[str]:
    """One device for each hostpci entry."""
    wanted = [
        (key, [[device] for device in _alternatives(value)])
        for key, value in config.items()
        if key.startswith("hostpci") and key[7:].isdigit()
    ]
    return choose_devices(wanted, _users())


def _alternatives(value: str) -> list[str]:
    """The devices that an entry may take: all of its mapping on this node, compared with the mapping first."""
    asked = properties(value, "host")
    if "mapping" not in asked:
        return [_existing(asked["host"])]
    name = asked["mapping"]
    mappings = parse_mappings(MAPPINGS.read_text()) if MAPPINGS.is_file() else {}
    entries = entries_on(mappings, name, os.uname().nodename)
    for entry in entries:
        check_entry(name, entry, _live(DEVICES / first_function(entry["path"])))
    return [_existing(entry["path"]) for entry in entries]


def _existing(path: str) -> str:
    """The device that a path names, by its first function."""
    function = first_function(path if path.count(":") > 1 else f"0000:{path}")
    if not (DEVICES / function).exists():
        raise GuestError(f"no PCI device found for '{path}'")
    return function


def _live(base: Path) -> dict[str, str] | None:
    """What a mapping is compared with."""
    if not base.exists():
        return None
    group = base / "iommu_group"
    return {
        "id": f"{_hex(base, 'vendor')}:{_hex(base, 'device')}",
        "subsystem-id": f"{_hex(base, 'subsystem_vendor')}:{_hex(base, 'subsystem_device')}",
    } | ({"iommugroup": group.resolve().name} if group.exists() else {})


def _hex(base: Path, name: str) -> str:
    return (base / name).read_text().strip().removeprefix("0x")


def _users() -> dict[str, int]:
    """The VM that has a device, by address."""
    running = {vmid: pid for vmid in guest_ids(VMS) if (pid := _pid(str(vmid)))}
    return {
        word.removeprefix(VFIO_WORD): vmid
        for vmid, pid in running.items()
        for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if word.startswith(VFIO_WORD)
    }


def _give_to_vfio(device: str) -> None:
    """Bring every function of the slot to vfio-pci by its ids, as Proxmox does: new_id also claims its likes."""
    for base in sorted(DEVICES.glob(f"{device.rpartition('.')[0]}.*")):
        function = base.name
        if not VFIO.is_dir():
            subprocess.run(["modprobe", "vfio-pci"], check=True)
        if (VFIO / function).exists():
            continue
        with suppress(FileExistsError):
            (VFIO / "new_id").write_text(f"{_hex(base, 'vendor')} {_hex(base, 'device')}")
        if (base / "driver").exists():
            (base / "driver" / "unbind").write_text(function)
        if not (VFIO / function).exists():
            (VFIO / "bind").write_text(function)


def _stop(vmid: str, number: signal.Signals, limit: float) -> None:
    pid = _pid(vmid)
    if not pid:
        return
    os.kill(pid, number)
    deadline = time.monotonic() + limit
    while _pid(vmid):
        if time.monotonic() > deadline:
            fail("VM quit/powerdown failed - got timeout")
        time.sleep(0.1)


def _set(vmid: str, options: list[str]) -> None:
    values, delete = changes(options)
    if unusual := [key for key in {*values, *delete} if not (key.startswith("hostpci") and key[7:].isdigit())]:
        unknown("qm", ["set", vmid, *(f"-{key}" for key in unusual)])
    path = VMS / f"{vmid}.conf"
    with locked(LOCKS / f"lock-{vmid}.conf"):
        config = read_config(path, "qemu")
        if _status(vmid) == "running":
            config.postpone(values, delete)
        else:
            config.change(values, delete)
        path.write_text(config.text())
