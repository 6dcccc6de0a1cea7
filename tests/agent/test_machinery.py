"""What every operation stands on: time limits, the lock, the ledger."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from host.agent import system as system_module
from host.agent.ledger import FILE, Ledger, write_atomically
from host.agent.lock import LOCK, host_lock
from host.agent.operation import run_mutating
from host.agent.request import Managed, Request, Service
from host.agent.result import (
    BusyError,
    FailedError,
    Outcome,
    RefusedError,
    StuckError,
)
from host.agent.root import Root

if TYPE_CHECKING:
    from collections.abc import Callable

    from host.agent.result import Json
    from tests.agent.conftest import Files

EMPTY = Request.of({"lock_wait_s": 5})


def forever() -> None:
    """Block as a kernel does."""
    time.sleep(3600)


def test_a_command_s_end_and_output_are_told(files: Files, commands: Callable[[str, str], None]) -> None:
    """Exit code, both outputs, and standard input."""
    commands("thing", 'read line; echo "out $line $1"; echo err >&2; exit 3')
    done = files.system.run("thing", "argument", stdin="in\n")
    assert (done.code, done.out, done.err) == (3, "out in argument\n", "err\n")
    assert done.complaint() == "`thing argument` exited with 3: err"
    with pytest.raises(FailedError, match="exited with 3: err"):
        files.system.need("thing")


def test_a_command_that_does_not_end_is_killed_with_its_children(
    files: Files, commands: Callable[[str, str], None], tmp_path: Path
) -> None:
    """The limit ends the whole process group; what it said so far is kept."""
    commands("thing", f"echo begun; sleep 600 & echo $! > {tmp_path}/child; wait")
    done = files.system.run("thing", limit=0.5)
    assert (done.code, done.out) == (None, "begun\n")
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/status")
    for _ in range(100):
        if not status.exists() or "zombie" in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


def test_a_missing_command_says_so(files: Files) -> None:
    """A host without a tool gets a message, not a traceback."""
    done = files.system.run("no-such-tool-here")
    assert done.code == 127
    assert "is it installed" in done.complaint()


def test_waiting_for_a_command_is_told(
    files: Files, commands: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress lines come while it runs, and the watcher may end the wait."""
    monkeypatch.setattr(system_module, "PROGRESS_EVERY", 0.1)
    commands("thing", "sleep 600")
    system = files.system

    def watch() -> None:
        raise FailedError("seen enough")

    with pytest.raises(FailedError, match="seen enough"):
        system.run("thing", limit=60, watch=watch)
    system.run("thing", limit=0.5)
    assert "still waiting for `thing`" in system.stream.getvalue()  # type: ignore[attr-defined]


def test_commands_run_side_by_side(files: Files, commands: Callable[[str, str], None]) -> None:
    """One that hangs costs only itself."""
    commands("quick", "echo yes")
    commands("slow", "sleep 600")
    quick, slow = files.system.run_all([("quick",), ("slow",)], 1.0)
    assert (quick.out, slow.code) == ("yes\n", None)


def test_readers_that_hang_are_left_out(files: Files) -> None:
    """What answers is there, what blocks or fails is not, and nobody waits longer than the limit."""
    readers: dict[str, Callable[[], Json]] = {
        "good": lambda: {"a": [1, None]},
        "hangs": forever,
        "fails": lambda: 1 // 0,
        "large": lambda: "x" * 1_000_000,
    }
    found = files.system.read_apart(readers, 1.0)
    assert found == {"good": {"a": [1, None]}, "large": "x" * 1_000_000}


def test_an_attribute_is_written_in_one_piece(files: Files) -> None:
    """The value reaches the file by one open and one write."""
    place = files.put("/sys/attribute", "")
    files.system.write_attribute("/sys/attribute", "vfio-pci\n")
    assert place.read_text() == "vfio-pci\n"


def test_the_kernel_s_refusal_is_an_errno(files: Files) -> None:
    """A missing attribute is ENOENT, with its path."""
    with pytest.raises(FileNotFoundError, match="/sys/none"):
        files.system.write_attribute("/sys/none", "x")


