"""One operation at a time per host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from .result import BusyError, FailedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .system import System

LOCK = "/run/lock/gpu-topology.lock"
PROGRESS_EVERY = 10.0


@contextlib.contextmanager
def host_lock(system: System, wait: float, path: str = LOCK) -> Iterator[None]:
    """Hold a flock on `path`; waits up to `wait` seconds, then BusyError. The kernel frees it when we die."""
    with contextlib.ExitStack() as stack:
        while True:
            fd = _open(system, path)
            system.locks.add(fd)
            stack.callback(_close, system, fd)
            _wait(system, fd, wait, path)
            # An uninstall that was waited for has removed the file: a lock on it would lock nobody out.
            if _same_file(fd, system.root.at(path)):
                break
        yield


def _open(system: System, path: str) -> int:
    place = system.root.at(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise FailedError(f"the lock file {path} could not be opened: {error.strerror}") from error


def _close(system: System, fd: int) -> None:
    system.locks.discard(fd)
    os.close(fd)


def _same_file(fd: int, place: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), place.stat())
    return False


def _wait(system: System, fd: int, wait: float, path: str) -> None:
    started = told = time.monotonic()
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        now = time.monotonic()
        if now - started >= wait:
            raise BusyError(
                f"another operation holds {path} after {wait:.0f} s of waiting: one operation at a time per host; "
                "let it end and run again (`fuser -v` on that file names its process)"
            )
        if now - told >= PROGRESS_EVERY:
            told = now
            system.progress(f"waiting for another operation on this host ({now - started:.0f} s)")
        time.sleep(0.1)
