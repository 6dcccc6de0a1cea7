"""Boot: before guests start, give containers their GPUs by the device numbers that this boot gave out.

Minors follow the order in which a driver found its cards, and all majors but nvidia's own are dynamic: lines that were
right before a reboot can name another pool's card after it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import lxc_config
from .container import rewrite, wanted_of
from .container_live import Container
from .ledger import Ledger
from .operation import run_mutating
from .pci import Pci
from .request import Request
from .result import AgentError, FailedError, Json, RefusedError

if TYPE_CHECKING:
    from .operation import Operation
    from .system import System

QUORUM_LIMIT = 30.0
"""Seconds; pve-guests itself waits 10 for it."""
_OWNER_WRITES = 0o200


def boot(system: System, request: Request) -> dict[str, Json]:
    """Mend the GPU lines of every container that was given GPUs; one that can't be mended keeps no other from it."""
    steps: list[Json] = []
    failures: list[str] = []
    changed = False
    for vmid in sorted(int(key) for key in Ledger(system.root).table("passed")):
        try:
            done = run_mutating(system, "boot", Request({**request.fields, "vmid": vmid}), _mend)
        except AgentError as error:
            failures.append(f"container {vmid}: {error.message}")
        else:
            changed = changed or done["changed"] is True
            steps.extend(Request.of(done).texts("steps"))
            failures.extend(Request.of(done).texts("missing"))
    if failures:
        raise (FailedError if changed else RefusedError)("; ".join(failures))
    return {"ok": True, "changed": changed, "steps": steps}


def _mend(operation: Operation, request: Request) -> dict[str, Json]:
    system, vmid = operation.system, request.number("vmid")
    passed = operation.ledger.passed(vmid)
    devices = passed.addresses("devices")
    target = Container.of(system, vmid, request, passed.numbers("majors"))
    if target.running:
        operation.note(f"container {vmid} runs already: the next `pulumi up` compares its GPUs")
        return {}
    config, minors = target.config(), Pci(system.root).minors()
    there = [device for device in devices if device in minors]
    missing = [f"container {vmid}: {device} is not on the nvidia driver" for device in devices if device not in minors]
    strangers = config.minors & {minor for device, minor in minors.items() if device not in devices}
    if missing and not strangers:
        # The lines may be right again at the next boot; what they name now is nobody else's.
        raise RefusedError(f"{'; '.join(missing)}; its lines are left as they were")
    wanted = wanted_of(system, there, target.majors)
    if not lxc_config.passes_exactly(config, wanted):
        _wait_for_quorum(system)
        rewrite(operation, target, config, wanted, passed.text("style"))
        operation.ledger.note_passed(vmid, devices, passed.text("style"), target.majors)
    return {"missing": [*missing]}


def _wait_for_quorum(system: System) -> None:
    """Wait while this node of a cluster may not write to /etc/pve, which Proxmox shows by the mode of one link."""
    deadline = time.monotonic() + QUORUM_LIMIT
    while not system.root.at("/etc/pve/local").lstat().st_mode & _OWNER_WRITES:
        if time.monotonic() > deadline:
            raise FailedError(
                f"/etc/pve was read-only for {QUORUM_LIMIT:.0f} s: this node's cluster has no quorum (`pvecm status`)"
            )
        time.sleep(0.5)
