"""pytest fixtures around the simulator, to be imported by a conftest, and a client for its SSH server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import asyncssh
import pytest

from testbed.simulator.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from testbed.simulator.state import HostState


@dataclass(frozen=True)
class Ran:
    """What a command over SSH gave; `code` is minus a signal's number, or None where the connection was lost."""

    code: int | None
    stdout: str
    stderr: str


def connection(simulator: Simulator, **options: object) -> AbstractAsyncContextManager[asyncssh.SSHClientConnection]:
    """Connect as the program does: root's key, the host key pinned; `options` go to asyncssh."""
    known = asyncssh.import_known_hosts(f"[127.0.0.1]:{simulator.ssh_port} {simulator.host_key}\n")
    wanted = {"known_hosts": known, "client_keys": [str(simulator.identity_file)], "username": "root", "config": None}
    wanted |= {"agent_path": None, **options}
    return asyncssh.connect("127.0.0.1", simulator.ssh_port, **wanted)


def run(simulator: Simulator, command: str, text: str = "") -> Ran:
    """Run a command on the simulated host over a connection of its own."""
    return asyncio.run(_run(simulator, command, text))


async def _run(simulator: Simulator, command: str, text: str) -> Ran:
    async with connection(simulator) as client:
        done = await client.run(command, input=text, timeout=60)
        return Ran(done.returncode, str(done.stdout), str(done.stderr))


def wait_until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """Wait for something that the host does by itself.

    Raises:
        TimeoutError: it did not happen.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {condition}")
        time.sleep(0.02)


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    """kpro6 as it was found."""
    with Simulator("kpro6") as host:
        yield host


@pytest.fixture
def simulate() -> Iterator[Callable[[str | Path | HostState], Simulator]]:
    """Start a simulator in a state of one's choice; it ends with the test."""
    started: list[Simulator] = []

    def start(state: str | Path | HostState) -> Simulator:
        host = Simulator(state).start()
        started.append(host)
        return host

    yield start
    for host in started:
        host.stop()
