"""Starting, ending, and dying: nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from testbed.simulator import Event, EventKind, Simulator
from testbed.simulator.fixtures import run, wait_until
from tests.simulator.host import marked, marker_of

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]


def test_stop_leaves_nothing() -> None:
    """After the end there is no process, no folder and no listening port, daemons of its commands included."""
    with Simulator() as host:
        marker = marker_of(host)
        run(host, "setsid sleep 600 >&- 2>&- <&- &")
        assert len(list(marked(marker))) >= 2
        folder, port = host.folder, host.ssh_port
    assert not list(marked(marker))
    assert not folder.exists()
    assert subprocess.run(["bash", "-c", f"</dev/tcp/127.0.0.1/{port}"], stderr=-3, check=False).returncode == 1


@contextmanager
def running(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The simulator as a command, once it says that it is up; killed at the latest with the test."""
    command = [sys.executable, "-m", "testbed.simulator", *options]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout
            assert any(line.startswith("Stop it") for line in process.stdout)
            yield process
        finally:
            process.kill()


def test_killed_simulator_leaves_nothing(tmp_path: Path) -> None:
    """When the simulator's process is killed, its janitor ends what it started and removes its folder."""
    with running(tmp_path) as process:
        told = json.loads(next(tmp_path.glob("*/host/bin/simulator.json")).read_text())
        marker = told["socket"].rsplit("-", 1)[1].encode()
        assert list(marked(marker))
        process.kill()
    wait_until(lambda: not list(marked(marker)))
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_command_ends_with_sigterm(tmp_path: Path) -> None:
    """`python -m testbed.simulator` ends cleanly on SIGTERM and keeps a folder that it was given."""
    with running(tmp_path, "--dir", str(tmp_path / "host")) as process:
        process.terminate()
        assert process.wait() == 0
    assert (tmp_path / "host/keys/known_hosts").read_text().startswith("[127.0.0.1]:")
    assert (tmp_path / "host/keys/id_ed25519").stat().st_mode & 0o777 == 0o600
    assert "PROXMOX_VE_API_TOKEN='root@pam!" in (tmp_path / "host/env").read_text()


def test_taken_port_is_told_without_traceback(tmp_path: Path) -> None:
    """A port that something else listens on ends the command with one message, and leaves nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        command = [sys.executable, "-m", "testbed.simulator", "--port", str(other.getsockname()[1])]
        environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "the simulator cannot start" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_given_folder_keeps_its_keys(tmp_path: Path) -> None:
    """A second run in the same folder starts from the found state with the same keys and token."""
    seen = []
    for _ in range(2):
        with Simulator(folder=tmp_path) as host:
            assert "nvidia7" in (host.root / "etc/pve/lxc/129.conf").read_text()
            (host.root / "etc/pve/lxc/129.conf").write_text("")
            seen.append((host.host_key, host.identity_file.read_text(), host.api_token))
    assert seen[0] == seen[1]


def test_a_folder_has_one_simulator(tmp_path: Path) -> None:
    """A second one in the same folder is refused before it touches the first one's files."""
    with Simulator(folder=tmp_path / "simulator") as host:
        with pytest.raises(ValueError, match="another simulator runs in"):
            Simulator(folder=tmp_path / "simulator")
        assert run(host, "pct list").code == 0


def test_foreign_folder_is_refused(tmp_path: Path) -> None:
    """A folder with other files in it is not taken."""
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds something else"):
        Simulator(folder=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_events_are_in_a_file_too(tmp_path: Path) -> None:
    """Every event of the log is a line of events.jsonl."""
    with Simulator(folder=tmp_path) as host:
        run(host, "true")
        count = len(host.log)
        assert len((tmp_path / "events.jsonl").read_text().splitlines()) == count
        assert [e.seq for e in host.log] == list(range(1, count + 1))


def test_listeners_hear_every_event() -> None:
    """A listener is called with each event, in order, as it happens."""
    heard: list[Event] = []
    with Simulator() as host:
        host.listen(heard.append)
        before = len(host.log)
        run(host, "systemctl daemon-reload; systemctl daemon-reload")
        assert heard == host.log[before:]
        assert [e.kind for e in heard].count(EventKind.SYSTEMD_RELOAD) == 2


async def _use() -> tuple[str, Path]:
    async with Simulator("two-functions") as host:
        return host.hostname, host.folder


def test_simulator_is_an_async_context_too() -> None:
    """`async with` starts and ends it without blocking the caller's loop."""
    name, folder = asyncio.run(_use())
    assert name == "kpro6"
    assert not folder.exists()


def test_two_simulators_are_apart() -> None:
    """Two simulators at once share nothing."""
    with Simulator() as one, Simulator("kpro6-split") as two:
        run(one, "pct stop 129")
        assert run(two, "pct status 129").stdout == "status: running\n"
        assert one.ssh_port != two.ssh_port
        assert one.host_key != two.host_key
