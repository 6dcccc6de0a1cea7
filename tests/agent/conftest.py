"""The agent on the simulated hypervisor, and small hosts of plain files for what needs no commands."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest

from host.agent.root import Root
from host.agent.system import System
from host.bundle import agent_bundle
from testbed.simulator.simulator import Simulator
from tests.agent.requests import (
    CONTAINER_CONFIG,
    MANAGED,
    NODE_0,
    NODE_1,
    ROOTFS,
    UNIT_PATH,
    Json,
    bind_request,
    container_request,
    vm_request,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

AGENT = "usr/local/lib/gpu-topology-agent.pyz"


@dataclass
class Answer:
    """How one run of the agent ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> Json:
        """The result's JSON."""
        value: Json = json.loads(self.stdout)
        return value

    def __getitem__(self, name: str) -> Any:
        return self.result[name]


@dataclass
class Hypervisor:
    """A simulated hypervisor, and the agent on it, asked over SSH."""

    simulator: Simulator

    @property
    def root(self) -> Path:
        """The host's root folder."""
        return self.simulator.root

    def agent(self, operation: str, request: Json | None = None, *options: str) -> Answer:
        """Run one operation to its end, whatever it is."""
        return asyncio.run(self.agent_later(operation, request, *options))

    async def agent_later(self, operation: str, request: Json | None = None, *options: str) -> Answer:
        """The same, for a test that does something meanwhile."""
        words = ["python3", f"./{AGENT}", "--root", ".", *options, operation]
        return await self.run(" ".join(words), json.dumps(request or {}))

    async def run(self, command: str, stdin: str = "") -> Answer:
        """Run a command as root."""
        async with asyncssh.connect(
            "127.0.0.1",
            self.simulator.ssh_port,
            username="root",
            client_keys=[str(self.simulator.identity_file)],
            known_hosts=None,
        ) as connection:
            done = await connection.run(command, input=stdin)
        return Answer(done.exit_status or 0, str(done.stdout), str(done.stderr))

    def done(self, operation: str, request: Json | None = None) -> Json:
        """Run one operation that must succeed; its result."""
        answer = self.agent(operation, request)
        assert answer.code == 0, f"{operation}: {answer.stdout}{answer.stderr}"
        return answer.result

    def facts(self, **request: Any) -> Json:
        """The host's facts."""
        return self.done("facts", request)

    def device(self, address: str) -> Json:
        """One device's facts."""
        found: Json = next(one for one in self.facts()["devices"] if one["address"] == address)
        return found

    def drivers(self) -> dict[str, str | None]:
        """GPU → driver, as sysfs has it."""
        folder = self.root / "sys/bus/pci/devices"
        links = {address: folder / address / "driver" for address in NODE_0 + NODE_1}
        return {address: link.readlink().name if link.is_symlink() else None for address, link in links.items()}

    def ledger(self) -> Json:
        """The ledger file."""
        value: Json = json.loads((self.root / "var/lib/gpu-topology/ledger.json").read_text())
        return value

    def kinds(self) -> list[str]:
        """The kinds of everything that happened on the host, SSH aside."""
        return [str(event.kind) for event in self.simulator.log if not str(event.kind).startswith("ssh.")]

    def config(self) -> str:
        """Container 129's configuration."""
        return (self.root / CONTAINER_CONFIG).read_text()

    def unit_text(self) -> str:
        """The service's unit file."""
        return (self.root / ROOTFS / UNIT_PATH.lstrip("/")).read_text()

    def host_state(self) -> dict[str, str]:
        """What the program could change, processes' numbers aside."""
        return {key: value for key, value in self.simulator.contents().items() if not re.match(r"proc/\d+", key)}

    def map_pci(self, name: str, addresses: list[str]) -> None:
        """Make a PCI mapping, as Proxmox's API does."""
        groups = {one["address"]: one["iommu_group"] for one in self.facts()["devices"]}
        ids = "id=10de:2bb5,subsystem-id=10de:204e,node=kpro6"
        entries = [f"\tmap {ids},path={one},iommugroup={groups[one]}" for one in addresses]
        folder = self.root / "etc/pve/mapping"
        folder.mkdir(exist_ok=True)
        (folder / "pci.cfg").write_text("\n".join([name, *entries]) + "\n")

    def give_to_vm(self) -> None:
        """Split: NUMA node 1's cards to VM 200, which runs."""
        self.done("register", {"managed": MANAGED})
        self.done("bind", bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0))
        self.map_pci("gpu-confidential", NODE_1)
        self.done("container", container_request(NODE_0))
        self.done("vm", vm_request(NODE_1))


