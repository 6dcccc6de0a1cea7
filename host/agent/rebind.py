"""One PCI function's driver, changed live: override, unbind, bind, verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .pci import DEVICES, DRIVERS, Address, Pci
from .result import FailedError, StuckError

if TYPE_CHECKING:
    from .system import System

PROBE_PATH = "/sys/bus/pci/drivers_probe"
BIND_LIMIT = 90.0
"""Seconds for a driver's probe: the NVIDIA driver boots a card's firmware in it."""


@dataclass(frozen=True)
class Binding:
    """A function's live driver, its override, and what driverctl does at boot; None is none."""

    driver: str | None
    override: str | None
    persisted: str | None


def read_binding(system: System, address: Address, limit: float = 5.0) -> Binding:
    """The binding as it is; StuckError when the kernel doesn't let its override be read."""
    pci = Pci(system.root)
    answers = system.read_apart({"override": lambda: pci.override(address)}, limit)
    if "override" not in answers:
        raise StuckError(f"{DEVICES}/{address}/driver_override can't be read: {STUCK_HELP}")
    override = answers["override"]
    return Binding(pci.driver(address), str(override) if override else None, pci.persisted(address))


STUCK_HELP = (
    "an unbind of this device hangs in the kernel. Look at `dmesg`: with «Attempting to remove device … with non-zero "
    "usage count» a client of the driver leaked its hold, and only a reboot of the host frees the card; else it ends "
    "when the last process with the card open ends (`fuser -v /dev/nvidia*`)"
)


def set_override(system: System, address: Address, driver: str | None) -> None:
    """Allow only `driver` to bind the function; None lets any driver that matches its ids."""
    _write(system, f"{DEVICES}/{address}/driver_override", f"{driver or ''}\n", address)


def unbind(system: System, address: Address, limit: float) -> None:
    """Take the function from its driver within `limit` seconds."""
    driver = Pci(system.root).driver(address)
    if driver is None:
        return
    try:
        _write(system, f"{DRIVERS}/{driver}/unbind", address, address, limit)
    except StuckError as error:
        raise StuckError(f"{address} did not leave {driver} within {limit:.0f} s: {STUCK_HELP}") from error
    if (left := Pci(system.root).driver(address)) is not None:
        raise FailedError(f"{address} is still on {left} after its unbind returned: look at `dmesg`")


def bind_to(system: System, address: Address, driver: str) -> None:
    """Give a driverless function to `driver`, whose override it has, and check that it went there."""
    load(system, driver)
    _write(system, f"{DRIVERS}/{driver}/bind", address, address, BIND_LIMIT)
    now = Pci(system.root).driver(address)
    if now != driver:
        raise FailedError(f"{address} is on {now or 'no driver'} after it was bound to {driver}: look at `dmesg`")


def probe(system: System, address: Address) -> None:
    """Let the kernel choose a driver by ids; a function that none wants stays without, which is no error."""
    _write(system, PROBE_PATH, address, address, BIND_LIMIT)


def load(system: System, driver: str) -> None:
    """Load the driver's module unless the kernel has the driver."""
    if not system.root.at(f"{DRIVERS}/{driver}").is_dir():
        system.need("modprobe", driver, limit=120)
    if not system.root.at(f"{DRIVERS}/{driver}").is_dir():
        raise FailedError(f"`modprobe {driver}` brought no PCI driver named {driver}: is it installed for this kernel?")


def move(system: System, address: Address, driver: str, unbind_limit: float) -> None:
    """Bring the function onto `driver`, from wherever it is."""
    load(system, driver)
    set_override(system, address, driver)
    if Pci(system.root).driver(address) != driver:
        unbind(system, address, unbind_limit)
        bind_to(system, address, driver)


def restore(system: System, address: Address, wanted: Binding, unbind_limit: float) -> None:
    """Bring the function's live half back to an earlier binding, exactly: driver and override."""
    now = read_binding(system, address)
    if now.driver != wanted.driver:
        set_override(system, address, wanted.driver)
        unbind(system, address, unbind_limit)
        if wanted.driver is not None:
            bind_to(system, address, wanted.driver)
    if read_binding(system, address).override != wanted.override:
        set_override(system, address, wanted.override)


def _write(system: System, path: str, value: str, address: Address, limit: float = 30.0) -> None:
    try:
        system.write_attribute(path, value, limit)
    except StuckError as error:
        raise StuckError(f"{error.message} ({STUCK_HELP})") from error
    except OSError as error:
        raise FailedError(
            f"the kernel refused {value.strip()!r} in {path} for {address}: {error.strerror}; look at `dmesg`"
        ) from error
