"""The persistent half of a binding: driverctl's own files, which udev replays at boot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .ledger import write_atomically
from .pci import PERSISTED, Address
from .result import FailedError, RefusedError

if TYPE_CHECKING:
    from .system import System


def need_driverctl(system: System) -> None:
    """Refuse on a host where nothing would replay the overrides at boot."""
    if not system.has("driverctl"):
        raise RefusedError(
            "driverctl is not installed on this host, so a binding would be lost at the next boot: "
            "`apt install driverctl`"
        )


def persist(system: System, address: Address, driver: str | None) -> None:
    """Make driverctl bind `address` to `driver` at boot, or (None) no longer care about it.

    The file is written here and not by `driverctl set-override`: that one unbinds a bound device first, with
    --noprobe too (0.111), and would take the card from under what was just verified.
    """
    place = system.root.at(f"{PERSISTED}/pci-{address}")
    try:
        if driver is None:
            place.unlink(missing_ok=True)
            return
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise FailedError(f"{place} could not be changed: {error.strerror}") from error
    write_atomically(place, f"{driver}\n")
