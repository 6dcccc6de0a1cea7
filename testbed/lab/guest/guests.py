"""Stand-in for Proxmox's pve-guests.service: start the guests that are to start with the host."""

from __future__ import annotations

import subprocess

from .proxmox import CONTAINERS, VMS, guest_ids, read_config


def main() -> None:
    """Start containers and VMs with `onboot: 1`; one that fails keeps no other from starting."""
    for folder, kind, tool in ((CONTAINERS, "lxc", "pct"), (VMS, "qemu", "qm")):
        for vmid in guest_ids(folder):
            if read_config(folder / f"{vmid}.conf", kind).get("onboot") == "1":
                subprocess.run([tool, "start", str(vmid)], check=False)
