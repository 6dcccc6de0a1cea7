"""Boot: before guests start, give containers their GPUs by the device numbers that this boot gave out.

Minors follow the order in which a driver found its cards, and all majors but nvidia's own are dynamic: lines that were
right before a reboot can name another pool's card after it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from . import lxc_config
from .container import rewrite, wanted_for
from .container_live import Container, ensure_nodes
from .device_numbers import majors_in_lines
from .guests import container_config
from .ledger import Ledger
from .operation import run_mutating
from .pci import NVIDIA, Pci
from .request import Request
from .result import AgentError, FailedError, Json, NotUndoneError, Outcome, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .operation import Operation
    from .system import System

DRIVERS_LIMIT = 30.0
"""Seconds for driverctl's units; a card that is not on its driver by then does not come up."""
QUORUM_LIMIT = 30.0
"""Seconds; pve-guests itself waits 10 for it."""
MODULES_LIMIT = 60.0
LOCAL = "/etc/pve/local"
_OWNER_WRITES = 0o200


def boot(system: System, request: Request) -> dict[str, Json]:
    """Mend the GPU lines of every container that was given GPUs; one that can't be mended keeps no other from it."""
    steps: list[Json] = []
    failures: list[str] = []
    changed = stuck = False
    vmids = sorted(int(key) for key in Ledger(system.root).table("passed"))
    if vmids:
        _need_pve(system)
        _load_drivers(system)
    quorum = time.monotonic() + QUORUM_LIMIT
    for vmid in vmids:
        try:
            done = Request.of(run_mutating(system, "boot", request, partial(_mend, vmid, quorum)))
        except AgentError as error:
            failures.append(f"container {vmid}: {error.message}")
            stuck = stuck or error.outcome is Outcome.NOT_UNDONE
        else:
            changed = changed or done.flag("changed", default=False)
            steps.extend(done.texts("steps"))
            failures.extend(f"container {vmid}: {line}" for line in done.texts("incomplete"))
    if failures:
        # What was mended stays so: nothing is undone for another container's sake.
        raise (NotUndoneError if changed or stuck else RefusedError)("; ".join(failures))
    return {"ok": True, "changed": changed, "steps": steps}


def _need_pve(system: System) -> None:
    """Refuse a host without configurations: no container there does not mean that it has left this node."""
    local = system.root.at(LOCAL)
    if not (local.is_symlink() or local.exists()):
        raise RefusedError("/etc/pve is empty: look at `systemctl status pve-cluster`, which mounts it")


def _load_drivers(system: System) -> None:
    """Have every card on its driver and numbered: driverctl's units may still run, and nvidia may not be loaded yet."""
    pci = Pci(system.root)
    persisted = {address: driver for address in pci.all() if (driver := pci.persisted(address))}

    def settled(*, nvidia: bool) -> bool:
        chosen = {address: driver for address, driver in persisted.items() if (driver == NVIDIA) is nvidia}
        return all((pci.driver(address) or "none") == driver for address, driver in chosen.items())

    # First those that nvidia is not to have: loaded before, it would take them, and they would have to leave again.
    if not _wait(partial(settled, nvidia=False), DRIVERS_LIMIT):
        system.progress(
            f"after {DRIVERS_LIMIT:.0f} s not every card is on the driver that driverctl gives it: going on"
        )
    if system.has("modprobe"):
        loaded = system.run("modprobe", "-a", NVIDIA, "nvidia-uvm", limit=MODULES_LIMIT)
        if not loaded.ok:
            system.progress(f"nvidia or nvidia-uvm could not be loaded: {loaded.complaint()}")
    _wait(partial(settled, nvidia=True), DRIVERS_LIMIT)


def _mend(vmid: int, quorum: float, operation: Operation, request: Request) -> dict[str, Json]:
    system, passed, known = operation.system, operation.ledger.passed(vmid), operation.ledger.known_majors(vmid)
    if container_config(system, vmid) is None:
        operation.note(f"container {vmid} is not on this node: its GPU lines are not looked at")
        return {}
    # At boot no task of Proxmox's runs: a lock is a leftover, and what is pending is none of ours.
    target = Container.of(system, vmid, request, known, settled=False)
    if target.running:
        operation.note(f"container {vmid} runs already: the next `pulumi up` compares its GPUs")
        return {}
    devices, minors, config = passed.addresses("devices"), Pci(system.root).minors(), target.config()
    if devices and not config.nodes:
        operation.note(f"container {vmid} has no GPU lines any more, whoever took them: none are added")
        return {}
    own = frozenset(minors[device] for device in devices if device in minors)
    missing = [device for device in devices if device not in minors]
    incomplete = [f"{', '.join(missing)} is not on the nvidia driver"] if missing else []
    if missing and not own and not config.minors & {*minors.values()}:
        # The lines may be right again at the next boot; what they name now is nobody's.
        raise RefusedError(f"{incomplete[0]}; its lines are left as they were")
    if config.pending_devices:
        incomplete.append(f"its start applies pending device changes, perhaps another's card: `pct pending {vmid}`")
    try:
        ensure_nodes(system, own)
    except RefusedError as error:
        incomplete.append(error.message)
    wanted, style = wanted_for(system, own, minors, known), passed.text("style")
    if not lxc_config.passes_exactly(config, wanted):
        _wait_for_quorum(operation, quorum)
        operation.ledger.note_passed(vmid, devices, style, majors_in_lines(system.root, known, rewritten=False))
        rewrite(operation, target, config, wanted, style)
        operation.ledger.note_passed(vmid, devices, style, majors_in_lines(system.root, known, rewritten=True))
    return {"incomplete": [*incomplete]}


def _wait_for_quorum(operation: Operation, deadline: float) -> None:
    """Wait while this node of a cluster may not write to /etc/pve, which Proxmox shows by the mode of one link."""
    local = operation.system.root.at(LOCAL)

    def writable() -> bool:
        return bool(local.lstat().st_mode & _OWNER_WRITES)

    if not writable():
        operation.note("waiting for this cluster's quorum: /etc/pve is read-only")
    if not _wait(writable, deadline - time.monotonic()):
        raise FailedError("/etc/pve is read-only: this node's cluster has no quorum (`pvecm status`)")


def _wait(done: Callable[[], bool], limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
