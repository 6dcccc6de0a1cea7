from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest

from testbed.engine.plugins._wire import UNKNOWN, has_secret, reveal, secret
from testbed.engine.plugins.command.plugin import CommandPlugin
from tests.plugins.driver import Driver, OperationError, driving
from tests.plugins.ssh_host import PASSWORD, SshHost, listener, ssh_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from testbed.engine.plugins._wire import Props

TOKEN = "command:remote:Command"  # noqa: S105 - a type token


@contextlib.asynccontextmanager
async def _world(root: Path, key: asyncssh.SSHKey | None = None) -> AsyncIterator[tuple[Driver, SshHost]]:
    async with ssh_host(root, key) as host, driving(CommandPlugin(None), TOKEN) as driver:
        yield driver, host


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Runs a scenario with a plugin and a host."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)

    def run(scenario: Callable[[Driver, SshHost], Awaitable[None]]) -> None:
        async def main() -> None:
            async with _world(tmp_path) as (driver, host):
                await scenario(driver, host)

        asyncio.run(main())

    return run


def test_create_runs_the_command_and_returns_its_output(play: Any) -> None:
    """A creation runs `create` and gives both outputs, each without its last newline."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        identifier, outputs = await driver.create(
            {"connection": host.connection(), "create": "echo out; echo; echo err >&2"}
        )
        assert (outputs["stdout"], outputs["stderr"]) == ("out\n", "err")
        assert identifier.startswith("thing")
        assert outputs["create"] == "echo out; echo; echo err >&2"

    play(scenario)


def test_update_runs_update_or_else_create_again(play: Any) -> None:
    """A change runs `update`; without one, `create` runs again."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        inputs = {"connection": host.connection(), "create": "echo C >> log", "delete": "true"}
        identifier, state = await driver.create(inputs)
        state = await driver.update(identifier, state, {**inputs, "delete": "false"})
        await driver.update(identifier, state, {**inputs, "update": "echo U >> log"})
        assert host.read("log") == "C\nC\nU\n"

    play(scenario)


def test_delete_runs_the_old_command_over_the_old_connection(play: Any) -> None:
    """A deletion knows only the state."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        inputs = {"connection": host.connection(), "create": "touch made", "delete": "rm made"}
        identifier, state = await driver.create(inputs)
        await driver.delete(identifier, state)
        assert not host.exists("made")

    play(scenario)


@pytest.mark.parametrize(
    ("change", "diffs", "replaces"),
    [
        ({}, [], []),
        ({"create": "other"}, ["create"], []),
        ({"delete": "other"}, ["delete"], []),
        ({"update": None}, ["update"], []),
        ({"connection": {"host": "other"}}, ["connection"], []),
        ({"environment": {"A": "b"}}, ["environment"], []),
        ({"stdin": UNKNOWN}, ["stdin"], []),
        ({"logging": "none"}, ["logging"], []),
        ({"triggers": ["one", "three"]}, ["triggers"], ["triggers"]),
        ({"triggers": ["one"]}, ["triggers"], ["triggers"]),
        ({"triggers": UNKNOWN}, ["triggers"], ["triggers"]),
        ({"triggers": None, "create": "x"}, ["create", "triggers"], ["triggers"]),
    ],
)
def test_any_change_updates_and_only_triggers_replace(
    play: Any, change: dict[str, Any], diffs: list[str], replaces: list[str]
) -> None:
    """Also with `update` given, other triggers replace; any other input is changed in place."""
    inputs = {"create": "a", "update": "b", "delete": "c", "connection": {"host": "h"}, "triggers": ["one", "two"]}

    async def scenario(driver: Driver, host: SshHost) -> None:
        state = {**inputs, "connection": secret({"host": "h"}), "stdout": "out", "stderr": ""}
        wanted = {name: value for name, value in {**inputs, **change}.items() if value is not None}
        found = await driver.diff(state, wanted)
        assert (sorted(found.diffs), sorted(found.replaces)) == (diffs, replaces)
        assert not (await driver.diff(state, wanted, ignore=list(change))).diffs

    play(scenario)


def test_read_gives_the_state_back_without_reaching_the_host(play: Any) -> None:
    """Refresh sees no drift, and succeeds with the host down."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        state = {"connection": secret({"host": "192.0.2.1"}), "stdout": "x", "stderr": ""}
        inputs = {"connection": secret({"host": "192.0.2.1"})}
        assert await driver.read("id", state, inputs) == ("id", state, inputs)
        assert host.attempts == 0

    play(scenario)


