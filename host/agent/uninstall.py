"""Uninstall: leave no file of ours on the host, once nothing there is ours any more."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .boot_unit import PATH
from .ledger import FOLDER, Ledger
from .lock import LOCK, host_lock
from .register import remove_boot_unit
from .result import Json, RefusedError

if TYPE_CHECKING:
    from .request import Request
    from .system import System


def uninstall(system: System, request: Request) -> dict[str, Json]:
    """Remove the boot unit, the ledger, the lock file and the agent; refused while something is to be handed back.

    What a VM was found with and could not be given back when it was released, since a container had it, is told.
    """
    root = system.root
    with host_lock(system, request.seconds("lock_wait_s", 120.0)):
        ledger = Ledger(root)
        managed = {f"vm:{vmid}" for vmid in ledger.managed.vms}
        found = ledger.table("found")
        withheld = {key: value for key, value in found.items() if key.startswith("vm:") and key not in managed}
        if left := [*ledger.table("devices"), *(found.keys() - withheld.keys())]:
            raise RefusedError(
                f"the ledger still answers for {', '.join(sorted(left))}: release them first (`pulumi destroy` does), "
                "or what was found there could never be given back"
            )
        removed: list[Json] = [PATH] if remove_boot_unit(system) else []
        if root.at(FOLDER).exists():
            shutil.rmtree(root.at(FOLDER))
            removed.append(FOLDER)
        agent = Path(sys.argv[0])
        if agent.suffix == ".pyz" and agent.resolve().is_relative_to(root.folder.resolve()) and agent.exists():
            agent.unlink()
            removed.append(str(agent))
        root.at(LOCK).unlink(missing_ok=True)
    result: dict[str, Json] = {"ok": True, "changed": bool(removed), "steps": [], "removed": removed}
    if withheld:
        result["not_given_back"] = withheld
    return result
