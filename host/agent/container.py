"""A container's GPUs: exactly a pool's, restarted only when they differ."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import lxc_config
from .container_live import Container, enable, ensure_nodes, passed_to_others, restart
from .device_numbers import dynamic_majors, found_lines, majors_in_lines, moved_majors
from .drain import record_revision
from .facts_devices import majors
from .guests import container_config
from .lxc_config import Config, Wanted
from .pci import Address, Pci
from .request import Request
from .result import BadRequestError, FailedError, Json, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .ledger import KnownMajors
    from .operation import Operation
    from .system import System

STYLES = ("dev", "raw")


def container(operation: Operation, request: Request) -> dict[str, Json]:
    """Give a container exactly these GPUs, by what their addresses' minors are now."""
    vmid, style = request.number("vmid"), request.text("style", "dev")
    if style not in STYLES:
        raise BadRequestError(f"field style is {style!r}: it must be one of {', '.join(STYLES)}")
    devices, known = request.addresses("devices"), operation.ledger.known_majors(vmid)
    target = Container.of(operation.system, vmid, request, known)
    config, running = target.config(), target.running
    every = Pci(operation.system.root).minors()
    minors = _minors_of(operation.system, devices, every)
    ensure_nodes(operation.system, minors)
    wanted = wanted_for(operation.system, minors, every, known)
    _note_found(operation, target, config, every, running=running)
    # Before the lines are written: whatever cuts this off, a boot makes them what is noted here.
    operation.ledger.note_passed(vmid, devices, style, majors_in_lines(operation.system.root, known, rewritten=False))
    start = running or request.flag("start", default=True)
    live_right = running and target.live_minors() == wanted.minors
    text_right = lxc_config.passes_exactly(config, wanted)
    change = None if text_right else partial(rewrite, operation, target, config, wanted, style)
    if running and not (text_right and live_right):
        # A unit for as many GPUs as before may come up by itself; else it is for cards that are gone, or too few.
        resized = len(config.minors) != len(wanted.minors)
        restart(operation, target, request.texts("units") if resized else (), change)
    else:
        if change:
            change()
        if start and not running:
            operation.undo_with(f"stop container {vmid}", target.stop)
            operation.begin(f"start container {vmid}")
            target.start()
    if operation.changed and start:
        target.verify(wanted)
    _forget_pending(operation, vmid)
    operation.ledger.manage_guest("containers", vmid)
    operation.ledger.note_passed(vmid, devices, style, majors_in_lines(operation.system.root, known, rewritten=True))
    record_revision(operation, f"container:{vmid}", request)
    return {"vmid": vmid, "minors": [*sorted(wanted.minors)]}


def container_release(operation: Operation, request: Request) -> dict[str, Json]:
    """Give a container back the GPU lines that it was found with."""
    vmid, system = request.number("vmid"), operation.system
    found = operation.ledger.table("found").get(f"container:{vmid}")
    if isinstance(found, dict) and container_config(system, vmid) is not None:
        target = Container.of(system, vmid, request, operation.ledger.known_majors(vmid))
        current, before = target.config(), found_lines(system, Request.of(found))
        back = lxc_config.with_gpu_lines_of(current, before, passed_to_others(system, vmid))
        if back.text() != current.text():
            _give_back(operation, target, current, back, Request.of(found).texts("units"))
    operation.ledger.table("found").pop(f"container:{vmid}", None)
    operation.ledger.table("revisions").pop(f"container:{vmid}", None)
    operation.ledger.table("passed").pop(str(vmid), None)
    operation.ledger.unmanage_guest("containers", vmid)
    return {"vmid": vmid}


def _minors_of(system: System, devices: Iterable[Address], every: Mapping[Address, int]) -> frozenset[int]:
    """The minors of these devices; refused for one that the nvidia driver doesn't have."""
    minors = set()
    for address in devices:
        if address not in every:
            raise RefusedError(
                f"{address} is on {Pci(system.root).driver(address) or 'no driver'} and has no device minor: a "
                "container can only be given GPUs that are bound to nvidia; bind its pool first"
            )
        minors.add(every[address])
    return frozenset(minors)