async def until(true: Callable[[], object], what: str) -> None:
    """Wait for something to happen on the host."""
    deadline = time.monotonic() + 60
    while not await asyncio.to_thread(true):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


@pytest.fixture
def start() -> Iterator[Callable[..., Hypervisor]]:
    """Starts simulated hypervisors with the agent installed."""
    running: list[Simulator] = []

    def begin(state: Any = "kpro6") -> Hypervisor:
        simulator = Simulator(state).start()
        running.append(simulator)
        place = simulator.root / AGENT
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(agent_bundle())
        return Hypervisor(simulator)

    yield begin
    for simulator in running:
        simulator.stop()


@pytest.fixture
def kpro6(start: Callable[..., Hypervisor]) -> Hypervisor:
    """The host as it was found: eight GPUs on nvidia, all in container 129, serving at TP 8."""
    return start("kpro6")


@pytest.fixture
def moving(kpro6: Hypervisor) -> Hypervisor:
    """The container has node 1's cards, minors 4 to 7; node 0's are on vfio-pci, so a reboot makes these 0 to 3.

    The container does not start with the host, which is what it looks like when the boot unit runs.
    """
    kpro6.done("bind", bind_request("vm", NODE_0, "vfio-pci", others=NODE_1))
    kpro6.done("container", container_request(NODE_1))
    assert "/dev/nvidia4 " in kpro6.config()
    (kpro6.root / CONTAINER_CONFIG).write_text(kpro6.config().replace("onboot: 1", "onboot: 0"))
    return kpro6


@dataclass
class Files:
    """A host of plain files: enough for what only reads."""

    folder: Path

    def put(self, path: str, text: str = "") -> Path:
        """Make a file."""
        place = self.folder / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link."""
        place = self.folder / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def gpu(
        self,
        address: str,
        driver: str | None = None,
        minor: int | None = None,
        group: int = 1,
        attributes: dict[str, str] | None = None,
    ) -> None:
        """Make a PCI function."""
        base = f"/sys/bus/pci/devices/{address}"
        usual = {"class": "0x030200", "vendor": "0x10de", "device": "0x2bb5", "driver_override": "(null)"}
        for name, value in (usual | (attributes or {})).items():
            self.put(f"{base}/{name}", f"{value}\n")
        (self.folder / base.lstrip("/") / "config").write_bytes(b"\xde\x10\xb5\x2b")
        self.link(f"{base}/iommu_group", f"../../../kernel/iommu_groups/{group}")
        if driver:
            self.link(f"{base}/driver", f"../../../bus/pci/drivers/{driver}")
        if minor is not None:
            self.put(f"/proc/driver/nvidia/gpus/{address}/information", f"Model: x\nDevice Minor: \t {minor}\n")

    def process(self, pid: int, cgroup: str, nodes: list[str], argv: str = "python3\0train.py\0") -> None:
        """Make a process that has device nodes open."""
        self.put(f"/proc/{pid}/cgroup", f"0::{cgroup}\n")
        self.put(f"/proc/{pid}/comm", argv.split("\0", maxsplit=1)[0][:15] + "\n")
        self.put(f"/proc/{pid}/cmdline", argv)
        for number, node in enumerate(nodes):
            self.link(f"/proc/{pid}/fd/{number}", node)

    @property
    def system(self) -> System:
        """The agent's view of it."""
        return System(Root(self.folder), StringIO())


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """An empty host of plain files."""
    return Files(tmp_path)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts shell scripts on PATH, by name and body."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name: str, body: str) -> None:
        place = folder / name
        place.write_text(f"#!/bin/sh\n{body}\n")
        place.chmod(0o755)

    return put
