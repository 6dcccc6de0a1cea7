"""Units as systemd holds them in memory, and the order in which it starts them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Protocol

from testbed.simulator.unitfile import UnitFile


class UnitError(Exception):
    """systemctl's message for what cannot be done with a unit."""


class Running(Protocol):
    """A started service: its main process and a way to end it."""

    pid: int
    environment: dict[str, str]
    argv: tuple[str, ...]
    tp: int | None

    async def started(self) -> None:
        """Wait until systemd counts it as started: for a oneshot unit, that is its end."""

    async def stop(self) -> None:
        """End every process of the service and wait for that."""


@dataclass
class Unit:
    """A unit as systemd holds it in memory; `fragments` is what was on disk when it was loaded."""

    name: str
    definition: UnitFile = field(default_factory=lambda: UnitFile(()))
    fragments: tuple[tuple[str, int, int], ...] = ()
    active: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    status: int = 0
    restarts: int = 0
    since: float = 0.0
    running: Running | None = None
    journal: list[str] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def ordered(units: list[Unit]) -> list[Unit]:
    """Sort units as After= and Before= among them demand; as systemd does, leave one of a cycle out."""
    after: dict[str, list[str]] = {unit.name: [] for unit in units}
    for unit in units:
        after[unit.name] += [n for n in unit.definition.names("Unit", "After") if n in after]
        for name in [n for n in unit.definition.names("Unit", "Before") if n in after]:
            after[name].append(unit.name)
    by_name = {unit.name: unit for unit in units}
    try:
        return [by_name[name] for name in TopologicalSorter(after).static_order()]
    except CycleError as error:
        left_out = error.args[1][0]
        by_name[left_out].journal.append(f"{left_out}: Job deleted to break an ordering cycle")
        return ordered([unit for unit in units if unit.name != left_out])