def _note_found(
    operation: Operation, target: Container, config: Config, every: Mapping[Address, int], *, running: bool
) -> None:
    """Keep the configuration as found, with what its numbers mean: by its release they may mean something else."""
    found: dict[str, Json] = {"config": config.text(), "status": "running" if running else "stopped"}
    found["majors"] = {name: [number] for name, number in dynamic_majors(operation.system.root).items()}
    found["minors"] = {str(minor): address for address, minor in every.items()}
    operation.ledger.note_found(f"container:{target.vmid}", found)


def wanted_for(system: System, minors: frozenset[int], every: Mapping[Address, int], known: KnownMajors) -> Wanted:
    """What passing these minors, of `every` card's, means now; `known` are nvidia's majors at earlier boots."""
    uvm = majors(system.root).get("nvidia-uvm")
    return Wanted(
        minors,
        frozenset(every.values()),
        useful=tuple(node for node in lxc_config.USEFUL if system.root.at(node).exists()),
        other_majors=frozenset() if uvm is None else frozenset({uvm}),
        moved_majors=moved_majors(system.root, known),
    )


def rewrite(operation: Operation, target: Container, before: Config, wanted: Wanted, style: str) -> None:
    """Change the GPU lines of a stopped container (`pct set` on a running one would only leave pending changes)."""
    operation.undo_with(f"configuration of container {target.vmid}", partial(_put_back, target, before))
    nodes = f"GPU nodes {sorted(before.minors)} → {sorted(wanted.minors)}"
    operation.begin(
        f"container {target.vmid}: {nodes if before.minors != wanted.minors else 'GPU lines as they must be'}"
    )
    if style == "raw":
        target.write(before, lxc_config.with_raw(before, wanted))
    else:
        plan = lxc_config.plan_dev(before, wanted)
        if plan.without_raw != before:  # `pct set` cannot touch lxc.* keys
            target.write(before, plan.without_raw)
        arguments = [word for key, value in plan.sets.items() for word in (f"-{key}", value)]
        arguments += ["-delete", ",".join(plan.deletes)] if plan.deletes else []
        if arguments:
            target.system.need("pct", "set", str(target.vmid), *arguments, limit=60)
    if not lxc_config.passes_exactly(now := target.config(), wanted):
        raise FailedError(f"container {target.vmid} passes {sorted(now.nodes)} after its GPU lines were rewritten")


def _put_back(target: Container, before: Config) -> None:
    """Restore the GPU lines, of a container that is stopped for it if it runs."""
    current = target.config()
    if current.text() != before.text():
        target.stop()
        target.write(current, lxc_config.with_gpu_lines_of(current, before))


def _give_back(operation: Operation, target: Container, current: Config, back: Config, units: Sequence[str]) -> None:
    """Write the found lines; restart the container with them now, or when all its GPUs are back on the host."""
    vmid, running = target.vmid, target.running
    absent = sorted(node for node in back.nodes if not target.system.root.at(node).exists())

    def write() -> None:
        operation.undo_with(f"configuration of container {vmid}", partial(_put_back, target, current))
        operation.begin(f"container {vmid}: GPU lines as found (GPU nodes {sorted(back.minors)})")
        target.write(current, back)

    if not running:
        write()
    elif absent and operation.ledger.table("devices") and target.live_minors() <= back.minors:
        write()
        operation.note(f"container {vmid} is restarted when {', '.join(absent)} are back on the host")
        operation.ledger.pending.append({"vmid": vmid, "units": [*units]})
    else:
        enable(operation, target, restart(operation, target, units, write))


def _forget_pending(operation: Operation, vmid: int) -> None:
    pending = operation.ledger.pending
    pending[:] = [one for one in pending if Request.of(one).number("vmid") != vmid]
