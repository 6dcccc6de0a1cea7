"""SSH connections as pulumi-command makes them: its defaults, its retries and its error texts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import asyncssh

from testbed.engine.plugins._resource import ProviderError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from testbed.engine.plugins._wire import Props, Value

    Status = Callable[[str], Awaitable[None]]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Endpoint:
    """Where and as whom to connect: the `connection` input, or its `proxy`."""

    host: str
    port: int
    user: str
    password: str | None = field(repr=False)
    private_key: str | None = field(repr=False)
    private_key_password: str | None = field(repr=False)
    agent_socket: str | None
    host_key: str | None
    dial_error_limit: int  # -1: no limit
    per_dial_timeout: int  # seconds for the TCP connection, 0: no limit
    proxy: Endpoint | None

    @classmethod
    def parse(cls, value: Value) -> Endpoint:
        """The endpoint of a checked, revealed input."""
        props: Props = value if isinstance(value, dict) else {}
        proxy = props.get("proxy")
        return cls(
            host=str(props["host"]),
            port=_integer(props.get("port"), 22),
            user=str(props.get("user") or "root"),
            password=_text(props.get("password")),
            private_key=_text(props.get("privateKey")),
            private_key_password=_text(props.get("privateKeyPassword")),
            agent_socket=_text(props.get("agentSocketPath")),
            host_key=_text(props.get("hostKey")),
            dial_error_limit=_integer(props.get("dialErrorLimit"), 10),
            per_dial_timeout=_integer(props.get("perDialTimeout"), 15),
            proxy=None if proxy is None else cls.parse(proxy),
        )


def _text(value: Value) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: Value, default: int) -> int:
    return int(value) if isinstance(value, (int, float)) else default


def delays() -> Iterator[float]:
    """Seconds to wait between dials: 0.1, half as much again each time, at most 5 (Pulumi's retry package)."""
    delay = 0.1
    while True:
        yield min(delay, 5.0)
        delay *= 1.5


async def dial(endpoint: Endpoint, status: Status) -> asyncssh.SSHClientConnection:
    """An authenticated connection, dialled anew after any failure up to the endpoint's limit.

    As in the real plugin, unusable credentials fail at once, while a refused handshake (wrong host key, wrong
    password) is dialled again like a closed port.
    """
    async with contextlib.AsyncExitStack() as agents:
        attempt = await _prepare(endpoint, agents)
        if endpoint.proxy is None:
            return await _retry("Dial", endpoint.dial_error_limit, status, lambda: attempt(None))
        try:
            proxy_attempt = await _prepare(endpoint.proxy, agents)
            limit = endpoint.proxy.dial_error_limit
            proxy = await _retry("Dial proxy", limit, status, lambda: proxy_attempt(None))
            return await _retry("Dial from proxy", endpoint.dial_error_limit, status, lambda: attempt(proxy))
        except ProviderError as error:
            raise ProviderError(f"proxy: {error}") from error


async def _retry(what: str, limit: int, status: Status, attempt: Callable[[], Awaitable[_T]]) -> _T:
    for tried, delay in enumerate(delays()):
        try:
            return await attempt()
        except ProviderError as error:
            if limit >= 0 and tried + 1 > limit:
                raise ProviderError(f"after {tried} failed attempts: {error}") from error
        await status(f"{what} {tried + 1}/{'inf' if limit < 0 else limit} failed: retrying")
        await asyncio.sleep(delay)
    raise AssertionError("the delays never end")


async def _prepare(
    endpoint: Endpoint, agents: contextlib.AsyncExitStack
) -> Callable[[asyncssh.SSHClientConnection | None], Awaitable[asyncssh.SSHClientConnection]]:
    """One dial with everything that can fail without a network already done; its argument is the tunnel."""
    host_keys = _host_keys(endpoint.host_key)
    client_keys = await _client_keys(endpoint, agents)

    async def attempt(tunnel: asyncssh.SSHClientConnection | None) -> asyncssh.SSHClientConnection:
        sock = None if tunnel is not None else await _tcp(endpoint)
        try:
            return await asyncssh.connect(
                endpoint.host,
                endpoint.port,
                sock=sock,
                tunnel=tunnel,
                username=endpoint.user,
                password=endpoint.password,
                client_keys=client_keys or None,
                agent_path=None,
                # A fixed key is asked for by its own algorithm, ssh-rsa included, which modern servers no longer sign.
                server_host_key_algs=[key.get_algorithm() for key in host_keys] or (),
                known_hosts=(host_keys, [], []) if host_keys else None,
                config=None,
                # Nothing bounds the handshake: a peer that accepts and stays silent hangs the real plugin too.
                login_timeout=0,
            )
        except (asyncssh.Error, OSError) as error:
            raise ProviderError(_handshake_error(endpoint, error)) from error

    return attempt


async def _tcp(endpoint: Endpoint) -> socket.socket:
    loop = asyncio.get_running_loop()
    where = f"{endpoint.host}:{endpoint.port}"
    try:
        async with asyncio.timeout(endpoint.per_dial_timeout or None):
            found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, address)
            except BaseException:
                sock.close()
                raise
            return sock
    except TimeoutError as error:
        raise ProviderError(f"dial tcp {where}: i/o timeout") from error
    except socket.gaierror as error:
        raise ProviderError(f"dial tcp: lookup {endpoint.host}: no such host") from error
    except OSError as error:
        raise ProviderError(f"dial tcp {where}: connect: {_reason(error)}") from error


def _host_keys(line: str | None) -> list[asyncssh.SSHKey]:
    """The key that the server must have, from one line as in authorized_keys; none means any key is taken."""
    if line is None:
        return []
    try:
        return [asyncssh.import_public_key(line.strip())]
    except asyncssh.KeyImportError as error:
        raise ProviderError(f"ssh: cannot use the host key: {error}") from error


async def _client_keys(
    endpoint: Endpoint, agents: contextlib.AsyncExitStack
) -> Sequence[asyncssh.SSHKey | asyncssh.SSHKeyPair]:
    """The keys to offer; an agent is reached even when a private key then goes before it."""
    own: list[asyncssh.SSHKey] = []
    if endpoint.private_key is not None:
        try:
            own = [asyncssh.import_private_key(endpoint.private_key, endpoint.private_key_password)]
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            raise ProviderError(f"ssh: cannot use the private key: {error}") from error
    path = endpoint.agent_socket or os.environ.get("SSH_AUTH_SOCK")
    if not path:
        return own
    try:
        agent = await agents.enter_async_context(await asyncssh.connect_agent(path))
    except OSError as error:
        raise ProviderError(f"dial unix {path}: connect: {_reason(error)}") from error
    return own or await agent.get_keys()


def _handshake_error(endpoint: Endpoint, error: Exception) -> str:

    match error:
        case asyncssh.HostKeyNotVerifiable():
            return "ssh: handshake failed: ssh: host key mismatch"
        case asyncssh.PermissionDenied():
            tried = ["publickey"] if endpoint.private_key or endpoint.agent_socket else []
            tried += ["password"] if endpoint.password else []
            methods = " ".join(["none", *tried])
            return (
                "ssh: handshake failed: ssh: unable to authenticate, "
                f"attempted methods [{methods}], no supported methods remain"
            )
        case asyncssh.ChannelOpenError():
            return f"ssh: rejected: connect failed ({error.reason})"
        case asyncssh.ConnectionLost():
            return "ssh: handshake failed: EOF"
        case asyncssh.DisconnectError():
            return f"ssh: handshake failed: ssh: {error.reason}"
        case _:
            return f"ssh: handshake failed: {error}"


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno else str(error)
