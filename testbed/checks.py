"""What the simulated host really has: its files, its commands, its service; nothing that Pulumi says."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from host.ssh import Connection
from host.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from testbed.simulator.simulator import Simulator
    from testbed.workspace import Workspace

SERVING = ("0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0")
CONFIDENTIAL = ("0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0")
UNIT = "sglang-qwen.service"
CONTAINER = 129
VM = 200
_UNIT_PATH = f"var/lib/lxc/{CONTAINER}/rootfs/etc/systemd/system/{UNIT}"
_ASK = """
import json, sys, urllib.request
path, body = sys.argv[1], sys.argv[2].encode() or None
request = urllib.request.Request("http://127.0.0.1:30000" + path, body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


@dataclass(frozen=True)
class Check:
    """One thing looked at: what must be there and what is."""

    what: str
    wanted: object
    seen: object

    @property
    def ok(self) -> bool:
        """Whether they agree."""
        return self.wanted == self.seen


class Host:
    """The simulated host as its administrator sees it."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._connection = Connection(
            Target(
                address="127.0.0.1",
                port=simulator.ssh_port,
                user="root",
                host_key=simulator.host_key,
                root=".",
                private_key=simulator.identity_file.read_text(),
            ),
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def shell(self, *command: str) -> str:
        """What a command prints; its standard error where it prints nothing."""
        done = self._connection.run(shlex.join(command), b"", timeout_s=60, on_line=lambda _line: None)
        return done.stdout or done.stderr

    def driver(self, address: str) -> str | None:
        """The driver a device is bound to."""
        link = self._device(address) / "driver"
        return link.resolve().name if link.is_symlink() else None

    def persisted(self, address: str) -> str | None:
        """The driver that driverctl's file gives the device at the next boot."""
        path = self._simulator.root / "etc/driverctl.d" / f"pci-{address}"
        return path.read_text().strip() if path.exists() else None

    def container_gpus(self) -> list[str]:
        """The nvidia device nodes of single GPUs in the container's /dev."""
        names = self.shell("pct", "exec", str(CONTAINER), "--", "ls", "/dev").split()
        return sorted(name for name in names if name.startswith("nvidia") and name.removeprefix("nvidia").isdigit())

    def container_smi(self) -> int:
        """How many GPUs `nvidia-smi -L` lists in the container."""
        listing = self.shell("pct", "exec", str(CONTAINER), "--", "nvidia-smi", "-L")
        return len([line for line in listing.splitlines() if line.startswith("GPU ")])

    def mapping(self, name: str) -> list[tuple[str, str, str, int]]:
        """A mapping's devices: path, id, subsystem id, IOMMU group, as /etc/pve/mapping/pci.cfg holds them."""
        path = self._simulator.root / "etc/pve/mapping/pci.cfg"
        found: list[tuple[str, str, str, int]] = []
        current = None
        for line in path.read_text().splitlines() if path.exists() else []:
            if line and not line[0].isspace():
                current = line.partition(":")[0] if ":" not in line else line.strip()
            elif current == name and line.strip().startswith("map "):
                parts = dict(part.split("=", 1) for part in line.strip().removeprefix("map ").split(","))
                found.append((parts["path"], parts["id"], parts["subsystem-id"], int(parts["iommugroup"])))
        return sorted(found)

    def live(self, addresses: Iterable[str]) -> list[tuple[str, str, str, int]]:
        """The same of devices, from sysfs."""
        return sorted(
            (
                address,
                f"{self._attribute(address, 'vendor')}:{self._attribute(address, 'device')}",
                f"{self._attribute(address, 'subsystem_vendor')}:{self._attribute(address, 'subsystem_device')}",
                int((self._device(address) / "iommu_group").resolve().name),
            )
            for address in addresses
        )

    def hostpci(self) -> list[str]:
        """The mappings that the VM's hostpci entries name, in their order."""
        config = self.shell("qm", "config", str(VM))
        entries = sorted(line for line in config.splitlines() if line.startswith("hostpci"))
        return [entry.split("mapping=")[1].split(",")[0] for entry in entries if "mapping=" in entry]

    def vm_status(self) -> str:
        """`running` or `stopped`."""
        return self.shell("qm", "status", str(VM)).removeprefix("status:").strip()

    def unit(self) -> str:
        """The unit file as deployed in the container."""
        return (self._simulator.root / _UNIT_PATH).read_text()

    def unit_active(self) -> str:
        """`active`, `inactive` or `failed`."""
        return self.shell("pct", "exec", str(CONTAINER), "--", "systemctl", "is-active", UNIT).strip()

    def server_info(self) -> dict[str, Any]:
        """What the server says of itself."""
        value: dict[str, Any] = json.loads(self._ask("/server_info", ""))
        return value

    def token(self) -> str:
        """The text that the server generates for one token asked for."""
        body = json.dumps({"text": "Is anybody there?", "sampling_params": {"max_new_tokens": 1}})
        return str(json.loads(self._ask("/generate", body))["text"])

    def _ask(self, path: str, body: str) -> str:
        pid = self.shell("lxc-info", "-n", str(CONTAINER), "-p", "-H").strip()
        return self.shell("nsenter", f"--net=./proc/{pid}/ns/net", "--", "python3", "-c", _ASK, path, body)

    def _device(self, address: str) -> Path:
        return self._simulator.root / "sys/bus/pci/devices" / address

    def _attribute(self, address: str, name: str) -> str:
        return (self._device(address) / name).read_text().strip().removeprefix("0x")


def check_host(host: Host, workspace: Workspace, *, split: bool) -> list[Check]:
    """Compare the simulated host with what the split, or the whole, must have made of it."""
    serving = SERVING if split else SERVING + CONFIDENTIAL
    confidential = CONFIDENTIAL if split else ()
    tp = len(serving)
    unit = host.unit()
    pools = workspace.outputs()["topology"]["pools"]
    recorded = dict(
        sorted((device, _pool(name, pool["tp"])) for name, pool in pools.items() for device in pool["devices"])
    )
    return [
        Check("driver", _drivers(serving, confidential), {a: host.driver(a) for a in SERVING + CONFIDENTIAL}),
        Check("persisted on vfio-pci", tuple(confidential), _persisted(host)),
        Check("GPU device nodes in the container", tp, len(host.container_gpus())),
        Check("nvidia-smi in the container lists", tp, host.container_smi()),
        Check("mapping, with live groups and ids", host.live(confidential), host.mapping("gpu-confidential")),
        Check("hostpci entries of the VM", ["gpu-confidential"] * len(confidential), host.hostpci()),
        Check("VM", "running" if split else "stopped", host.vm_status()),
        Check("--tp in the unit", f"--tp {tp}", _tp(unit)),
        Check("NCCL_P2P_DISABLE=1 in the unit", True, "NCCL_P2P_DISABLE=1" in unit),
        Check("canonical copy equals the unit", unit, (workspace.folder / "units" / UNIT).read_text()),
        Check("a token comes", True, bool(host.token())),
        Check("tp_size in /server_info", tp, host.server_info()["tp_size"]),
        Check("pools in the state", _pools(serving, confidential), recorded),
    ]


def _drivers(serving: Iterable[str], confidential: Iterable[str]) -> dict[str, str]:
    return {**dict.fromkeys(serving, "nvidia"), **dict.fromkeys(confidential, "vfio-pci")}


def _pool(name: str, tp: int | None) -> str:
    return f"{name}, no tp" if tp is None else f"{name}, tp {tp}"


def _pools(serving: tuple[str, ...], confidential: tuple[str, ...]) -> dict[str, str]:
    return {
        **dict.fromkeys(serving, _pool("serving", len(serving))),
        **dict.fromkeys(confidential, _pool("confidential", None)),
    }


def _persisted(host: Host) -> tuple[str, ...]:
    return tuple(address for address in SERVING + CONFIDENTIAL if host.persisted(address) == "vfio-pci")


def _tp(unit: str) -> str | None:
    found = re.search(r"^[^#].*?(--tp[ =]\d+)", unit, re.MULTILINE)
    return None if found is None else found[1].replace("=", " ")