def test_a_write_that_does_not_return_is_given_up(files: Files) -> None:
    """A FIFO without a reader blocks as a hanging unbind does; the deadline holds."""
    (files.folder / "sys").mkdir()
    os.mkfifo(files.folder / "sys/unbind")
    with pytest.raises(StuckError, match="did not return within 0 s"):
        files.system.write_attribute("/sys/unbind", "0000:81:00.0", 0.3)


def test_the_lock_is_one_per_host(files: Files) -> None:
    """A second operation waits, and is told when its wait is over."""
    with (
        host_lock(files.system, 1.0),
        pytest.raises(BusyError, match="one operation at a time per host"),
        host_lock(files.system, 0.2),
    ):
        pass
    with host_lock(files.system, 0.2):
        pass


def test_a_busy_host_is_an_outcome_of_its_own(files: Files) -> None:
    """Nothing is done while another operation holds the lock."""
    place = files.put(LOCK)
    with place.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BusyError) as error:
            run_mutating(files.system, "bind", Request.of({"lock_wait_s": 0.2}), lambda _o, _r: {})
    assert error.value.outcome is Outcome.BUSY


def test_a_child_that_hangs_in_the_kernel_does_not_keep_the_lock(
    files: Files, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A writer that nothing can end must not make the host busy until its reboot."""
    (files.folder / "sys").mkdir()
    os.mkfifo(files.folder / "sys/unbind")
    children: list[int] = []
    monkeypatch.setattr(system_module, "_reap", children.append)
    system = files.system
    with host_lock(system, 1.0), pytest.raises(StuckError):
        system.write_attribute("/sys/unbind", "0000:81:00.0", 0.3)
    (child,) = children
    request.addfinalizer(lambda: os.waitpid(child, 0))
    request.addfinalizer(lambda: os.kill(child, signal.SIGKILL))
    assert Path(f"/proc/{child}").exists()
    with host_lock(system, 0.2):
        pass


def test_a_missing_ledger_is_an_empty_one(files: Files) -> None:
    """A host that was never touched has sequence 0 and nothing owned, and reading makes no file."""
    ledger = Ledger(Root(files.folder))
    ledger.save()
    assert ledger.data["sequence"] == 0
    assert not (files.folder / FILE.lstrip("/")).exists()


def test_the_ledger_is_private_and_replaced_atomically(files: Files) -> None:
    """Its folder is for root alone, and no temporary file stays."""
    ledger = Ledger(Root(files.folder))
    ledger.manage(Managed((Service("a", "a.service", 129),), (200,)))
    ledger.manage(Managed((Service("a", "a.service", 129),), (200,)))
    ledger.save()
    folder = files.folder / "var/lib/gpu-topology"
    assert (folder.stat().st_mode & 0o777, [entry.name for entry in folder.iterdir()]) == (0o700, ["ledger.json"])
    again = Ledger(Root(files.folder))
    assert again.managed == Managed((Service("a", "a.service", 129),), (200,))
    again.unmanage_service(Service("a", "a.service", 129))
    again.unmanage_guest("vms", 200)
    assert again.managed == Managed()


@pytest.mark.parametrize("text", ["{", "[]", '{"version": "v9"}'])
def test_a_ledger_that_cannot_be_read_is_refused(files: Files, text: str) -> None:
    """Acting without knowing what was found would lose it for ever."""
    files.put(FILE, text)
    with pytest.raises(RefusedError, match="the ledger"):
        Ledger(Root(files.folder))


def test_a_file_system_without_chmod_is_not_asked_for_it(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of /etc/pve are replaced without chmod, which pmxcfs refuses."""

    def refuse(*_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    place = files.put("/etc/pve/lxc/129.conf", "old")
    write_atomically(place, "new", mode=None)
    assert place.read_text() == "new"
    with pytest.raises(FailedError, match="could not be written"):
        write_atomically(place, "newer")
    assert [place.read_text(), len(list(place.parent.iterdir()))] == ["new", 1]
