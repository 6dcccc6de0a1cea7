"""Where a hypervisor is and how to get in: address, pinned host key, credentials."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from host.errors import HostError

if TYPE_CHECKING:
    from topology.config import Host


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One SSH server; `host_key` is a line in authorized_keys format."""

    address: str
    port: int
    user: str
    host_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Target(Hop):
    """A hypervisor. Without a private key the SSH agent is used; the key is kept out of repr."""

    root: str
    private_key: str | None = field(default=None, repr=False)
    proxy: Hop | None = None


def target(host: Host, *, private_key: str | None, base: Path) -> Target:
    """Resolve a stack file's `host`; paths in it are relative to `base`.

    Raises:
        HostError: a named file is missing, or holds no key for this address.
    """
    return Target(
        address=host.address,
        port=host.port,
        user=host.user,
        host_key=host.host_key or _known_host_key(host, base),
        root=host.root,
        private_key=private_key or _identity(host, base),
        proxy=None if host.proxy is None else Hop(**host.proxy.model_dump()),
    )


def _identity(host: Host, base: Path) -> str | None:
    if host.identity_file is None:
        return None
    return _read(base, host.identity_file, "host.identityFile", "the private key file of your SSH login")


def _known_host_key(host: Host, base: Path) -> str:
    import asyncssh  # noqa: PLC0415  0.25 s, needed by few stacks here

    named = str(host.known_hosts)
    hosts = asyncssh.import_known_hosts(_read(base, named, "host.knownHosts", "a known_hosts file"))
    # As in the configuration: pulumi-command fails with an RSA key.
    keys = [key for key in hosts.match(host.address, "", host.port)[0] if key.get_algorithm() != "ssh-rsa"]
    if not keys:
        entry = host.address if host.port == 22 else f"[{host.address}]:{host.port}"
        raise HostError(
            f"host.knownHosts: {named!r} has no ed25519 or ECDSA key for {entry}. Rule: host keys are pinned. Fix: "
            f"connect once with `ssh -p {host.port} {host.user}@{host.address}`, compare the fingerprint, or set "
            "host.hostKey instead",
        )
    best = min(keys, key=lambda key: key.get_algorithm() != "ssh-ed25519")
    return best.export_public_key().decode().strip()


def _read(base: Path, named: str, setting: str, what: str) -> str:
    path = base / Path(named).expanduser()
    try:
        return path.read_text()
    except OSError as error:
        raise HostError(f"{setting}: {named!r} cannot be read ({error.strerror}). Fix: name {what}") from error
