"""Run the simulated hypervisor until Ctrl-C: `python -m testbed.simulator [--state kpro6]`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from testbed.simulator import Simulator


def main() -> int:
    """Start, say how to reach it, and wait."""
    parser = argparse.ArgumentParser(prog="python -m testbed.simulator", description="A simulated hypervisor.")
    parser.add_argument("--state", default="kpro6", help="a shipped state's name or a state file (default: kpro6)")
    parser.add_argument("--port", type=int, default=0, help="SSH port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--api-port", type=int, default=0, help="port of Proxmox's API (default: a free one)")
    parser.add_argument("--dir", type=Path, help="folder for the root folder and keys (default: a temporary one)")
    arguments = parser.parse_args()
    try:
        simulator = Simulator(
            arguments.state, ssh_port=arguments.port, api_port=arguments.api_port, folder=arguments.dir
        )
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        simulator.start()
    except OSError as error:
        sys.stderr.write(f"the simulator cannot start: {error}\n")
        return 1
    try:
        sys.stdout.write(_reach(simulator))
        sys.stdout.flush()
        stop.wait()
    finally:
        simulator.stop()
    return 0


def _reach(simulator: Simulator) -> str:
    known = f"-o UserKnownHostsFile={simulator.known_hosts}"
    ssh = f"ssh -p {simulator.ssh_port} -i {simulator.identity_file} {known} root@127.0.0.1"
    return (
        f"host       {simulator.hostname}, root folder {simulator.root}\n"
        f"ssh        {ssh} nvidia-smi -L\n"
        f"host key   {simulator.host_key}\n"
        f"api        {simulator.api_url}\n"
        f"api token  {simulator.api_token}\n"
        "Stop it with Ctrl-C.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
