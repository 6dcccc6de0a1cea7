"""A container as it is: its configuration file, its device nodes, its boot."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from . import lxc_config
from .device_numbers import all_majors
from .guests import CONTAINERS, container_config, ids_in, need_inside, run_inside, shut_down, status
from .ledger import write_atomically
from .lock import host_lock
from .request import Request
from .result import FailedError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .ledger import KnownMajors
    from .lxc_config import Config, Wanted
    from .operation import Operation
    from .system import System

START_LIMIT = 120.0


@dataclass(frozen=True)
class Container:
    """One container, and the seconds that it may take to stop and to boot."""

    system: System
    vmid: int
    stop_limit: float
    boot_limit: float
    majors: frozenset[int]
    settled: bool = True
    """Whether its configuration must have no lock and nothing pending to be worked on."""

    @classmethod
    def of(
        cls, system: System, vmid: int, request: Request, known: KnownMajors | None = None, *, settled: bool = True
    ) -> Container:
        """With the limits that the request has; `known` were nvidia's majors at earlier boots."""
        limits = request.seconds("stop_timeout_s", 60.0), request.seconds("boot_timeout_s", 180.0)
        return cls(system, vmid, *limits, all_majors(system.root, known), settled)

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return status(self.system, "pct", self.vmid) == "running"

    def config(self) -> Config:
        """Its configuration; refused where there is none, or where Proxmox is about to change it."""
        vmid, text = self.vmid, container_config(self.system, self.vmid)
        if text is None:
            raise RefusedError(
                f"container {vmid} does not exist on this node ({CONTAINERS}/{vmid}.conf is missing): "
                "`pct list` shows those that do; correct the VMID"
            )
        config = lxc_config.parse(text, self.majors)
        if not self.settled:
            return config
        if locked := config.setting("lock"):
            raise RefusedError(
                f"container {vmid} is locked by Proxmox ({locked}): wait for that task, or `pct unlock {vmid}`"
            )
        if config.pending_devices:
            raise RefusedError(
                f"container {vmid} has pending device changes, which its next start would apply: apply them by a "
                f"restart, or revert them (`pct set {vmid} --revert dev0,…`), and run again"
            )
        return config

    def write(self, expected: Config, config: Config) -> None:
        """Replace the configuration file under Proxmox's own lock, unless it changed since it was read."""
        with host_lock(self.system, 60.0, f"/run/lock/lxc/pve-config-{self.vmid}.lock"):
            if lxc_config.parse(container_config(self.system, self.vmid) or "").text() != expected.text():
                raise FailedError(f"the configuration of container {self.vmid} changed while it was edited: run again")
            # pmxcfs knows no chmod: permissions follow from the path.
            write_atomically(self.system.root.at(f"{CONTAINERS}/{self.vmid}.conf"), config.text(), mode=None)

    def stop(self) -> None:
        """Shut it down, hard when its time is over; one that is stopped stays so."""
        if self.running:
            shut_down(self.system, "pct", self.vmid, self.stop_limit)

    def start(self) -> None:
        """Start it and wait until its systemd has booted."""
        if not self.running:
            self.system.need("pct", "start", str(self.vmid), limit=START_LIMIT)
        started = told = time.monotonic()
        while True:
            state = run_inside(self.system, self.vmid, "systemctl", "is-system-running").out.strip()
            if state in ("running", "degraded"):
                return
            waited = time.monotonic() - started
            if waited > self.boot_limit:
                raise FailedError(
                    f"container {self.vmid} had not booted after {waited:.0f} s: systemd says {state or 'nothing'!r}"
                )
            if time.monotonic() - told > 10:
                told = time.monotonic()
                self.system.progress(f"container {self.vmid} boots: {state or 'no answer yet'} ({waited:.0f} s)")
            time.sleep(0.5)

    def live_minors(self) -> frozenset[int]:
        """N of every /dev/nvidiaN in it while it runs."""
        done = run_inside(self.system, self.vmid, "ls", "/dev")
        if not done.ok:
            raise FailedError(f"container {self.vmid} does not answer: {done.complaint()}")
        return frozenset(int(name[6:]) for name in done.out.split() if re.fullmatch(r"nvidia\d+", name))

    def verify(self, wanted: Wanted) -> None:
        """Check that it has exactly the wanted GPUs while it runs."""
        minors = self.live_minors()
        if minors != wanted.minors:
            raise FailedError(
                f"container {self.vmid} has the nodes of GPUs {sorted(minors)}, not {sorted(wanted.minors)}: "
                "something else passes or hides them; look at its configuration and at /dev in it"
            )
        seen = visible_gpus(self.system, self.vmid)
        if seen is not None and seen != len(wanted.minors):
            raise FailedError(
                f"nvidia-smi in container {self.vmid} shows {seen} GPUs and should show {len(wanted.minors)}"
            )


