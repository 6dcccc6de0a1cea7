"""Build and boot the lab, and keep it until Ctrl-C: `python -m testbed.lab [--shape NAME] [--install]`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from testbed.engine.progress import SetupError, note
from testbed.lab import SERVER, Lab
from testbed.lab.packages import ensure_packages
from testbed.lab.shape import SHAPES


def main() -> int:
    """Check the packages, start, say how to reach it, wait; the answer is the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.lab", description="A hypervisor in QEMU, on a real kernel."
    )
    parser.add_argument("--shape", choices=SHAPES, default=SERVER.name, help="the cards (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="SSH port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--api-port", type=int, default=0, help="port of Proxmox's API (default: a free one)")
    parser.add_argument("--install", action="store_true", help="install Debian packages that are missing")
    parser.add_argument("--check", action="store_true", help="only see to the packages")
    arguments = parser.parse_args()
    try:
        ensure_packages(install=arguments.install)
        if not arguments.check:
            _run(Lab(SHAPES[arguments.shape], ssh_port=arguments.port, api_port=arguments.api_port))
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _run(lab: Lab) -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with lab:
        known = f"-o UserKnownHostsFile={lab.known_hosts}"
        note(f"ssh        ssh -p {lab.ssh_port} -i {lab.identity_file} {known} root@127.0.0.1")
        note(f"host key   {lab.host_key}")
        note(f"api        {lab.api_url}")
        note(f"api token  {lab.api_token}")
        note("Stop it with Ctrl-C.")
        stop.wait()


if __name__ == "__main__":
    sys.exit(main())
