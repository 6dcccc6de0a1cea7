"""The SSH transport: one pinned connection, and errors that a person can act on."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import asyncssh
import pytest

from host.errors import TransportError
from host.ssh import Connection

if TYPE_CHECKING:
    from host.target import Target
    from tests.host.conftest import LoopbackServer


def _ignore(_line: str) -> None:
    pass


def _run(target: Target, command: str = "true") -> None:
    with Connection(target) as connection:
        connection.run(command, b"", timeout_s=10, on_line=_ignore)


def test_a_command_gets_its_input_and_returns_both_streams(server: LoopbackServer) -> None:
    """Standard input arrives, and output, error lines and exit status come back."""
    lines: list[str] = []
    with Connection(server.target) as connection:
        done = connection.run("cat; echo one >&2; echo two >&2; exit 3", b"hello", timeout_s=10, on_line=lines.append)
    assert (done.status, done.stdout) == (3, "hello")
    assert lines == ["one", "two"]


def test_commands_of_several_threads_share_one_connection(server: LoopbackServer) -> None:
    """Four threads ask at once, and the server sees one connection."""
    results: list[str] = []
    with Connection(server.target) as connection:

        def ask(number: int) -> None:
            done = connection.run(f"echo {number}", b"", timeout_s=10, on_line=_ignore)
            results.append(done.stdout.strip())

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sorted(results) == ["0", "1", "2", "3"]
    assert server.connections == 1


def test_another_host_key_is_refused(server: LoopbackServer) -> None:
    """A server that shows another key than the pinned one gets no command, and the message says what to compare."""
    with pytest.raises(TransportError, match=r"another host key than the pinned one.*ssh-keygen -lf"):
        _run(server.with_other_host_key())


def test_a_host_key_that_is_no_key_is_named(server: LoopbackServer) -> None:
    """A pinned key that cannot be parsed is an error about the setting, before any connection."""
    with pytest.raises(TransportError, match=r"host\.hostKey is one line"):
        _run(replace(server.target, host_key="ssh-ed25519 nonsense"))
    assert server.connections == 0


def test_a_refused_login_says_where_the_key_goes(server: LoopbackServer) -> None:
    """A key that the server doesn't know is an error that names the settings and authorized_keys."""
    stranger = asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()
    with pytest.raises(TransportError, match=r"login was refused.*sshPrivateKey.*authorized_keys"):
        _run(replace(server.target, private_key=stranger))


def test_a_closed_port_is_named(server: LoopbackServer) -> None:
    """Nothing listens: the error names the address and the settings to check."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(TransportError, match=rf"root@127\.0\.0\.1:{port}: cannot connect"):
            _run(replace(server.target, port=port))


def test_a_silent_host_fails_in_time(server: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that accepts and says nothing ends in an error, not a wait for ever."""
    monkeypatch.setattr("host.ssh.CONNECT_TIMEOUT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(TransportError, match="no SSH server answered within"):
            _run(replace(server.target, port=silent.getsockname()[1]))


def test_a_cut_connection_is_no_answer(server: LoopbackServer) -> None:
    """A connection lost while a command runs is a transport error that says repeating is safe."""
    with Connection(server.target) as connection:
        threading.Timer(0.5, server.drop).start()
        with pytest.raises(TransportError, match="safe to repeat"):
            connection.run("echo x >&2; sleep 1", b"", timeout_s=10, on_line=_ignore)


def test_a_lost_connection_is_opened_again(server: LoopbackServer) -> None:
    """The next command after a cut connects anew."""
    with Connection(server.target) as connection:
        connection.run("true", b"", timeout_s=10, on_line=_ignore)
        server.drop()
        with pytest.raises(TransportError):
            connection.run("sleep 1", b"", timeout_s=10, on_line=_ignore)
        assert connection.run("echo back", b"", timeout_s=10, on_line=_ignore).stdout == "back\n"


def test_a_command_that_never_ends_is_given_up(server: LoopbackServer) -> None:
    """A command past its time is an error that says its effect is unknown."""
    with pytest.raises(TransportError, match="unknown"), Connection(server.target) as connection:
        connection.run("sleep 3", b"", timeout_s=0.2, on_line=_ignore)


def test_the_private_key_is_not_shown(server: LoopbackServer) -> None:
    """A target's repr, as it may end up in a log, holds no private key."""
    assert "PRIVATE" not in repr(server.target)
