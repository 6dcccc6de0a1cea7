"""The whole program on the real engine: the same story on the simulator and on a real kernel, judged alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.checks import CONTAINER, UNIT, check_host
from testbed.stage import merge, split, workspace_on
from tests.lab.hosts import check, wait_served

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.workspace import Workspace
    from tests.lab.hosts import HostUnderTest

pytestmark = [pytest.mark.lab, pytest.mark.engine]

MAIN_PID = f"pct exec {CONTAINER} -- systemctl show {UNIT} -p MainPID"


def _wrong(host: HostUnderTest, workspace: Workspace, *, split_: bool) -> list[tuple[str, object, object]]:
    checks = check_host(host.seen, workspace, split=split_)
    return [(check.what, check.wanted, check.seen) for check in checks if not check.ok]


def test_the_program_splits_the_host_and_finds_the_split_again_after_a_reboot(
    host: HostUnderTest, tmp_path: Path
) -> None:
    """`up` adopts, `up` splits; after a boot with other device numbers only the stopped VM is a change; then merge."""
    workspace = workspace_on(host.machine, tmp_path / "project")
    workspace.edit(host.adjust)
    found = check(host, MAIN_PID)
    workspace.up(check=True)
    assert check(host, MAIN_PID) == found
    for change in (split, host.adjust):
        workspace.edit(change)
    workspace.up(check=True)
    assert not _wrong(host, workspace, split_=True)
    assert workspace.preview("--expect-no-changes").status == 0
    host.move_numbers()
    host.reboot()
    wait_served(host)
    preview = workspace.preview("--expect-no-changes")
    assert preview.status == 7, preview.output
    assert "vm 200" in preview.text, preview.output
    assert f"container {CONTAINER}" not in preview.text, preview.output
    workspace.up(check=True)
    assert not _wrong(host, workspace, split_=True)
    for change in (merge, host.adjust):
        workspace.edit(change)
    workspace.up(check=True)
    assert not _wrong(host, workspace, split_=False)
