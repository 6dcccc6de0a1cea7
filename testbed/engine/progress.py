"""Show that a long step is alive, on a terminal and in a log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

CLEAR = "\r\x1b[2K"
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
PLAIN_INTERVAL = 10.0  # seconds between signs of life where there is no terminal to redraw


class SetupError(Exception):
    """A set-up that cannot go on: the message says what was wrong and what to do."""


def note(text: str) -> None:
    """Tell the person something, at once."""
    cleared = CLEAR if sys.stdout.isatty() else ""  # a spinner may be on the line
    print(cleared + text, flush=True)  # noqa: T201 - a command line's voice


class Step:
    """One step under way; `say` names what it is at, `outcome` is what its closing line tells."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outcome = ""
        self._latest = ""
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Name what the step is doing now."""
        self._latest = text.strip() or self._latest

    def status(self, width: int) -> str:
        """The step's name, its seconds and what it is at, cut to the width."""
        return f"{self.name}  {self.elapsed:.0f} s  {self._latest}"[:width]


@contextmanager
def step(name: str) -> Iterator[Step]:
    """Run a block as a named step, with a live line while it runs and a closing line with its time."""
    current = Step(name)
    finished = threading.Event()
    watcher = threading.Thread(target=_redraw if sys.stdout.isatty() else _repeat, args=(current, finished))
    watcher.start()
    try:
        yield current
    except BaseException:
        _end(watcher, finished)
        note(f"✗ {name}  {current.elapsed:.1f} s")
        raise
    _end(watcher, finished)
    note(f"✓ {name}  {current.elapsed:.1f} s  {current.outcome}".rstrip())


def _end(watcher: threading.Thread, finished: threading.Event) -> None:
    finished.set()
    watcher.join()


def _redraw(current: Step, finished: threading.Event) -> None:
    width = shutil.get_terminal_size().columns - 3
    turn = 0
    while not finished.wait(0.1):
        sys.stdout.write(f"{CLEAR}{SPINNER[turn % len(SPINNER)]} {current.status(width)}")
        sys.stdout.flush()
        turn += 1
    sys.stdout.write(CLEAR)


def _repeat(current: Step, finished: threading.Event) -> None:
    while not finished.wait(PLAIN_INTERVAL):
        note(f"… {current.status(160)}")


def run(
    command: Sequence[str | Path], current: Step, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> None:
    """Run a command, its newest line shown as the step's; raise SetupError with its last lines when it fails."""
    tail: deque[str] = deque(maxlen=25)
    with subprocess.Popen(
        [os.fspath(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(env) if env is not None else None,
        cwd=cwd,
    ) as process:
        try:
            for line in process.stdout or ():
                tail.append(line.rstrip())
                current.say(line)
        except BaseException:
            process.terminate()
            raise
    code = process.returncode
    if code:
        shown = "\n".join(f"    {line}" for line in tail)
        raise SetupError(f"{current.name}: `{' '.join(map(str, command))}` ended with {code}:\n{shown}")
