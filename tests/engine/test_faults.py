"""What goes wrong in the middle ends in a host that the next `up` brings where it must be."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from testbed.checks import CONFIDENTIAL, UNIT
from testbed.simulator import Event, EventKind
from testbed.stage import split

if TYPE_CHECKING:
    from tests.engine.conftest import Stage

pytestmark = [pytest.mark.engine, pytest.mark.simulator]

DEADLINE_S = 120


def _await(stage: Stage, kind: EventKind, after: int) -> None:
    until = time.monotonic() + DEADLINE_S
    while not any(event.kind is kind for event in stage.simulator.log[after:]):
        assert time.monotonic() < until, f"no {kind} within {DEADLINE_S} s"
        time.sleep(0.01)


def _assert_split(stage: Stage) -> None:
    assert not stage.wrong(split=True)
    assert stage.workspace.preview("--expect-no-changes").status == 0


def test_a_run_killed_in_the_middle_of_the_rebind_is_finished_by_the_next(stage: Stage) -> None:
    """SIGKILL of the whole process tree while devices move; the next `up` reaches the split."""
    stage.up()
    stage.workspace.edit(split)
    began = len(stage.simulator.log)
    process = stage.workspace.start("up", "--yes", "--stack", "sim")
    _await(stage, EventKind.BIND, began)
    stage.workspace.kill(process)
    assert process.returncode != 0
    stage.up()
    _assert_split(stage)


def test_a_host_that_lost_its_book_is_split_all_the_same(stage: Stage) -> None:
    """The book is told again what is managed, so that the running service is drained and not held for a stranger's."""
    stage.up()
    stage.workspace.edit(split)
    (stage.simulator.root / "var/lib/gpu-topology/ledger.json").unlink()
    stage.up()
    _assert_split(stage)


def test_a_hang_in_nccl_is_caught_and_named(stage: Stage) -> None:
    """Without the P2P setting the server hangs; the deadline catches it, and the message names NCCL P2P."""
    stage.up()
    stage.workspace.edit(split)
    stage.workspace.topology["services"]["sglang-qwen"]["readiness"] = {"deadline": 12, "tokenTimeout": 5}
    folder = stage.simulator.root / f"var/lib/lxc/129/rootfs/etc/systemd/system/{UNIT}.d"

    def take_out(event: Event) -> None:
        # After the plan was made and before the service starts: what no rule can see.
        if event.kind is EventKind.CONTAINER_START and not folder.exists():
            folder.mkdir()
            (folder / "p2p.conf").write_text("[Service]\nEnvironment=NCCL_P2P_DISABLE=0\n")

    stage.simulator.listen(take_out)
    run = stage.workspace.up()
    stage.refuses(run, "NCCL_P2P_DISABLE", "translated IOMMU", "sglang-qwen")


def test_a_foreign_process_is_never_killed(stage: Stage) -> None:
    """A process that nobody manages on a GPU that must move: refused with its PID, nothing stopped or moved."""
    stage.up()
    pid = stage.simulator.faults.foreign_process(CONFIDENTIAL[0])
    found = stage.simulator.contents()
    stage.workspace.edit(split)
    stage.refuses(stage.workspace.up(), str(pid), CONFIDENTIAL[0])
    assert stage.simulator.contents() == found
    stage.simulator.faults.end_process(pid)
    stage.up()
    _assert_split(stage)


def test_a_bind_that_fails_is_undone_and_the_service_runs_again(stage: Stage) -> None:
    """vfio-pci refuses one card: all four go back to nvidia, the drained service is started, the next `up` splits."""
    stage.up()
    stage.workspace.edit(split)
    stage.simulator.faults.bind_fail(CONFIDENTIAL[2], "vfio-pci")
    stage.refuses(stage.workspace.up(), CONFIDENTIAL[2], "failed and was undone")
    assert {stage.host.driver(address) for address in CONFIDENTIAL} == {"nvidia"}
    stage.simulator.faults.clear()
    stage.up()
    _assert_split(stage)


def test_a_destroy_gives_everything_back_as_it_was_found(stage: Stage) -> None:
    """The service is stopped, GPUs, container, VM and unit are as found, and no file of the program is left."""
    found = stage.simulator.contents()
    text = stage.host.unit()
    stage.workspace.edit(split)
    stage.up()
    stage.workspace.destroy(check=True)
    assert stage.simulator.own_files() == []
    assert stage.host.unit() == text
    assert stage.host.unit_active() == "inactive"
    assert {stage.host.driver(address) for address in CONFIDENTIAL} == {"nvidia"}
    kept = [name for name in found if name.startswith(("etc/", "sys/bus/pci/devices/", "var/lib/lxc/"))]
    now = stage.simulator.contents()
    assert {name: now.get(name) for name in kept} == {name: found[name] for name in kept}
