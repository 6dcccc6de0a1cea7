"""The SSH server: exec, SFTP, keys, environment, dropped connections."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import asyncssh
import pytest

from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import connection, run, wait_until

if TYPE_CHECKING:
    from testbed.simulator import Simulator


def test_command_runs_in_the_private_root(simulator: Simulator) -> None:
    """A command's folder is the private root, and its shims come before the machine's own commands."""
    done = run(simulator, "pwd; command -v pct; ls -d ./sys ./etc/pve")
    lines = done.stdout.split()
    assert lines[0] == str(simulator.root)
    assert lines[1].startswith(str(simulator.folder))
    assert lines[2:] == ["./etc/pve", "./sys"]


def test_streams_and_exit_code_pass_through(simulator: Simulator) -> None:
    """Standard input, output, error and the exit code are the command's."""
    done = run(simulator, "cat; echo oops >&2; exit 7", "hello")
    assert (done.stdout, done.stderr, done.code) == ("hello", "oops\n", 7)


def test_big_input_and_output_pass_unharmed(simulator: Simulator) -> None:
    """A megabyte in and out arrives whole."""
    text = "0123456789abcde\n" * 65536
    assert run(simulator, "cat", text).stdout == text


def test_command_killed_by_a_signal_says_so(simulator: Simulator) -> None:
    """A command that a signal ends gives the signal's number."""
    assert run(simulator, "kill -TERM $$").code == -signal.SIGTERM


def test_command_need_not_read_its_input(simulator: Simulator) -> None:
    """A command may end without reading what it is sent."""
    assert run(simulator, "exit 3", "x" * 1_000_000).code == 3


def test_sftp_writes_relative_to_the_root(simulator: Simulator) -> None:
    """SFTP's relative and absolute paths both start at the private root."""

    async def upload() -> None:
        async with connection(simulator) as client, client.start_sftp_client() as sftp:
            async with sftp.open("usr/local/lib/relative", "wb") as file:
                await file.write(b"one")
            async with sftp.open("/usr/local/lib/absolute", "wb") as file:
                await file.write(b"two")

    asyncio.run(upload())
    folder = simulator.root / "usr/local/lib"
    assert (folder / "relative").read_bytes() == b"one"
    assert (folder / "absolute").read_bytes() == b"two"


def test_wrong_host_key_is_seen_by_the_client(simulator: Simulator) -> None:
    """A client that pins another key refuses the connection."""
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    known = asyncssh.import_known_hosts(f"[127.0.0.1]:{simulator.ssh_port} {other}")

    async def connect() -> None:
        async with connection(simulator, known_hosts=known):
            pass

    with pytest.raises(asyncssh.HostKeyNotVerifiable):
        asyncio.run(connect())


def test_unknown_client_key_is_refused(simulator: Simulator) -> None:
    """Only root's own key gets in."""
    stranger = asyncssh.generate_private_key("ssh-ed25519")

    async def connect() -> None:
        async with connection(simulator, client_keys=[stranger]):
            pass

    with pytest.raises(asyncssh.PermissionDenied):
        asyncio.run(connect())


def test_environment_is_not_accepted(simulator: Simulator) -> None:
    """A variable that the client sends does not reach the command, as with sshd's defaults."""

    async def ask() -> str:
        async with connection(simulator) as client:
            done = await client.run("echo ${SECRET-none}", env={"SECRET": "x"})
            return str(done.stdout)

    assert asyncio.run(ask()) == "none\n"


def test_connections_and_commands_are_counted(simulator: Simulator) -> None:
    """The counters tell connections and commands apart."""

    async def two() -> None:
        async with connection(simulator) as client:
            await client.run("true")
            await client.run("true")

    asyncio.run(two())
    run(simulator, "true")
    assert (simulator.connections, simulator.commands) == (2, 3)


def test_dropped_connection_hangs_up_on_the_command(simulator: Simulator) -> None:
    """When the connection drops, the running command gets SIGHUP."""

    async def drop() -> None:
        async with connection(simulator) as client:
            script = "trap 'echo hup > ./tmp/hup; exit' HUP; echo ready; while :; do sleep 0.05; done"
            process = await client.create_process(script)
            assert await process.stdout.readline() == "ready\n"
            await asyncio.to_thread(simulator.faults.ssh_cut)
            await client.wait_closed()

    asyncio.run(drop())
    wait_until((simulator.root / "tmp/hup").exists)
    assert simulator.events(EventKind.SSH_DROP)


def test_cut_comes_right_after_the_chosen_event(simulator: Simulator) -> None:
    """A cut asked for after an event drops the connection when that event happens, and only once."""
    simulator.faults.ssh_cut(after=EventKind.SYSTEMD_RELOAD)
    assert run(simulator, "systemctl is-system-running").stdout == "running\n"
    assert run(simulator, "systemctl daemon-reload; sleep 20; echo whole").stdout == ""
    assert run(simulator, "systemctl daemon-reload; echo well").stdout == "well\n"


def test_silent_host_accepts_and_says_nothing(simulator: Simulator) -> None:
    """A silent host takes the TCP connection but sends no banner; later it serves again on the same port."""
    simulator.faults.silent_host()

    async def listen() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", simulator.ssh_port)
        try:
            return await asyncio.wait_for(reader.read(1), 0.3)
        finally:
            writer.close()

    with pytest.raises(TimeoutError):
        asyncio.run(listen())
    simulator.faults.clear()
    assert run(simulator, "echo well").stdout == "well\n"