def ensure_nodes(system: System, minors: Iterable[int]) -> None:
    """Have the driver's device nodes made: after a boot nothing has, until a first CUDA program runs."""
    nodes = [*lxc_config.NEEDED, *(f"/dev/nvidia{minor}" for minor in minors)]
    missing = [node for node in nodes if not system.root.at(node).exists()]
    if missing and system.has("nvidia-modprobe"):
        arguments = [argument for minor in minors for argument in ("-c", str(minor))]
        system.run("nvidia-modprobe", "-u", *arguments, limit=60)
        missing = [node for node in nodes if not system.root.at(node).exists()]
    if missing:
        raise RefusedError(
            f"{', '.join(missing)} does not exist on the host: `nvidia-modprobe -u -c 0` makes the driver's nodes"
        )


def visible_gpus(system: System, vmid: int | None) -> int | None:
    """How many GPUs nvidia-smi lists in a container (or on the host); None where it is missing or doesn't answer."""
    done = run_inside(system, vmid, "nvidia-smi", "-L")
    if done.code is None or re.search(r"not found|No such file|failed to (exec|run)", done.err, re.IGNORECASE):
        return None
    return len(re.findall(r"^GPU \d+:", done.out, re.MULTILINE))


def passed_to_others(system: System, vmid: int) -> frozenset[int]:
    """Minors that other containers of this node are given: a GPU is never handed to two."""
    others = [other for other in ids_in(system, CONTAINERS) if other != vmid]
    return frozenset().union(*(lxc_config.parse(container_config(system, other) or "").minors for other in others))


def quieten(operation: Operation, target: Container, units: Iterable[str]) -> list[str]:
    """Disable and stop units, so that they don't come up with the container's next boot; those that were enabled."""
    system, vmid, disabled = target.system, target.vmid, []
    for unit in units:
        if run_inside(system, vmid, "systemctl", "is-active", unit).out.strip() in ("active", "activating"):
            undo = partial(need_inside, system, vmid, "systemctl", "start", unit)
            operation.undo_with(f"start {unit} in container {vmid}", undo)
            operation.begin(f"stop {unit} in container {vmid}")
            need_inside(system, vmid, "systemctl", "stop", unit, limit=target.stop_limit + 60)
        if run_inside(system, vmid, "systemctl", "is-enabled", unit).out.strip() == "enabled":
            undo = partial(need_inside, system, vmid, "systemctl", "enable", unit)
            operation.undo_with(f"enable {unit} in container {vmid}", undo)
            operation.begin(f"disable {unit} in container {vmid} over its restart")
            need_inside(system, vmid, "systemctl", "disable", unit)
            operation.ledger.quieted.append({"vmid": vmid, "unit": unit})
            disabled.append(unit)
    return disabled


def restart(
    operation: Operation, target: Container, units: Iterable[str], change: Callable[[], None] | None = None
) -> list[str]:
    """Restart a running container, quietly, around a change of its configuration; the units that are now disabled.

    Undone in the other order: it is stopped, changed back, and started, then its units are as they were.
    """
    disabled = quieten(operation, target, units)
    operation.undo_with(f"start container {target.vmid}", target.start)
    operation.begin(f"stop container {target.vmid}")
    target.stop()
    if change:
        change()
    operation.undo_with(f"stop container {target.vmid}", target.stop)
    operation.begin(f"start container {target.vmid}")
    target.start()
    return disabled


def enable(operation: Operation, target: Container, units: Iterable[str]) -> None:
    """Enable units again that were disabled over a restart."""
    for unit in units:
        operation.begin(f"enable {unit} in container {target.vmid} as found")
        need_inside(target.system, target.vmid, "systemctl", "enable", unit)
        operation.ledger.quieted.remove({"vmid": target.vmid, "unit": unit})


def restart_pending(operation: Operation, request: Request) -> None:
    """Restart released containers whose GPUs have come back to the host; all of them once no device is ours."""
    system, ledger = operation.system, operation.ledger
    for entry in [Request.of(one) for one in ledger.pending]:
        vmid = entry.number("vmid")
        text = container_config(system, vmid)
        nodes = lxc_config.parse(text or "").nodes
        if ledger.table("devices") and not all(system.root.at(node).exists() for node in nodes):
            continue
        target = Container.of(system, vmid, request)
        if text is not None and target.running:
            enable(operation, target, restart(operation, target, entry.texts("units")))
        ledger.pending.remove(entry.fields)
