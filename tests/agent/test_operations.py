"""An operation as a transaction: undone on failure, journalled, and honest about how it ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from host.agent.drain import drain
from host.agent.ledger import FILE, Ledger
from host.agent.operation import Operation, run_mutating
from host.agent.request import Request
from host.agent.result import (
    AgentError,
    FailedError,
    NotUndoneError,
    Outcome,
    RefusedError,
    StuckError,
)
from host.agent.root import Root
from host.agent.system import System

if TYPE_CHECKING:
    from collections.abc import Callable

    from host.agent.result import Json
    from tests.agent.conftest import Files

EMPTY = Request.of({"lock_wait_s": 5})


def run(files: Files, act: Callable[[Operation, Request], dict[str, Json]]) -> AgentError:
    """The error that an operation ends with."""
    with pytest.raises(AgentError) as error:
        run_mutating(files.system, "bind", EMPTY, act)
    return error.value


def test_undo_runs_backwards_and_the_ledger_is_as_before(files: Files) -> None:
    """A failure undoes the steps in reverse order; the ledger keeps only that something was tried."""
    undone: list[str] = []

    def act(operation: Operation, _request: Request) -> dict[str, Json]:
        for name in ("first", "second"):
            operation.undo_with(name, lambda name=name: undone.append(name))  # type: ignore[misc]
            operation.begin(name)
        operation.ledger.table("devices")["0000:81:00.0"] = {"pool": "x"}
        raise FailedError("third did not work")

    error = run(files, act)
    assert undone == ["second", "first"]
    assert (error.outcome, error.message) == (
        Outcome.UNDONE,
        "third did not work. Everything done before was undone",
    )
    assert error.steps == ["first", "second", "undo: second", "undo: first"]
    data = Ledger(Root(files.folder)).data
    assert (data["sequence"], data["devices"], data["operation"]) == (1, {}, None)


def test_what_could_not_be_undone_is_named(files: Files) -> None:
    """The other steps are undone all the same, and the ledger keeps what the next run needs."""
    undone: list[str] = []

    def fail() -> None:
        raise OSError(5, "no")

    def act(operation: Operation, _request: Request) -> dict[str, Json]:
        operation.undo_with("the good one", lambda: undone.append("good"))
        operation.undo_with("the bad one", fail)
        operation.begin("step")
        operation.ledger.table("devices")["0000:81:00.0"] = {"pool": "x"}
        raise RefusedError("no")

    error = run(files, act)
    assert error.outcome is Outcome.NOT_UNDONE
    assert "NOT undone: the bad one: [Errno 5] no" in error.message
    assert undone == ["good"]
    assert Ledger(Root(files.folder)).data["devices"] == {"0000:81:00.0": {"pool": "x"}}


def test_a_refusal_before_any_change_stays_a_refusal(files: Files) -> None:
    """Nothing was touched, so nothing is written either."""

    def act(_operation: Operation, _request: Request) -> dict[str, Json]:
        raise RefusedError("not like this")

    assert run(files, act).outcome is Outcome.REFUSED
    assert not (files.folder / FILE.lstrip("/")).exists()


def test_a_defect_is_a_message_and_is_undone(files: Files) -> None:
    """An unexpected exception is undone like any other failure, and told by its kind and text."""
    undone: list[str] = []

    def act(operation: Operation, _request: Request) -> dict[str, Json]:
        operation.undo_with("it", lambda: undone.append("it"))
        operation.begin("step")
        raise KeyError("surprise")

    error = run(files, act)
    assert error.message.startswith("KeyError: 'surprise'")
    assert (error.outcome, undone) == (Outcome.UNDONE, ["it"])


def test_a_kernel_write_that_hangs_is_never_called_undone(files: Files) -> None:
    """Everything around it may be restored, and the writer still hangs in the kernel."""

    def act(operation: Operation, _request: Request) -> dict[str, Json]:
        operation.begin("unbind")
        raise StuckError("did not return")

    assert isinstance(run(files, act), NotUndoneError)


def test_the_journal_tells_where_a_killed_run_stopped(files: Files) -> None:
    """A run that dies leaves its step in the ledger, without secrets; the next one says so and clears it."""
    request = Request.of({"lock_wait_s": 5, "pool": "serving", "api_key": "s3cret", "text": "unit"})
    operation = Operation(files.system, "bind", request)
    operation.begin("0000:81:00.0: nvidia → vfio-pci")
    text = (files.folder / FILE.lstrip("/")).read_text()
    journal = json.loads(text)["operation"]
    assert (journal["op"], journal["request"]["pool"]) == ("bind", "serving")
    assert "s3cret" not in text
    result = run_mutating(files.system, "drain", request, lambda _o, _r: {})
    assert "an earlier bind was cut off at «0000:81:00.0" in str(result["steps"])
    assert Ledger(Root(files.folder)).data["operation"] is None


def test_a_host_without_driverctl_is_refused_before_anything_is_stopped(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing there would bind the cards again at boot: that is said by the drain, while the service still runs."""
    files.gpu("0000:81:00.0", driver="nvidia", minor=4)
    monkeypatch.setattr(System, "has", lambda _self, command: command != "driverctl")
    request = Request.of({"pool": "confidential", "driver": "vfio-pci", "devices": ["0000:81:00.0"]})
    with pytest.raises(RefusedError, match="driverctl is not installed"):
        run_mutating(files.system, "drain", request, drain)
