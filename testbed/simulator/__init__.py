"""A hypervisor that is not there: SSH, SFTP and Proxmox's API over loopback, with a private root folder.

It knows what a kernel, Proxmox, systemd, driverctl, the nvidia driver and SGLang do with GPUs that change hands; the
QEMU lab proves what it claims of the kernel. No root rights, nothing beyond 127.0.0.1, Linux only.
"""

from testbed.simulator.events import Event, EventKind
from testbed.simulator.faults import Faults
from testbed.simulator.simulator import Simulator
from testbed.simulator.state import HostState, load_state

__all__ = ["Event", "EventKind", "Faults", "HostState", "Simulator", "load_state"]
