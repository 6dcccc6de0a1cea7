"""The lab as tests use it: one context manager, with the simulator's surface where both have the same."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from host.errors import TransportError
from host.ssh import Connection, Finished
from host.target import Target
from testbed.engine.cache import digest, find_cache
from testbed.engine.progress import SetupError, step
from testbed.lab.api import ApiServer
from testbed.lab.image import ensure_image
from testbed.lab.qemu import Qemu, hardware
from testbed.lab.shape import SERVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.engine.cache import Cache
    from testbed.lab.shape import Shape

LOOPBACK = "127.0.0.1"
READY = "ready"
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
BOOT_LIMIT_S = 300.0
"""A boot takes 11 s on two idle cores, and minutes where others use them too."""
COMMAND_LIMIT_S = 120.0


class Lab:
    """A hypervisor in QEMU: SSH on loopback, a real kernel behind it.

    The first start of a shape builds the image, boots it and keeps a snapshot; later ones restore that.

    Args:
        shape: the machine's cards and IOMMU.
        ssh_port: the SSH server's port, 0 for a free one.
        api_port: the Proxmox API's port, 0 for a free one; it runs here, beside the machine.
        cache: where images and snapshots are kept.

    Raises:
        SetupError: the image can't be built, or the machine does not boot.
    """

    root = "/"
    """The root folder that a stack file's `host.root` names."""

    def __init__(
        self, shape: Shape = SERVER, *, ssh_port: int = 0, api_port: int = 0, cache: Cache | None = None
    ) -> None:
        self.shape = shape
        self.ssh_port = ssh_port or _free_port()
        self.times: dict[str, float] = {}
        self._cache = cache or find_cache()
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-topology-lab-"))
        self._qemu: Qemu | None = None
        self._connection: Connection | None = None
        self._saved = {READY}
        self._api_port = api_port
        self._api: ApiServer | None = None

    # --------------------------------------------------------------- lifecycle

    def start(self) -> Self:
        """Bring the machine to its first state: everything booted, the service answering."""
        with self._timed("image"):
            self._image = ensure_image(self._cache)
        snapshot = self._snapshot()
        if not snapshot.is_file():
            with step(f"boot the lab ({self.shape.name})"), self._timed("boot"):
                self._boot()
            self._keep(snapshot)
        with step(f"restore the lab ({self.shape.name})"), self._timed("restore"):
            shutil.copyfile(snapshot, self._disk)
            self._qemu = Qemu(self._image, self.shape, self._folder, self.ssh_port, READY)
            self._wake()
        self._api = ApiServer(lambda command, stdin: self.run(command, stdin=stdin), self._folder, self._api_port)
        return self

    def stop(self) -> None:
        """Switch the machine off and forget it."""
        if self._api:
            self._api.stop()
            self._api = None
        self._disconnect()
        if self._qemu:
            self._qemu.stop()
            self._qemu = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def save(self, name: str) -> None:
        """Keep the machine's present state, memory and disk, as long as it runs."""
        self._machine.save(name)
        self._saved.add(name)

    def has(self, name: str) -> bool:
        """Whether a state of this name was saved."""
        return name in self._saved

    def reset(self, name: str = READY) -> None:
        """Go back to a saved state, by default the first one."""
        self._disconnect()
        self._machine.load(name)
        self._wake()

    def reboot(self) -> None:
        """Reboot the host; it has booted when this returns, services may still load."""
        before = self.check(BOOT_ID)
        with suppress(TransportError):
            self.run("systemctl reboot")
        self._disconnect()
        deadline = time.monotonic() + BOOT_LIMIT_S
        while True:
            self._wait_for_banner(deadline)
            with suppress(TransportError):
                if self.check(BOOT_ID) != before:
                    break
            self._disconnect()
            if time.monotonic() > deadline:
                raise SetupError(f"the lab did not reboot within {BOOT_LIMIT_S:.0f} s")
        self.wait_booted()

    def wait_booted(self) -> None:
        """Wait until systemd has started everything; a unit may have failed."""
        self.run("systemctl is-system-running --wait", timeout_s=BOOT_LIMIT_S)

    def wait_served(self) -> None:
        """Wait until the container's server is ready."""
        health = "python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=5)\""
        deadline = time.monotonic() + BOOT_LIMIT_S
        while self.run(f"pct exec 129 -- {health}").status:
            if time.monotonic() > deadline:
                raise SetupError(f"the lab's server was not ready within {BOOT_LIMIT_S:.0f} s")
            time.sleep(0.5)

    # ----------------------------------------------------------------- surface

    @property
    def host_key(self) -> str:
        """The host's public key, one line in authorized_keys format."""
        return self._image.host_key

    @property
    def identity_file(self) -> Path:
        """The private key that root may log in with."""
        return self._image.identity_file

    @property
    def known_hosts(self) -> Path:
        """A known_hosts file with the host's key."""
        path = self._folder / "known_hosts"
        path.write_text(f"[{LOOPBACK}]:{self.ssh_port} {self.host_key}\n")
        return path

    @property
    def api_url(self) -> str:
        """The Proxmox API's address."""
        return self._running_api.url

    @property
    def api_token(self) -> str:
        """An API token, `USER@REALM!NAME=SECRET`."""
        return self._running_api.token

    @property
    def target(self) -> Target:
        """How the program reaches the host."""
        return Target(
            address=LOOPBACK,
            port=self.ssh_port,
            user="root",
            host_key=self.host_key,
            root=self.root,
            private_key=self.identity_file.read_text(),
        )

    @property
    def console(self) -> str:
        """What the kernel and systemd wrote to the serial console."""
        return self._machine.console.read_text(errors="replace")

    def run(self, command: str, *, stdin: bytes = b"", timeout_s: float = COMMAND_LIMIT_S) -> Finished:
        """Run a shell command on the host, as root."""
        if self._connection is None:
            self._connection = Connection(self.target)
        return self._connection.run(command, stdin, timeout_s=timeout_s, on_line=lambda _line: None)

    def check(self, command: str, *, stdin: bytes = b"", timeout_s: float = COMMAND_LIMIT_S) -> str:
        """Run a shell command that must succeed; its standard output without white space around it."""
        done = self.run(command, stdin=stdin, timeout_s=timeout_s)
        if done.status:
            raise RuntimeError(f"`{command}` ended with {done.status} on the lab: {done.stderr.strip() or done.stdout}")
        return done.stdout.strip()

    def read(self, path: str) -> str:
        """A file's text."""
        return self.run(f"cat {path}").stdout

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        self.check(f"mkdir -p $(dirname {path}) && cat > {path}", stdin=text.encode())

    # --------------------------------------------------------------- internals

    @property
    def _machine(self) -> Qemu:
        if self._qemu is None:
            raise RuntimeError("the lab is not running: use it as a context manager")
        return self._qemu

    @property
    def _running_api(self) -> ApiServer:
        if self._api is None:
            raise RuntimeError("the lab is not running: use it as a context manager")
        return self._api

    @property
    def _disk(self) -> Path:
        return self._folder / "disk.qcow2"

    def _snapshot(self) -> Path:
        """Where this shape's snapshot is kept: it needs the same QEMU, the same command line and the same image."""
        version = subprocess.run(["qemu-system-x86_64", "--version"], stdout=subprocess.PIPE, check=True).stdout
        key = digest(version, *hardware(self._image, self.shape))[:12]
        return self._image.folder / f"{READY}-{self.shape.name}-{key}.qcow2"

    def _boot(self) -> None:
        layer = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(self._image.disk), "-F", "raw", str(self._disk)]
        subprocess.run(layer, check=True)
        self._qemu = Qemu(self._image, self.shape, self._folder, self.ssh_port)
        self._wait_for_banner(time.monotonic() + BOOT_LIMIT_S)
        self.wait_booted()
        self.wait_served()

    def _keep(self, snapshot: Path) -> None:
        """Save the booted machine, and switch it off."""
        self._disconnect()
        self._machine.save(READY)
        self._machine.stop()
        partial = snapshot.with_name(f".{snapshot.name}.{self.ssh_port}")
        shutil.move(self._disk, partial)
        partial.replace(snapshot)

    def _wake(self) -> None:
        self._wait_for_banner(time.monotonic() + BOOT_LIMIT_S)
        # The clock stands where the snapshot was taken.
        self.check(f"date --utc --set=@{time.time():.3f}")

    def _wait_for_banner(self, deadline: float) -> None:
        """Wait for sshd's first words: QEMU's network accepts connections for a guest that does not listen yet."""
        while True:
            with suppress(OSError), socket.create_connection((LOOPBACK, self.ssh_port), 1) as line:
                line.settimeout(2)
                if line.recv(4) == b"SSH-":
                    return
            if not self._machine.running or time.monotonic() > deadline:
                raise SetupError(f"no SSH server answered in the lab; its console ends with: {self.console[-800:]}")
            time.sleep(0.1)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.times[name] = time.monotonic() - started


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
