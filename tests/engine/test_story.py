"""kpro6's story: adopted as found, split, merged, split again; and what the state tells of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from testbed.checks import CONFIDENTIAL, SERVING, UNIT
from testbed.simulator import EventKind
from testbed.stage import merge, split

if TYPE_CHECKING:
    from tests.engine.conftest import Stage

pytestmark = [pytest.mark.engine, pytest.mark.simulator]

STARTS = (EventKind.SERVICE_START, EventKind.SERVICE_STOP, EventKind.CONTAINER_START, EventKind.BIND, EventKind.UNBIND)


def _topology(export: dict[str, Any]) -> dict[str, Any]:
    resources = export["deployment"]["resources"]
    found: dict[str, Any] = next(r["outputs"]["topology"] for r in resources if r["type"] == "pulumi:pulumi:Stack")
    return found


def test_adopting_changes_nothing_on_the_host(stage: Stage) -> None:
    """The first `up` of a host that is as wanted by meaning leaves every file and process of it alone."""
    found, events = stage.simulator.contents(), len(stage.simulator.events(*STARTS))
    stage.up()
    assert stage.simulator.contents() == found
    assert len(stage.simulator.events(*STARTS)) == events
    assert not stage.wrong(split=False)
    assert stage.workspace.preview("--expect-no-changes").status == 0


def test_split_merge_and_split_again(stage: Stage) -> None:
    """The split shows all that follows in its preview, and it and its reverse leave the host as each must be."""
    stage.up()
    whole = _topology(stage.workspace.export())

    stage.workspace.edit(split)
    preview = stage.workspace.preview(check=True)
    for said in (
        "tp 8 -> 4",
        "0000:81:00.0: driver nvidia -> vfio-pci",
        "confidential-binding-drain create",
        "gpu-confidential-mapping create",
        "lxc-129-gpus update",
        "sglang-qwen-unit update",
        "sglang-qwen-serving replace",
    ):
        assert said in preview.text, preview.output
    stage.up()
    assert not stage.wrong(split=True)
    assert stage.workspace.preview("--expect-no-changes").status == 0
    assert stage.workspace.preview("--refresh", "--expect-no-changes").status == 0

    halves = _topology(stage.workspace.export())
    assert (whole["pools"]["serving"]["tp"], halves["pools"]["serving"]["tp"]) == (8, 4)
    assert whole["pools"]["serving"]["devices"] == [*SERVING, *CONFIDENTIAL]
    assert halves["pools"]["serving"]["devices"] == [*SERVING]
    assert halves["pools"]["confidential"]["devices"] == [*CONFIDENTIAL]
    assert (whole["services"]["sglang-qwen"]["tp"], halves["services"]["sglang-qwen"]["tp"]) == (8, 4)
    assert whole["services"]["sglang-qwen"]["unitHash"] != halves["services"]["sglang-qwen"]["unitHash"]

    stage.workspace.edit(merge)
    stage.up()
    assert not stage.wrong(split=False)
    assert stage.workspace.preview("--expect-no-changes").status == 0

    stage.workspace.edit(split)
    stage.up()
    assert not stage.wrong(split=True)


def test_a_first_up_may_split_at_once(stage: Stage) -> None:
    """A host that was never adopted is split by its first `up`; the running service is drained, not refused."""
    stage.workspace.edit(split)
    stage.up()
    assert not stage.wrong(split=True)
    assert stage.workspace.preview("--expect-no-changes").status == 0


def test_the_split_runs_in_the_one_order_that_works(stage: Stage) -> None:
    """Stop, holders gone, unbind, bind, persist, mapping, container, unit, reload, start, token, verify."""
    stage.up()
    began = len(stage.simulator.log)
    stage.workspace.edit(split)
    stage.up()
    log = stage.simulator.log[began:]

    def first(kind: EventKind) -> int:
        return next(event.seq for event in log if event.kind is kind)

    def last(kind: EventKind) -> int:
        return next(event.seq for event in reversed(log) if event.kind is kind)

    stopped = [e.seq for e in log if (e.kind, e.subject) == (EventKind.SERVICE_STOP, UNIT)]
    order: list[tuple[str, int, int]] = [
        ("service stopped", stopped[0], stopped[-1]),
        ("holders gone", first(EventKind.HOLDER_GONE), last(EventKind.HOLDER_GONE)),
        ("unbound and bound", first(EventKind.UNBIND), last(EventKind.BIND)),
        ("persisted", first(EventKind.PERSIST), last(EventKind.PERSIST)),
        ("mapping", first(EventKind.MAPPING), last(EventKind.MAPPING)),
        ("container's lines", first(EventKind.CONTAINER_CONFIG), last(EventKind.CONTAINER_CONFIG)),
        ("container started", first(EventKind.CONTAINER_START), last(EventKind.CONTAINER_START)),
        ("unit written", first(EventKind.UNIT_WRITE), last(EventKind.UNIT_WRITE)),
        ("systemd reloaded", last(EventKind.SYSTEMD_RELOAD), last(EventKind.SYSTEMD_RELOAD)),
        ("service started", last(EventKind.SERVICE_START), last(EventKind.SERVICE_START)),
        ("token", first(EventKind.SERVICE_TOKEN), first(EventKind.SERVICE_TOKEN)),
        ("verified", first(EventKind.SERVER_INFO), last(EventKind.SERVER_INFO)),
    ]
    for (before, _, ended), (after, began_at, _) in itertools.pairwise(order):
        assert ended < began_at, f"{before} ({ended}) must come before {after} ({began_at}): {log}"
    bounced = [e.kind for e in log if e.subject == "nvidia-persistenced.service"]
    assert bounced == [EventKind.SERVICE_STOP, EventKind.SERVICE_START]
    by_device = {a: [e.kind for e in log if e.subject == a] for a in CONFIDENTIAL}
    for kinds in by_device.values():
        assert [k for k in kinds if k in (EventKind.UNBIND, EventKind.BIND)] == [EventKind.UNBIND, EventKind.BIND]
    assert not [e for e in log if e.subject in SERVING and e.kind in (EventKind.UNBIND, EventKind.BIND)]