def test_preview_runs_nothing_and_output_is_unknown(play: Any) -> None:
    """A preview of a creation or an update leaves stdout and stderr unknown, with an unknown connection too."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        connection = {"host": UNKNOWN, "privateKey": secret(UNKNOWN)}
        inputs = (await driver.check({"connection": connection, "create": "touch made"})).inputs
        identifier, outputs = await driver.create(inputs, preview=True)
        assert (identifier, outputs["stdout"], outputs["stderr"]) == ("", UNKNOWN, UNKNOWN)
        olds = {"connection": host.connection(), "create": "true", "stdout": "old", "stderr": ""}
        assert (await driver.update("id", olds, inputs, preview=True))["stdout"] == UNKNOWN
        assert host.attempts == 0

    play(scenario)


def test_lines_reach_the_engine_while_the_command_runs(play: Any) -> None:
    """Output is logged line by line as it comes, not when the command has ended."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        command = "echo started; while ! test -e go; do sleep 0.01; done; echo last >&2; printf unended"
        running = asyncio.ensure_future(driver.create({"connection": host.connection(), "create": command}))
        await driver.until_logged("started")
        assert not running.done()
        host.write("go")
        await running
        assert driver.lines[0] == "started"
        assert set(driver.lines[1:]) == {"last", "unended"} or driver.lines[1:] == ["lastunended"]
        assert {record.urn for record in driver.log.records} == {driver.urn}

    play(scenario)


@pytest.mark.parametrize(
    ("logging", "expected"),
    [
        ("none", []),
        ("stdout", ["out"]),
        ("stderr", ["err"]),
        ("stdoutAndStderr", ["err", "out"]),
        (None, ["err", "out"]),
    ],
)
def test_logging_chooses_the_streams(play: Any, logging: str | None, expected: list[str]) -> None:
    """`logging` chooses what is logged, both streams by default; the outputs hold both in any case."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        inputs = {"connection": host.connection(), "create": "echo out; echo err >&2", "logging": logging}
        _, outputs = await driver.create(inputs)
        assert sorted(driver.lines) == expected
        assert (outputs["stdout"], outputs["stderr"]) == ("out", "err")

    play(scenario)


def test_a_failing_command_is_printed_whole_with_its_output(play: Any) -> None:
    """The error carries command text and output even with logging off, and no password."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        with pytest.raises(OperationError) as caught:
            await driver.create(
                {"connection": host.connection(), "create": 'echo "it broke"\nexit 3', "logging": "none"}
            )
        assert str(caught.value) == (
            'Process exited with status 3: running "echo \\"it broke\\"\\nexit 3":\nit broke\n'
        )
        assert PASSWORD not in str(caught.value)

    play(scenario)


def test_a_command_killed_by_a_signal_fails_with_its_name(play: Any) -> None:
    """A signal is an exit status above 128, with the signal's name."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        with pytest.raises(OperationError, match="Process exited with status 137 from signal KILL"):
            await driver.create({"connection": host.connection(), "create": "kill -9 $$"})

    play(scenario)


def test_a_connection_lost_during_the_command_is_an_error(play: Any) -> None:
    """A host that goes away in mid-command leaves no exit status."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        running = asyncio.ensure_future(
            driver.create({"connection": host.connection(), "create": "echo started; sleep 60"})
        )
        await driver.until_logged("started")
        next(iter(host.open)).abort()
        with pytest.raises(OperationError, match="exited without exit status or exit signal"):
            await running

    play(scenario)


def test_stdin_reaches_the_command_and_its_end_too(play: Any) -> None:
    """`stdin` is given whole and then closed; without one, the command reads end of file at once."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        text = "line\n" * 50_000
        _, outputs = await driver.create({"connection": host.connection(), "create": "wc -c", "stdin": text})
        assert outputs["stdout"] == "250000"
        _, outputs = await driver.create({"connection": host.connection(), "create": "wc -c"})
        assert outputs["stdout"] == "0"

    play(scenario)


def test_environment_goes_by_ssh(play: Any) -> None:
    """A server that accepts the variables hands them to the command."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        inputs = {"connection": host.connection(), "create": 'echo "$LANG_X"', "environment": {"LANG_X": "a b"}}
        _, outputs = await driver.create(inputs)
        assert outputs["stdout"] == "a b"

    play(scenario)


def _refuse_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncssh.channel.SSHServerChannel._process_env_request", lambda *_: False)


