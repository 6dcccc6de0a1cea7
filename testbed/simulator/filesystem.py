"""The folders and files that a Proxmox host has before any device is looked at."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.simulator.state import HostState
    from testbed.simulator.tree import Tree

FOLDERS = (
    "etc/driverctl.d",
    "etc/modprobe.d",
    "etc/modules-load.d",
    "etc/pve/mapping",
    "etc/systemd/system",
    "proc",
    "root",
    "run/lock/lxc",
    "run/lock/qemu-server",
    "run/qemu-server",
    "sys/module",
    "tmp",
    "usr/lib/systemd/system",
    "usr/local/lib",
    "usr/local/sbin",
    "var/lib/lxc",
    "var/log",
)
NOT_KEPT = ("proc", "run", "tmp")  # file systems that a reboot empties
CPUS_PER_NODE = 64


def lay_out(tree: Tree, state: HostState) -> None:
    """Make what is on disk: Proxmox's folders with their links, and the state's own files."""
    for folder in FOLDERS:
        tree.path(folder).mkdir(parents=True, exist_ok=True)
    for kind in ("lxc", "qemu-server"):
        tree.path(f"etc/pve/nodes/{state.hostname}/{kind}").mkdir(parents=True, exist_ok=True)
        tree.link(f"etc/pve/{kind}", f"nodes/{state.hostname}/{kind}")
    tree.link("etc/pve/local", f"nodes/{state.hostname}")
    tree.link("var/run", "../run")
    tree.link("var/lock", "../run/lock")
    tree.put("etc/hostname", f"{state.hostname}\n")
    tree.put("etc/pve/.version", '{"starttime":1,"clinfo":1,"vmlist":1}\n')
    for name, text in state.files.items():
        tree.put(name, text)


def boot_files(tree: Tree, state: HostState, boot_time: int, boot_id: str) -> None:
    """Make what a kernel shows after its start, apart from devices."""
    for folder in NOT_KEPT:
        shutil.rmtree(tree.path(folder), ignore_errors=True)
    for folder in FOLDERS:
        tree.path(folder).mkdir(parents=True, exist_ok=True)
    kernel = state.kernel
    tree.put("proc/cmdline", f"{kernel.cmdline}\n")
    tree.put("proc/version", f"Linux version {kernel.release} (build@proxmox) #1 SMP PREEMPT_DYNAMIC\n")
    tree.put("proc/stat", f"cpu  0 0 0 0 0 0 0 0 0 0\nbtime {boot_time}\n")
    tree.put("proc/uptime", "3600.00 100000.00\n")
    tree.put("proc/sys/kernel/osrelease", f"{kernel.release}\n")
    tree.put("proc/sys/kernel/hostname", f"{state.hostname}\n")
    tree.put("proc/sys/kernel/random/boot_id", f"{boot_id}\n")
    tree.put("proc/devices", _majors(state))
    tree.put("proc/modules", "".join(f"{m} 16384 0 - Live 0x0000000000000000\n" for m in kernel.modules))


def nodes_files(tree: Tree, state: HostState) -> None:
    """Make /sys/devices/system/node and the module parameters that tell of SEV-SNP."""
    last = state.numa_nodes - 1
    for name in ("online", "possible", "has_cpu"):
        tree.put(f"sys/devices/system/node/{name}", "0\n" if last == 0 else f"0-{last}\n")
    for node in range(state.numa_nodes):
        first = node * CPUS_PER_NODE
        tree.put(f"sys/devices/system/node/node{node}/cpulist", f"{first}-{first + CPUS_PER_NODE - 1}\n")
    for name in ("sev", "sev_es", "sev_snp"):
        tree.put(f"sys/module/kvm_amd/parameters/{name}", "Y\n" if state.kernel.snp else "N\n")


def _majors(state: HostState) -> str:
    rows = [
        (1, "mem"),
        (10, "misc"),
        (195, "nvidia"),
        (195, "nvidia-modeset"),
        (195, "nvidiactl"),
        (state.nvidia.caps_major, "nvidia-caps"),
        (state.nvidia.uvm_major, "nvidia-uvm"),
    ]
    lines = "".join(f"{major:3d} {name}\n" for major, name in sorted(rows))
    return f"Character devices:\n{lines}\nBlock devices:\n259 blkext\n"
