"""The real engine on the simulated kpro6: one hypervisor and one workspace a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from testbed.checks import Host, check_host
from testbed.simulator import Simulator
from testbed.stage import workspace_on

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.workspace import Run, Workspace


@dataclass(frozen=True)
class Stage:
    """A simulated host, looked at from outside, and a workspace whose stack is that host as it was found."""

    simulator: Simulator
    host: Host
    workspace: Workspace

    def up(self, *arguments: str) -> Run:
        """`pulumi up` that must succeed; its own preview, which other tests look at, is left out."""
        return self.workspace.up("--skip-preview", *arguments, check=True)

    def wrong(self, *, split: bool) -> list[tuple[str, object, object]]:
        """What of the simulated host is not as the split, or the whole, must have made it."""
        checks = check_host(self.host, self.workspace, split=split)
        return [(check.what, check.wanted, check.seen) for check in checks if not check.ok]

    def refuses(self, run: Run, *parts: str) -> None:
        """Assert that a run was refused in words with all of `parts`, without a traceback."""
        assert run.status != 0, run.output
        assert "Traceback" not in run.output, run.output
        missing = [part for part in parts if part not in run.text]
        assert not missing, f"{missing} is not said in:\n{run.output}"


MakeStage = Callable[[str], Stage]


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[MakeStage]:
    """Make a stage in a found state, by the state's name."""
    with ExitStack() as stack:

        def make(state: str) -> Stage:
            simulator = stack.enter_context(Simulator(state))
            host = Host(simulator)
            stack.callback(host.close)
            return Stage(simulator, host, workspace_on(simulator, tmp_path / "project"))

        yield make


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:
    """kpro6 as it was found."""
    return make_stage("kpro6")
