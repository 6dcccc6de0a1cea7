"""`make demo`: adopt kpro6 as found, split it 4 + 4, merge it, split it again; each step is shown and checked."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console

from testbed.checks import Host
from testbed.demo.show import DemoError, Narrator
from testbed.engine.cache import find_cache
from testbed.simulator.simulator import Simulator
from testbed.stage import merge, split, workspace_on

if TYPE_CHECKING:
    from testbed.workspace import Workspace


def main() -> int:
    """Run the demo; exit status 0 if every check held."""
    began = time.monotonic()
    narrator = Narrator(Console(highlight=False))
    folder = find_cache().clone / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    with Simulator("kpro6") as simulator:
        host = Host(simulator)
        try:
            _story(narrator, simulator, host, workspace_on(simulator, folder))
        except DemoError as failure:
            narrator.failed(failure)
            return 1
        finally:
            host.close()
    narrator.done(time.monotonic() - began, folder)
    return 0


def _story(narrator: Narrator, simulator: Simulator, host: Host, workspace: Workspace) -> None:
    narrator.chapter("1. Adopt the host as it was found: eight GPUs in LXC 129, a hand-written unit at --tp 8")
    found, started = simulator.contents(), narrator.restarts(simulator)
    narrator.run(workspace, "up")
    narrator.unchanged(found, simulator.contents(), started, narrator.restarts(simulator))
    narrator.check(host, workspace, split=False)
    whole = workspace.export()

    narrator.chapter("2. Split: NUMA node 1's four GPUs go to the SEV-SNP VM. What follows from it?")
    before = narrator.look(workspace)
    workspace.edit(split)
    narrator.run(workspace, "preview", "--policy-pack", narrator.policies)
    narrator.run(workspace, "up")
    narrator.picture(before, narrator.look(workspace))
    narrator.check(host, workspace, split=True)
    narrator.run(workspace, "preview", "--expect-no-changes")
    narrator.state_difference(whole, workspace.export())

    narrator.chapter("3. Merge: all eight back to the container; the VM is drained though the stack no longer has it")
    workspace.edit(merge)
    narrator.run(workspace, "up")
    narrator.check(host, workspace, split=False)

    narrator.chapter("4. Split again")
    workspace.edit(split)
    narrator.run(workspace, "up")
    narrator.check(host, workspace, split=True)
    narrator.run(workspace, "preview", "--expect-no-changes")


if __name__ == "__main__":
    sys.exit(main())
