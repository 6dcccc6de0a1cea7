"""Register: tell the host's book what this program manages, and have systemd run the agent at boot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .boot_unit import NAME, PATH, WANTED, is_enabled, unit_text
from .request import Service
from .unit import change, replace, set_enabled

if TYPE_CHECKING:
    from .operation import Operation
    from .request import Request
    from .result import Json
    from .system import System

_BOOT = Service(NAME, NAME, None)


def register(operation: Operation, request: Request) -> dict[str, Json]:
    """Learn what this program manages, so that a drain may stop it; install the boot unit."""
    operation.ledger.manage(request.managed())
    operation.ledger.configure(request.managed().services)
    for vmid in request.object("managed").numbers("containers"):
        operation.ledger.manage_guest("containers", vmid)
    _install(operation)
    for field, key in (("revision", "register"), ("file_revision", "agent")):
        if request.has(field):
            operation.ledger.table("revisions")[key] = request.text(field)
    return {}


def _install(operation: Operation) -> None:
    root = operation.system.root
    current, text = root.text(PATH), unit_text(root)
    if current != text:
        change(operation, _BOOT, PATH, current, text)
    if not is_enabled(root):
        set_enabled(operation, _BOOT, enabled=True)


def remove_boot_unit(system: System) -> bool:
    """Disable and remove the boot unit; whether it was there."""
    if system.root.text(PATH) is None and not is_enabled(system.root):
        return False
    system.root.at(WANTED).unlink(missing_ok=True)
    replace(system, _BOOT, PATH, None)
    # A failed unit would be listed for ever; resetting one that did not fail is refused.
    system.run("systemctl", "reset-failed", NAME)
    return True
