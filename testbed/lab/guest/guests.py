"""Stand-in for Proxmox's pve-guests.service: start the guests that are to start with the host."""

from __future__ import annotations

import subprocess

from .proxmox import CONTAINERS, VMS, guest_ids, setting


def main() -> None:
    """Start containers and VMs with `onboot: 1`; one that fails keeps no other from starting."""
    for folder, tool in ((CONTAINERS, "pct"), (VMS, "qm")):
        for vmid in guest_ids(folder):
            if setting(folder / f"{vmid}.conf", "onboot") == "1":
                subprocess.run([tool, "start", str(vmid)], check=False)
