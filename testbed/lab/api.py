"""Proxmox's API beside the lab: the simulator's, on a host that is read and written over SSH."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from testbed.loop import LoopThread
from testbed.simulator.api import ProxmoxApi
from testbed.simulator.pveconf import GuestConfig, GuestError, Mapping, parse_mappings
from testbed.simulator.state import load_state
from testbed.simulator.vms import MAPPINGS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from host.ssh import Finished
    from testbed.simulator.machine import HostMachine

FOLDERS = {"lxc": "etc/pve/lxc", "qemu": "etc/pve/qemu-server"}
LOOK = """
import json, os
from pathlib import Path

def texts(folder):
    return {p.stem: p.read_text() for p in Path(folder).glob("*.conf")}

def alive(path):
    return Path("/proc", path.read_text()).exists()

sockets = Path("/proc/net/unix").read_text()
mappings = Path("/etc/pve/mapping/pci.cfg")
containers = texts("/etc/pve/lxc")
print(json.dumps({
    "lxc": containers,
    "qemu": texts("/etc/pve/qemu-server"),
    "mappings": mappings.read_text() if mappings.exists() else "",
    "running": [c for c in containers if f"@/var/lib/lxc/{c}/command" in sockets]
    + [p.stem for p in Path("/run/qemu-server").glob("*.pid") if alive(p)],
    "pci": {
        p.name: {n: (p / n).read_text().strip()[2:] for n in NAMES}
        | {"iommu_group": os.readlink(p / "iommu_group").rpartition("/")[2] if (p / "iommu_group").exists() else "-1"}
        for p in sorted(Path("/sys/bus/pci/devices").iterdir())
    },
}))
""".replace("NAMES", repr(["class", "vendor", "device", "subsystem_vendor", "subsystem_device"]))
"""Everything that the API shows, in one round trip: it looks before every request."""


@dataclass
class LabMachine:
    """The lab as the simulator's API sees a machine: guests, devices and files of /etc/pve.

    `run` runs a command on the host. The attributes carry the names of the simulator's machine.
    """

    run: Callable[[str, bytes], Finished]
    _seen: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = load_state("kpro6")
        self.faults = SimpleNamespace(api_task="")
        self.watch = SimpleNamespace(look=lambda: None)
        self.kernel = SimpleNamespace(functions={})
        self.tree = SimpleNamespace(read=self._read, save=self._save)
        self.containers = SimpleNamespace(all={}, config=lambda vmid: self._config("lxc", vmid))
        self.vms = _Vms(self)

    def look(self) -> None:
        """Read the host."""
        self._seen = json.loads(self.do("python3 -", LOOK.encode()))
        self.containers.all = {
            int(vmid): SimpleNamespace(running=self.running(int(vmid))) for vmid in self._seen["lxc"]
        }
        self.kernel.functions = {address: _function(address, ids) for address, ids in self._seen["pci"].items()}

    def running(self, vmid: int) -> bool:
        """Whether a guest ran when the host was last read."""
        return str(vmid) in self._seen["running"]

    def ids(self, kind: str) -> list[int]:
        """The guests of a kind."""
        return sorted(map(int, self._seen[kind]))

    def do(self, command: str, stdin: bytes = b"") -> str:
        """Run a command; its output.

        Raises:
            GuestError: it failed.
        """
        done = self.run(command, stdin)
        if done.status:
            raise GuestError(done.stderr.strip() or done.stdout.strip() or f"`{command}` ended with {done.status}")
        return done.stdout

    def _config(self, kind: str, vmid: int) -> GuestConfig:
        return GuestConfig.parse(self._seen[kind].get(str(vmid), ""), kind)

    def _read(self, path: str) -> str:
        if path != MAPPINGS:
            raise GuestError(f"the lab's API keeps no copy of {path}")
        return str(self._seen["mappings"])

    def _save(self, path: str, text: str) -> None:
        self.do(f"cat > /{path}", text.encode())
        self.look()


class _Vms:
    """The virtual machines."""

    folder = FOLDERS["qemu"]

    def __init__(self, machine: LabMachine) -> None:
        self._machine = machine

    def ids(self) -> list[int]:
        """All VMIDs, as the host has them now."""
        self._machine.look()
        return self._machine.ids("qemu")

    def need(self, vmid: int) -> SimpleNamespace:
        """The machine's state."""
        return SimpleNamespace(running=self._machine.running(vmid))

    def config(self, vmid: int) -> GuestConfig:
        """The machine's configuration."""
        return self._machine._config("qemu", vmid)  # noqa: SLF001  the two are one thing

    def mappings(self) -> dict[str, Mapping]:
        """The PCI mappings."""
        return parse_mappings(self._machine.tree.read(MAPPINGS))

    async def start(self, vmid: int) -> None:
        """Start a machine."""
        self._machine.do(f"qm start {vmid}")

    def stop(self, vmid: int) -> None:
        """Stop a machine."""
        self._machine.do(f"qm stop {vmid}")

    def remove(self, vmid: int) -> None:
        """Delete a machine's configuration."""
        self._machine.do(f"rm -f /{self.folder}/{vmid}.conf")


def _function(address: str, ids: dict[str, str]) -> SimpleNamespace:
    named = SimpleNamespace(pci_class=ids["class"], **{name: ids[name] for name in ids if name != "class"})
    return SimpleNamespace(address=address, ids=named, model=SimpleNamespace(name=""), group=int(ids["iommu_group"]))


class ApiServer:
    """The API on an event loop in a thread of its own; `keys` keeps its certificate and token."""

    def __init__(self, run: Callable[[str, bytes], Finished], keys: Path, port: int) -> None:
        self._loop = LoopThread()
        self._api = ProxmoxApi(cast("HostMachine", LabMachine(run)))
        self._loop.start()
        self._loop.call(self._api.start(keys, port))

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._api.url

    @property
    def token(self) -> str:
        """The API token that clients log in with."""
        return self._api.token

    def stop(self) -> None:
        """Listen no more."""
        self._loop.call(self._api.stop())
        self._loop.stop()
