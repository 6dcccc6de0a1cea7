"""The simulated hypervisor as tests and the demo use it: one context manager."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Self

from testbed.loop import LoopThread
from testbed.simulator import janitor
from testbed.simulator.api import ProxmoxApi
from testbed.simulator.control import Control
from testbed.simulator.digest import contents, digest_of, own_files
from testbed.simulator.events import Event, EventKind, EventLog
from testbed.simulator.faults import Faults
from testbed.simulator.folder import Folder
from testbed.simulator.guesthome import GuestHome
from testbed.simulator.machine import HostMachine
from testbed.simulator.ssh import SshServer
from testbed.simulator.state import HostState, load_state
from testbed.simulator.tree import Tree
from testbed.simulator.waiting import HeldPipes, Signal
from testbed.simulator.world import World

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from testbed.simulator.sysfs import Function


class Simulator:
    """A hypervisor on loopback: SSH with SFTP, Proxmox's API, and a private root folder.

    Everything runs on an event loop in a thread of its own; every method may be called from any thread.

    Args:
        state: a shipped state's name, a state file's path, or a state.
        ssh_port: the SSH server's port, 0 for a free one.
        api_port: the API's port, 0 for a free one.
        folder: where to keep the root folder and `keys` (`known_hosts`, `id_ed25519`, `api_token`); a temporary one
            by default. Keys found there are used again.

    Raises:
        ValueError: the folder holds something else.
    """

    def __init__(
        self,
        state: str | Path | HostState = "kpro6",
        *,
        ssh_port: int = 0,
        api_port: int = 0,
        folder: Path | None = None,
    ) -> None:
        self._state = state if isinstance(state, HostState) else load_state(state)
        self._ports = (ssh_port, api_port)
        self._folder = Folder(folder)
        self._marker = secrets.token_hex(8)
        self._loop = LoopThread()
        self._janitor: subprocess.Popen[bytes] | None = None
        self._build()

    # --------------------------------------------------------------- lifecycle

    def start(self) -> Self:
        """Boot the host and listen."""
        self._janitor = janitor.watch(self._marker, self.folder if self._folder.temporary else None)
        self._loop.start()
        try:
            self._loop.call(self._start())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Power the host off, end every process it started, and remove the temporary folder."""
        if self._loop.running:
            self._loop.call(self._stop())
        while janitor.sweep(self._marker):
            pass
        if self._loop.running:
            self._loop.call(self._ssh.ended())
            self._loop.stop()
        if self._janitor:
            self._janitor.kill()
            self._janitor.communicate()
            self._janitor = None
        self._folder.remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        del error
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *error: object) -> None:
        del error
        await asyncio.to_thread(self.stop)

    # ----------------------------------------------------------------- surface

    @property
    def folder(self) -> Path:
        """Where the root folder, keys and the event log are."""
        return self._folder.path

    @property
    def root(self) -> Path:
        """The private root folder, links resolved."""
        return self._tree.root

    @property
    def hostname(self) -> str:
        """The node's name."""
        return self._state.hostname

    @property
    def ssh_port(self) -> int:
        """The SSH server's port on 127.0.0.1."""
        return self._ssh.port

    @property
    def host_key(self) -> str:
        """The host's public key, one line in authorized_keys format."""
        return self._folder.host_key

    @property
    def known_hosts(self) -> Path:
        """A known_hosts file with the host's key."""
        return self._folder.known_hosts

    @property
    def identity_file(self) -> Path:
        """The private key that root may log in with."""
        return self._folder.identity_file

    @property
    def api_url(self) -> str:
        """The Proxmox API's address."""
        return self._api.url

    @property
    def api_certificate(self) -> Path:
        """The API's self-signed certificate."""
        return self._folder.keys / "api.crt"

    @property
    def api_token(self) -> str:
        """An API token, `USER@REALM!NAME=SECRET`."""
        return self._api.token

    @property
    def log(self) -> list[Event]:
        """Everything that happened so far."""
        return self._loop.run(self._events)

    @property
    def connections(self) -> int:
        """How many SSH connections were accepted."""
        return self._ssh.connections

    @property
    def commands(self) -> int:
        """How many commands were run over SSH."""
        return self._ssh.commands

    def listen(self, callback: Callable[[Event], None]) -> None:
        """Call a function after each further event, on the simulator's own thread: it must not wait for the host."""
        self._loop.run(lambda: self._log.listeners.append(callback))

    def events(self, *kinds: EventKind) -> list[Event]:
        """The events of some kinds, oldest first."""
        return [event for event in self.log if event.kind in kinds]

    def reboot(self, *, uvm_major: int | None = None, caps_major: int | None = None) -> None:
        """Reboot the host; it is up again when this returns, services may still load.

        Args:
            uvm_major: what this boot gives nvidia-uvm, which a kernel may give differently each time; the state's by
                default.
            caps_major: the same for nvidia-caps.
        """
        given = {"uvm_major": uvm_major, "caps_major": caps_major}
        self._loop.call(self._reboot({name: major for name, major in given.items() if major is not None}))

    def snapshot(self) -> str:
        """A digest of everything that the program could change, its own files and logs aside."""
        return digest_of(self.contents())

    def contents(self) -> dict[str, str]:
        """What the snapshot is made of, by path or name: to see what differs."""
        return self._loop.run(lambda: contents(self._machine))

    def own_files(self) -> list[str]:
        """The files on the host that are the program's own: agent, ledger, lock."""
        return own_files(self.root)

    def functions(self) -> dict[str, Function]:
        """Every PCI function by address, as the simulated kernel has it."""
        return self._loop.run(lambda: dict(self._machine.kernel.functions))

    def service_port(self, container: int | None, port: int) -> int | None:
        """The loopback port of what listens on a container's port, None where nothing does."""
        return self._loop.run(lambda: self._machine.launcher.port(container, port))

    # --------------------------------------------------------------- internals

    def _build(self) -> None:
        socket = f"gpu-topology-simulator-{self._marker}"
        mark = {janitor.VARIABLE: self._marker}
        self._tree = Tree(self._folder.root)
        self._log = EventLog(self.folder / "events.jsonl")
        self._changed = Signal()
        self.faults = Faults(self, self._loop.run)
        world = World(state=self._state, tree=self._tree, log=self._log, faults=self.faults, changed=self._changed)
        self._home = GuestHome(self._folder.host, self._tree, socket)
        environment = {**self._home.environment(self._tree), **mark}
        self._machine = HostMachine(world, socket, mark, environment)
        held = HeldPipes()
        self._control = Control(self._machine, held)
        self._ssh = SshServer(self._tree, self._log, environment, self._folder, held)
        self._api = ProxmoxApi(self._machine)
        self._log.listeners.append(self._after)

    async def _start(self) -> None:
        await self._control.start()
        await self._machine.install()
        await self._ssh.start(self._ports[0])
        await self._api.start(self._folder.keys, self._ports[1])
        self._folder.tell(self.ssh_port, self.api_url, self.api_token)

    async def _stop(self) -> None:
        await self._ssh.stop()
        await self._api.stop()
        await self._machine.power_off()
        await self._control.stop()
        self._log.close()

    async def _reboot(self, majors: dict[str, int]) -> None:
        await self._ssh.stop()
        await self._machine.power_off()
        janitor.sweep(self._marker)
        await self._machine.boot(majors)
        await self._ssh.start(self._ssh.port)

    def _events(self) -> list[Event]:
        self._machine.watch.look()
        return self._log.all()

    def _after(self, event: Event) -> None:
        if event.kind == self.faults.cut_after:
            self.faults.cut_after = None
            self.cut_ssh()

    # ------------------------------------------------------- faults reach here

    def cut_ssh(self) -> None:
        """Drop every SSH connection."""
        self._ssh.cut("fault")

    def set_silent(self, *, on: bool) -> None:
        """Accept TCP on the SSH port and say nothing, or serve again; not from the event loop."""
        self._loop.call(self._ssh.set_silent(on=on))

    def set_disk_full(self, *, on: bool) -> None:
        """Let writes below /etc and /var fail with ENOSPC, or be well again."""
        self._tree.disk_full = on
        if on:
            self._home.full.touch()
        else:
            self._home.full.unlink(missing_ok=True)

    def start_foreign(self, address: str, container: int | None) -> int:
        """Start a process that nobody manages on a GPU; gives its PID."""
        return self._machine.start_foreign(address, container)

    def end_foreign(self, pid: int) -> None:
        """End a process."""
        self._machine.processes.end(pid)

    def faults_changed(self) -> None:
        """Let everything that waits look again."""
        self._changed.notify()
