"""The simulator's own folder: the private root, keys that are used again, and files that say how to reach it."""

from __future__ import annotations

import os
import shutil
import tempfile
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

import asyncssh

MARK = ".gpu-topology-simulator"
MEMORY = Path("/dev/shm")  # noqa: S108  a private folder is made in it


class Folder:
    """A given folder, or a temporary one, which `remove` takes away.

    Raises:
        ValueError: the folder holds something else than a simulator's files.
    """

    def __init__(self, given: Path | None) -> None:
        self.temporary = given is None
        # Absolute, since a command on the simulated host has another working directory than the simulator.
        self.path = (given or _temporary()).absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        if any(self.path.iterdir()) and not (self.path / MARK).is_file():
            raise ValueError(f"{self.path} holds something else than a simulator's files: give an empty folder")
        self._lock = (self.path / MARK).open("w")
        try:
            flock(self._lock, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(f"another simulator runs in {self.path}: stop that one, or give another folder") from None
        for place in (self.root, self.host):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        self.keys.mkdir(mode=0o700, exist_ok=True)
        for key in (self.host_key_file, self.identity_file):
            if not key.is_file():
                made = asyncssh.generate_private_key("ssh-ed25519", comment="simulator")
                key.touch(mode=0o600)
                made.write_private_key(str(key))
                made.write_public_key(f"{key}.pub")

    @property
    def root(self) -> Path:
        """The private root folder."""
        return self.path / "root"

    @property
    def host(self) -> Path:
        """What a shell on the simulated host finds on its PATH."""
        return self.path / "host"

    @property
    def keys(self) -> Path:
        """The folder with keys, certificate and token."""
        return self.path / "keys"

    @property
    def host_key_file(self) -> Path:
        """The host's private key."""
        return self.keys / "host_key"

    @property
    def identity_file(self) -> Path:
        """The private key that root may log in with."""
        return self.keys / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """A known_hosts file with the host's key."""
        return self.keys / "known_hosts"

    @property
    def host_key(self) -> str:
        """The host's public key, one line in authorized_keys format."""
        return Path(f"{self.host_key_file}.pub").read_text("utf-8").strip()

    def tell(self, ssh_port: int, api_url: str, api_token: str) -> None:
        """Write how to reach the host: a known_hosts file, and what a shell needs to run Pulumi against it.

        A stack of its own goes with it: the simulated host forgets everything when it is started again, and a state
        that outlived it would speak of a host that is no more.
        """
        state = self.path.resolve() / "state"
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir()
        self.known_hosts.write_text(f"[127.0.0.1]:{ssh_port} {self.host_key}\n")
        environment = self.path / "env"
        environment.touch(mode=0o600)
        environment.write_text(
            f"export PROXMOX_VE_ENDPOINT={api_url}/\n"
            f"export PROXMOX_VE_API_TOKEN='{api_token}'\n"
            "export PROXMOX_VE_INSECURE=true\n"
            f"export PULUMI_BACKEND_URL=file://{state}\n"
            "export PULUMI_CONFIG_PASSPHRASE=simulator\n"
        )

    def remove(self) -> None:
        """Let others have the folder; remove a temporary one."""
        self._lock.close()
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def _temporary() -> Path:
    """Make a temporary folder, in memory where programs may be started from there: a boot writes hundreds of files."""
    usable = "TMPDIR" not in os.environ and MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    if usable and os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        usable = False
    return Path(tempfile.mkdtemp(prefix="gpu-topology-simulator-", dir=MEMORY if usable else None))
