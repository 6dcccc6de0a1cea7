"""The whole program on the real engine, against a real kernel: the simulator's story, judged by the same checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from testbed.checks import check_host
from testbed.lab.host import LabHost
from testbed.stage import merge, split, workspace_on
from tests.lab.hosts import OnLab

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.lab import Lab
    from testbed.simulator import Simulator
    from testbed.workspace import Workspace

pytestmark = [pytest.mark.lab, pytest.mark.engine]

GPU = {"name": "QEMU's bochs-display, as a GPU", "pciId": "1234:1111", "memoryMib": 97887}


def _on_lab(topology: dict[str, Any]) -> None:
    """What differs from the simulated host: root is /, the cards have QEMU's ids, and the processor has no SEV-SNP."""
    topology["host"]["root"] = "/"
    for pool in topology["pools"].values():
        pool["gpu"] = GPU
    for vm in topology["vms"].values():
        vm["sevSnp"] = False


def _wrong(lab: Lab, workspace: Workspace, *, split_: bool) -> list[tuple[str, object, object]]:
    checks = check_host(LabHost(lab), workspace, split=split_)
    return [(check.what, check.wanted, check.seen) for check in checks if not check.ok]


def test_the_program_splits_the_host_and_finds_the_split_again_after_a_reboot(lab: Lab, tmp_path: Path) -> None:
    """`up` adopts, `up` splits; after a boot with other device numbers only the stopped VM is a change; then merge."""
    workspace = workspace_on(cast("Simulator", lab), tmp_path / "project")
    workspace.edit(_on_lab)
    started = lab.check("pct exec 129 -- systemctl show sglang-qwen -p ActiveEnterTimestamp")
    workspace.up(check=True)
    assert lab.check("pct exec 129 -- systemctl show sglang-qwen -p ActiveEnterTimestamp") == started
    for change in (split, _on_lab):
        workspace.edit(change)
    workspace.up(check=True)
    assert not _wrong(lab, workspace, split_=True)
    assert workspace.preview("--expect-no-changes").status == 0
    OnLab(lab).move_numbers()
    lab.reboot()
    lab.wait_served()
    preview = workspace.preview("--expect-no-changes")
    assert preview.status == 7, preview.output
    assert "vm 200" in preview.text, preview.output
    assert "container 129" not in preview.text, preview.output
    workspace.up(check=True)
    assert not _wrong(lab, workspace, split_=True)
    for change in (merge, _on_lab):
        workspace.edit(change)
    workspace.up(check=True)
    assert not _wrong(lab, workspace, split_=False)