def test_a_refused_variable_fails_before_the_command_runs(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AcceptEnv on the server, `environment` is a hard error and nothing is run."""
    _refuse_environment(monkeypatch)

    async def scenario(driver: Driver, host: SshHost) -> None:
        inputs = {"connection": host.connection(), "create": "touch made", "environment": {"TP": "4"}}
        with pytest.raises(OperationError, match='could not set environment variable "TP": ssh: setenv failed'):
            await driver.create(inputs)
        assert not host.exists("made")
        assert "AcceptEnv" in driver.logged("error")[0]

    play(scenario)


def test_previous_output_is_offered_on_update(play: Any) -> None:
    """By default an update finds the last output in its environment."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        inputs = {
            "connection": host.connection(),
            "create": "echo first",
            "update": 'echo "was $PULUMI_COMMAND_STDOUT"',
        }
        identifier, state = await driver.create(inputs)
        state = await driver.update(identifier, state, inputs)
        assert state["stdout"] == "was first"
        state = await driver.update(identifier, state, {**inputs, "addPreviousOutputInEnv": False})
        assert state["stdout"] == "was "

    play(scenario)


def test_refused_previous_output_is_a_warning_only(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without AcceptEnv makes every update warn, unless the program asks for no previous output."""
    _refuse_environment(monkeypatch)

    async def scenario(driver: Driver, host: SshHost) -> None:
        inputs = {"connection": host.connection(), "create": "echo done"}
        identifier, state = await driver.create(inputs)
        assert (await driver.update(identifier, state, inputs))["stdout"] == "done"
        assert ["PULUMI_COMMAND_STDOUT" in line for line in driver.logged("warning")] == [True]
        await driver.update(identifier, state, {**inputs, "addPreviousOutputInEnv": False})
        assert len(driver.logged("warning")) == 1

    play(scenario)


def test_every_command_has_a_connection_of_its_own_that_stays_open(play: Any) -> None:
    """Three commands are three connections, open until the plugin ends."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        for _ in range(3):
            await driver.create({"connection": host.connection(), "create": "true"})
        assert (host.attempts, len(host.open)) == (3, 3)

    play(scenario)


def test_another_host_key_is_refused_after_every_retry(play: Any) -> None:
    """A pinned key that differs fails like any handshake: dialled once more than the limit."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
        connection = host.connection(hostKey=other, dialErrorLimit=2)
        with pytest.raises(
            OperationError, match="after 2 failed attempts: ssh: handshake failed: ssh: host key mismatch"
        ):
            await driver.create({"connection": connection, "create": "touch made"})
        assert host.attempts == 3
        assert driver.lines == ["Dial 1/2 failed: retrying", "Dial 2/2 failed: retrying"]
        assert not host.exists("made")

    play(scenario)


def test_without_a_host_key_nothing_is_checked(play: Any) -> None:
    """An unset hostKey takes any key."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        _, outputs = await driver.create({"connection": host.connection(hostKey=None), "create": "echo in"})
        assert outputs["stdout"] == "in"

    play(scenario)


def test_an_rsa_host_key_fails_against_a_modern_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned RSA key is asked for by ssh-rsa alone, which a server without SHA-1 does not sign."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)

    async def main() -> None:
        async with _world(tmp_path, asyncssh.generate_private_key("ssh-rsa")) as (driver, host):
            with pytest.raises(OperationError, match="handshake failed"):
                await driver.create({"connection": host.connection(), "create": "true"})
            await driver.create({"connection": host.connection(hostKey=None), "create": "true"})

    asyncio.run(main())


def test_a_closed_port_is_dialled_to_the_limit(play: Any) -> None:
    """Nobody listening: the limit and one more dials, then the last error."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
            with pytest.raises(OperationError) as caught:
                await driver.create({"connection": host.connection(port=port, dialErrorLimit=1), "create": "true"})
        assert str(caught.value) == (f"after 1 failed attempts: dial tcp 127.0.0.1:{port}: connect: connection refused")

    play(scenario)


def test_a_host_that_comes_up_between_dials_is_used(play: Any) -> None:
    """Retrying bridges a host that is not there yet, such as after a reboot."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
            running = asyncio.ensure_future(
                driver.create({"connection": host.connection(port=port, dialErrorLimit=-1), "create": "echo up"})
            )
            await driver.until_logged("Dial 1/inf failed: retrying")
        async with listener(lambda reader, writer: _pipe(reader, writer, host.port), port=port):
            assert (await running)[1]["stdout"] == "up"

    play(scenario)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
        sink.close()
        with contextlib.suppress(ConnectionError):
            await sink.wait_closed()

    await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))


def test_a_silent_peer_hangs_until_it_is_cancelled(play: Any) -> None:
    """A peer that accepts and says nothing holds the operation, which perDialTimeout does not bound; Cancel ends it."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        accepted = asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set()

        async with listener(say_nothing) as silent:
            port = silent.sockets[0].getsockname()[1]
            connection = host.connection(port=port, perDialTimeout=1)
            running = asyncio.ensure_future(driver.create({"connection": connection, "create": "true"}))
            await accepted.wait()
            await driver.cancel()
            with pytest.raises(OperationError, match="cancelled"):
                await running

    play(scenario)


def _with_password(host: SshHost, word: str) -> Props:
    return {**host.connection(), "password": word}


def test_a_wrong_password_is_refused_and_never_shown(play: Any) -> None:
    """The error names the methods that were tried, not the password."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        with pytest.raises(OperationError) as caught:
            await driver.create({"connection": _with_password(host, "wrong secret"), "create": "true"})
        assert "unable to authenticate, attempted methods [none password]" in str(caught.value)
        assert "wrong secret" not in str(caught.value)

    play(scenario)


