"""Stand-in for `nvidia-persistenced`: a daemon that holds every card of the driver."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def main() -> None:
    """Open the cards, then go on in the background, as its unit's Type=forking expects."""
    for node in [Path("/dev/nvidiactl"), *sorted(Path("/dev").glob("nvidia[0-9]*"))]:
        os.open(node, os.O_RDWR)
    if os.fork():
        os._exit(0)
    signal.sigwait({signal.SIGTERM})
