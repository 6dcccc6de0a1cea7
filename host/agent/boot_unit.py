"""The systemd unit that runs `boot` before guests start, and whether it and the agent are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .ledger import FILE

if TYPE_CHECKING:
    from .root import Root

AGENT = "/usr/local/lib/gpu-topology-agent.pyz"
"""Where the workstation puts this agent, for the commands that it runs by name."""
NAME = "gpu-topology-boot.service"
PATH = f"/etc/systemd/system/{NAME}"
WANTED = f"/etc/systemd/system/multi-user.target.wants/{NAME}"


def unit_text(root: Root) -> str:
    """The unit: after the driver and its daemon, which give out the numbers, and before whatever starts guests.

    udev loads the driver and starts driverctl's units. It is waited for here, since systemd-udev-settle.service would
    hold up the whole boot; `boot` then waits for driverctl.
    """
    return f"""\
[Unit]
Description=Give containers their GPUs by this boot's device numbers
ConditionPathExists={FILE}
After=nvidia-persistenced.service pve-cluster.service
Before=pve-guests.service pve-ha-lrm.service

[Service]
Type=oneshot
ExecStartPre=-/usr/bin/udevadm settle --timeout=60
ExecStart=/usr/bin/python3 {f"{root.folder}".rstrip("/")}{AGENT} --root {root.folder} --format text boot
TimeoutStartSec=300
TimeoutStopSec=10

[Install]
WantedBy=multi-user.target
"""


def is_enabled(root: Root) -> bool:
    """Whether systemd runs it at boot."""
    return root.link_name(WANTED) is not None


def is_installed(root: Root) -> bool:
    """Whether the agent is there, and at the next boot systemd runs the unit as it is written here."""
    return root.at(AGENT).is_file() and root.text(PATH) == unit_text(root) and is_enabled(root)