def test_a_private_key_opens_the_connection(play: Any) -> None:
    """A key works, an encrypted one with its password; without the password it fails before any dial."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        plain = host.client_key.export_private_key().decode()
        locked = host.client_key.export_private_key("pkcs8-pem", passphrase="sesame").decode()  # noqa: S106
        await driver.create({"connection": host.connection(password=None, privateKey=plain), "create": "true"})
        unlocked = host.connection(password=None, privateKey=locked, privateKeyPassword="sesame")
        await driver.create({"connection": unlocked, "create": "true"})
        for wrong, reason in [({}, "Passphrase"), ({"privateKeyPassword": "no"}, "decrypt")]:
            with pytest.raises(OperationError, match=reason):
                await driver.create({"connection": {**host.connection(), "privateKey": locked, **wrong}, "create": "x"})
        with pytest.raises(OperationError, match="cannot use the private key"):
            await driver.create({"connection": host.connection(privateKey="garbage"), "create": "true"})
        assert host.attempts == 2

    play(scenario)


def test_a_stale_agent_socket_fails_even_with_a_key(play: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SSH_AUTH_SOCK is dialled whatever else is given, and a dead one ends the operation at once."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "gone"))
        key = host.client_key.export_private_key().decode()
        with pytest.raises(OperationError, match=r"dial unix .*gone: connect: no such file or directory"):
            await driver.create({"connection": host.connection(privateKey=key), "create": "true"})
        assert host.attempts == 0

    play(scenario)


def test_an_agent_is_used_only_without_a_private_key(play: Any, tmp_path: Path) -> None:
    """The agent's keys open the connection; beside a private key they are not offered."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        path = str(tmp_path / "agent")
        connection = host.connection(password=None, agentSocketPath=path)
        async with listener(lambda reader, writer: _agent(reader, writer, host.client_key), path=path):
            await driver.create({"connection": connection, "create": "true"})
            stranger = asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()
            with pytest.raises(OperationError, match="unable to authenticate"):
                await driver.create({"connection": {**connection, "privateKey": stranger}, "create": "true"})

    play(scenario)


async def _agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: asyncssh.SSHKey) -> None:
    """An SSH agent with one key: list it (11 -> 12) and sign with it (13 -> 14)."""

    def string(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            request = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            if request[0] == 11:
                answer = b"\x0c" + (1).to_bytes(4, "big") + string(key.public_data) + string(b"key")
            else:
                blob = 5 + int.from_bytes(request[1:5], "big")
                data = request[blob + 4 : blob + 4 + int.from_bytes(request[blob : blob + 4], "big")]
                answer = b"\x0e" + string(key.sign(data, key.sig_algorithms[0]))
            writer.write(string(answer))
            await writer.drain()


def test_one_proxy_hop_leads_to_the_host(play: Any) -> None:
    """With `proxy`, the host is reached through the proxy, whose own key is checked too."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        proxied = host.connection(proxy=host.connection())
        _, outputs = await driver.create({"connection": proxied, "create": "echo through"})
        assert outputs["stdout"] == "through"
        assert host.attempts == 2
        wrong = host.connection(proxy=_with_password(host, "wrong"))
        with pytest.raises(OperationError, match=r"^proxy: after 0 failed attempts: ssh: handshake failed"):
            await driver.create({"connection": wrong, "create": "true"})
        nowhere = host.connection(port=1, proxy=host.connection())
        with pytest.raises(OperationError, match=r"^proxy: .*rejected: connect failed"):
            await driver.create({"connection": nowhere, "create": "true"})

    play(scenario)


def test_only_the_connection_is_always_secret(play: Any) -> None:
    """Check and outputs mark `connection` secret; other inputs only if they came secret; output never."""

    async def scenario(driver: Driver, host: SshHost) -> None:
        inputs = {"connection": host.connection(), "create": "cat", "stdin": secret("word")}
        checked = (await driver.check(inputs)).inputs
        _, outputs = await driver.create(checked)
        assert {name for name, value in checked.items() if has_secret(value)} == {"connection", "stdin"}
        assert {name for name, value in outputs.items() if has_secret(value)} == {"connection", "stdin"}
        assert outputs["stdout"] == "word"
        assert reveal(outputs["connection"]) == {**host.connection(), "perDialTimeout": 15}

    play(scenario)
