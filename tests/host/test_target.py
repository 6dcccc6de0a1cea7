"""Where the host key and the private key come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncssh
import pytest

from host.errors import HostError
from host.target import target
from topology.config import Host

if TYPE_CHECKING:
    from pathlib import Path

KEY = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()


def _host(**settings: object) -> Host:
    return Host.model_validate({"node": "kpro6", "address": "192.0.2.6", **settings})


def test_an_inline_host_key_is_taken(tmp_path: Path) -> None:
    """host.hostKey is pinned as it stands."""
    assert target(_host(hostKey=KEY), private_key="k", base=tmp_path).host_key == KEY


@pytest.mark.parametrize(("port", "entry"), [(22, "192.0.2.6"), (2222, "[192.0.2.6]:2222")])
def test_a_known_hosts_file_is_read_by_address_and_port(tmp_path: Path, port: int, entry: str) -> None:
    """host.knownHosts gives the key of this address and port, relative to the project."""
    (tmp_path / "known").write_text(f"other {KEY[:-4]}AAAA\n{entry} {KEY}\n")
    found = target(_host(knownHosts="known", port=port), private_key=None, base=tmp_path).host_key
    assert found.split()[:2] == KEY.split()[:2]


def test_an_rsa_key_of_a_known_hosts_file_is_passed_over(tmp_path: Path) -> None:
    """Beside another key it is not taken, and alone it is as good as none."""
    rsa = asyncssh.generate_private_key("ssh-rsa", key_size=2048).export_public_key().decode().strip()
    known = tmp_path / "known"
    known.write_text(f"192.0.2.6 {rsa}\n192.0.2.6 {KEY}\n")
    assert target(_host(knownHosts="known"), private_key=None, base=tmp_path).host_key.split()[:2] == KEY.split()[:2]
    known.write_text(f"192.0.2.6 {rsa}\n")
    with pytest.raises(HostError, match=r"no ed25519 or ECDSA key for 192\.0\.2\.6"):
        target(_host(knownHosts="known"), private_key=None, base=tmp_path)


def test_a_known_hosts_file_without_the_host_is_an_error(tmp_path: Path) -> None:
    """A file with no key for the address says how to get one in."""
    (tmp_path / "known").write_text(f"elsewhere {KEY}\n")
    with pytest.raises(HostError, match=r"no ed25519 or ECDSA key for 192\.0\.2\.6.*connect once with"):
        target(_host(knownHosts="known"), private_key=None, base=tmp_path)


@pytest.mark.parametrize("setting", ["knownHosts", "identityFile"])
def test_a_missing_file_is_named(tmp_path: Path, setting: str) -> None:
    """A file that isn't there is named with its setting."""
    settings = {"hostKey": KEY} if setting == "identityFile" else {}
    with pytest.raises(HostError, match=rf"host\.{setting}: 'gone' cannot be read"):
        target(_host(**{setting: "gone"}, **settings), private_key=None, base=tmp_path)


def test_the_secret_wins_over_the_file(tmp_path: Path) -> None:
    """With both, the stack's secret key is used."""
    (tmp_path / "id").write_text("file")
    host = _host(hostKey=KEY, identityFile="id")
    assert target(host, private_key="secret", base=tmp_path).private_key == "secret"
    assert target(host, private_key=None, base=tmp_path).private_key == "file"
