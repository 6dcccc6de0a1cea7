"""How long a preview takes against an empty Pulumi Python program's, and how often each run goes to the host.

`python -m benchmarks.preview [ROUNDS]`: both programs take turns in one run, so that other load weighs on
both; the figure is the ratio of the medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from testbed.simulator import Simulator
from testbed.stage import split, workspace_on
from testbed.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 7


def main() -> None:
    """Measure and print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else _ROUNDS
    console = Console()
    with tempfile.TemporaryDirectory() as folder, Simulator("kpro6") as simulator, console.status("measuring"):
        base = Path(folder)
        empty = _empty(base / "empty")
        workspace = workspace_on(simulator, base / "project")
        rows = [_visits("adopting up", simulator, lambda: workspace.up(check=True))]
        ours, theirs = _take_turns(rounds, workspace, empty)
        rows.append(_visits("preview without a change", simulator, lambda: workspace.preview(check=True)))
        workspace.edit(split)
        rows.append(_visits("preview of the split", simulator, lambda: workspace.preview(check=True)))
        rows.append(_visits("up of the split", simulator, lambda: workspace.up(check=True)))
    times = Table("preview", "median s", "fastest s", title=f"{rounds} rounds, taking turns")
    for name, seconds in (("this program, no change", ours), ("an empty program", theirs)):
        times.add_row(name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}")
    times.add_row(
        "ratio", f"{statistics.median(ours) / statistics.median(theirs):.2f}", f"{min(ours) / min(theirs):.2f}"
    )
    visits = Table("run", "s", "SSH connections", "SSH commands")
    for row in rows:
        visits.add_row(*row)
    console.print(times)
    console.print(visits)


def _empty(folder: Path) -> Workspace:
    folder.mkdir()
    (folder / "__main__.py").write_text('"""Nothing."""\n')
    workspace = Workspace(folder, {})
    workspace.up(check=True)
    return workspace


def _take_turns(rounds: int, ours: Workspace, theirs: Workspace) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for workspace, seconds in zip((ours, theirs), times, strict=True):
            began = time.perf_counter()
            workspace.preview(check=True)
            seconds.append(time.perf_counter() - began)
    return times


def _visits(name: str, simulator: Simulator, run: Callable[[], object]) -> tuple[str, str, str, str]:
    connections, commands, began = simulator.connections, simulator.commands, time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    return name, f"{seconds:.1f}", str(simulator.connections - connections), str(simulator.commands - commands)


if __name__ == "__main__":
    main()
