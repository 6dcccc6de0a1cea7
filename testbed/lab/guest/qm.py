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

from testbed.simulator.pveconf import GuestConfig, parse_mappings, properties

from .proxmox import VMS, changes, config_path, fail, guest_ids, locked, main_section, option, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCKS = Path("/run/lock/qemu-server")
RUN = Path("/run/qemu-server")
DEVICES = Path("/sys/bus/pci/devices")
MAPPINGS = Path("/etc/pve/mapping/pci.cfg")
VFIO = Path("/sys/bus/pci/drivers/vfio-pci")


def main() -> None:
    """Run one command."""
    match sys.argv[1:]:
        case ["config", vmid]:
            sys.stdout.write(main_section(config_path(VMS, vmid, "VM")))
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
    config_path(VMS, vmid, "VM")
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
        config = GuestConfig.parse(path.read_text(), "qemu")
        if config.apply_pending():
            path.write_text(config.text())
    devices = list(_choose(config))
    for device in devices:
        _give_to_vfio(device)
    RUN.mkdir(exist_ok=True)
    kvm = ["/usr/bin/kvm", "-id", vmid, "-pidfile", str(RUN / f"{vmid}.pid")]
    for device in devices:
        kvm += ["-device", f"vfio-pci,host={device}"]
    scope = ["systemd-run", "--quiet", "--scope", "--slice=qemu.slice", f"--unit={vmid}", "--", *kvm, "-daemonize"]
    with subprocess.Popen(scope, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as ran:
        said = ran.stdout.read().decode() if ran.stdout else ""
    if ran.returncode:
        fail(f"start failed: QEMU exited with code {ran.returncode}\n{said}")


def _choose(config: GuestConfig) -> Iterator[str]:
    """One device for each hostpci entry, the first free one of those that it may take."""
    taken: set[str] = set()
    for key, value in config.items():
        if key.startswith("hostpci") and key[7:].isdigit():
            free = [device for device in _alternatives(value) if device not in taken and not _held(device)]
            if not free:
                fail(f"could not find a free device for '{key}: {value}'")
            taken.add(free[0])
            yield free[0]


def _alternatives(value: str) -> list[str]:
    """The devices that an entry may take: all of its mapping on this node, compared with the mapping first."""
    asked = properties(value, "host")
    if "mapping" not in asked:
        return _functions(asked["host"])[:1]
    name, node = asked["mapping"], os.uname().nodename
    mapping = parse_mappings(MAPPINGS.read_text()).get(name) if MAPPINGS.is_file() else None
    if mapping is None:
        fail(f"PCI device mapping not found for '{name}' on node '{node}'")
    entries = [entry for entry in mapping.entries if entry.get("node") == node]
    for entry in entries:
        _assert_valid(name, entry)
    return [path for entry in entries for path in _functions(entry["path"])[:1]]


def _functions(path: str) -> list[str]:
    """The functions that a path names: itself, or all of a slot."""
    full = path if path.count(":") > 1 else f"0000:{path}"
    return [full] if "." in full else sorted(place.name for place in DEVICES.glob(f"{full}.*"))


def _assert_valid(name: str, entry: dict[str, str]) -> None:
    """Compare a mapping's entry with the device, as Proxmox does before each start."""
    functions = _functions(entry["path"])
    if not functions or not (DEVICES / functions[0]).exists():
        fail(f"PCI device mapping '{name}' invalid: pci device '{entry['path']}' not found")
    base = DEVICES / functions[0]
    group = (base / "iommu_group").resolve().name if (base / "iommu_group").exists() else ""
    found = {
        "id": f"{_hex(base, 'vendor')}:{_hex(base, 'device')}",
        "subsystem-id": f"{_hex(base, 'subsystem_vendor')}:{_hex(base, 'subsystem_device')}",
        "iommugroup": group,
    }
    for key, value in found.items():
        if entry.get(key) not in (None, value):
            fail(
                f"PCI device mapping invalid (hardware probably changed): '{key}' does not match for '{name}' "
                f"({entry[key]} != {value})"
            )


def _hex(base: Path, name: str) -> str:
    return (base / name).read_text().strip().removeprefix("0x")


def _held(device: str) -> bool:
    """Whether another VM of ours has the device."""
    return any(
        f"vfio-pci,host={device}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for vmid in guest_ids(VMS)
        if (pid := _pid(str(vmid)))
    )


def _give_to_vfio(device: str) -> None:
    """Bring every function of the slot to vfio-pci by its ids, as Proxmox does: new_id also claims its likes."""
    for function in _functions(device.rpartition(".")[0]):
        base = DEVICES / function
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
        config = GuestConfig.parse(path.read_text(), "qemu")
        if _status(vmid) == "running":
            config.postpone(values, delete)
        else:
            config.change(values, delete)
        path.write_text(config.text())
