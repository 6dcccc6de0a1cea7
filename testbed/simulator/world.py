"""What every part of the simulated host works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.simulator.events import EventLog
    from testbed.simulator.faults import Faults
    from testbed.simulator.state import HostState
    from testbed.simulator.tree import Tree
    from testbed.simulator.waiting import Signal


@dataclass(frozen=True, kw_only=True)
class World:
    """Found state, files, log and faults; `changed` wakes what waits for a holder or a fault to go."""

    state: HostState
    tree: Tree
    log: EventLog
    faults: Faults
    changed: Signal
