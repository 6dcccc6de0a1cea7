"""driverctl: live overrides, and those that udev replays at boot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.simulator.commands.call import Answer, Call, options
from testbed.simulator.machine import OVERRIDES

if TYPE_CHECKING:
    from testbed.simulator.sysfs import Function

FAILED = 1


async def driverctl(call: Call) -> Answer:
    """Run driverctl."""
    flags = ("--nosave", "--noprobe", "-v", "--verbose", "-d", "--debug")
    words, given = options(call.args, flags=flags, valued=("-b", "--bus"))
    probe, save = "--noprobe" not in given, "--nosave" not in given
    kernel, persisted = call.machine.kernel, call.machine.persisted()
    match words:
        case ["list-overrides"]:
            overridden = [f for f in kernel.functions.values() if f.override]
            # With none, driverctl's own loop over an empty list ends in an error.
            if not overridden:
                return Answer(stderr="driverctl: no devices with an override\n", code=FAILED)
            return Answer("".join(f"{f.address} {f.override}\n" for f in overridden))
        case ["list-persisted"]:
            return Answer("".join(f"{address} {driver}\n" for address, driver in persisted.items()))
        case ["list-devices"] | ["list-devices", _] | []:
            # It reads driver_override of every device, which waits while an unbind hangs.
            await kernel.changed.until(lambda: not any(f.unbinding for f in kernel.functions.values()))
            return Answer("".join(_row(f) for f in kernel.functions.values()))
        case ["set-override", address, driver]:
            function = kernel.functions.get(address)
            return _unknown(address) if function is None else await _set(call, function, driver, probe=probe, save=save)
        case ["unset-override", address]:
            function = kernel.functions.get(address)
            return _unknown(address) if function is None else await _unset(call, function, probe=probe, save=save)
    raise call.limit()


async def _set(call: Call, function: Function, driver: str, *, probe: bool, save: bool) -> Answer:
    kernel, tree = call.machine.kernel, call.machine.tree
    if probe:
        kernel.load_module(driver)
    await _override(call, function, driver, probe=probe)
    if probe and function.driver != driver:
        return Answer(stderr=f"driverctl: failed to bind device {function.address} to driver {driver}\n", code=FAILED)
    if save:
        try:
            tree.save(f"{OVERRIDES}/pci-{function.address}", f"{driver}\n")
        except OSError as error:
            return Answer(stderr=f"driverctl: {error.strerror}\n", code=FAILED)
    return Answer()


async def _unset(call: Call, function: Function, *, probe: bool, save: bool) -> Answer:
    if save:
        call.machine.tree.drop(f"{OVERRIDES}/pci-{function.address}")
    await _override(call, function, "", probe=probe)
    if probe and function.driver is None:
        return Answer(stderr=f"driverctl: failed to reprobe device {function.address}\n", code=FAILED)
    return Answer()


async def _override(call: Call, function: Function, driver: str, *, probe: bool) -> None:
    kernel = call.machine.kernel
    # The real script unbinds a bound device also with --noprobe, which then leaves it without a driver.
    if function.driver:
        await kernel.write(f"bus/pci/drivers/{function.driver}/unbind", function.address)
    await kernel.write(function.home.removeprefix("sys/") + "/driver_override", driver + "\n")
    if probe:
        await kernel.write("bus/pci/drivers_probe", function.address)


def _row(function: Function) -> str:
    return f"{function.address} {function.driver or '(none)'}{' [*]' if function.override else ''}\n"


def _unknown(address: str) -> Answer:
    return Answer(stderr=f"driverctl: no such device: {address}\n", code=FAILED)
