"""The host as the agent touches it: commands, kernel attributes and files, each under a time limit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TextIO

from .result import FailedError, Json, StuckError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from .root import Root

PROGRESS_EVERY = 10.0
"""Seconds between progress lines of a step that waits (a person is promised one every 15 s)."""
ATTRIBUTE_LIMIT = 30.0
"""Seconds for a kernel attribute that should answer at once; a driver's probe of a large card takes a few."""


@dataclass(frozen=True)
class Completed:
    """A command that ended: its arguments, exit code (None: killed at its limit), output and error text."""

    argv: tuple[str, ...]
    code: int | None
    out: str
    err: str

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.code == 0

    def complaint(self) -> str:
        """What went wrong, for a message: the command, its exit and the end of what it said."""
        said = (self.err.strip() or self.out.strip())[-600:] or "it said nothing"
        ended = "did not end within its time limit" if self.code is None else f"exited with {self.code}"
        return f"`{' '.join(self.argv)}` {ended}: {said}"


@dataclass
class System:
    """One host: its root folder, its commands, and where progress is told."""

    root: Root
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    cut_off: bool = False  # SIGTERM or SIGHUP came: the person's connection is gone
    locks: set[int] = field(default_factory=set)  # files whose lock a child that hangs in the kernel must not keep

    def progress(self, line: str) -> None:
        """Tell the person one line; a connection that is gone must not stop the operation."""
        try:
            print(line, file=self.stream, flush=True)
        except (OSError, ValueError):
            self.cut_off = True

    def has(self, command: str) -> bool:
        """Whether a command is on the host's PATH."""
        return shutil.which(command, path=_environment()["PATH"]) is not None

    def run(
        self, *argv: str, limit: float = 60.0, stdin: str = "", watch: Callable[[], None] | None = None
    ) -> Completed:
        """Run a command to its end or its limit in seconds.

        Progress lines tell that it still runs; `watch` is called in their place and may raise to stop the waiting.
        """
        running = _Running(argv, stdin)
        started = told = time.monotonic()
        try:
            while not running.ended(0.2):
                now = time.monotonic()
                if now - started >= limit:
                    break
                if now - told >= PROGRESS_EVERY:
                    told = now
                    if watch:
                        watch()
                    else:
                        self.progress(f"still waiting for `{' '.join(argv)[:60]}` ({now - started:.0f} s)")
            return running.collect()
        finally:
            running.kill()

    def need(self, *argv: str, limit: float = 60.0, stdin: str = "") -> Completed:
        """Run a command that must succeed, or raise FailedError with what it said."""
        done = self.run(*argv, limit=limit, stdin=stdin)
        if not done.ok:
            raise FailedError(done.complaint())
        return done

    def run_all(self, commands: Sequence[tuple[str, ...]], limit: float) -> list[Completed]:
        """Run independent commands side by side, all within one limit in seconds."""
        running = [_Running(argv, "") for argv in commands]
        deadline = time.monotonic() + limit
        try:
            for one in running:
                one.ended(max(0.0, deadline - time.monotonic()))
            return [one.collect() for one in running]
        finally:
            for one in running:
                one.kill()

    def read_apart(self, readers: Mapping[str, Callable[[], Json]], limit: float) -> dict[str, Json]:
        """Call readers in children of their own, side by side; those that don't answer in time are left out.

        While a driver's removal hangs, the kernel holds the device's lock, and even reading `driver_override`
        blocks in a way that no signal ends.
        """
        pending = {self._fork_reader(reader): name for name, reader in readers.items()}
        found: dict[str, Json] = {}
        deadline = time.monotonic() + limit
        buffers: dict[tuple[int, int], bytes] = dict.fromkeys(pending, b"")
        by_fd = {child[1]: child for child in pending}
        while by_fd and (left := deadline - time.monotonic()) > 0:
            for fd in select.select(list(by_fd), [], [], left)[0]:
                child = by_fd[fd]
                if chunk := os.read(fd, 65536):
                    buffers[child] += chunk
                    continue
                del by_fd[fd]
                with contextlib.suppress(ValueError):
                    found[pending[child]] = json.loads(buffers[child])
        for pid, fd in pending:
            os.close(fd)
            _reap(pid)
        return found

    def write_attribute(self, path: str, value: str, limit: float = ATTRIBUTE_LIMIT) -> None:
        """Write a kernel attribute in a child with a deadline in seconds.

        Raises OSError with the kernel's errno, or StuckError when the write does not return: an unbind of a device
        in use waits in the kernel (D state), survives SIGKILL and ends only at the last close.
        """
        place = self.root.at(path)
        answer, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._leave_locks()
            os.close(answer)
            _write_and_exit(place, value, tell)
        os.close(tell)
        started = time.monotonic()
        try:
            while not select.select(
                [answer], [], [], min(PROGRESS_EVERY, max(0.0, started + limit - time.monotonic()))
            )[0]:
                waited = time.monotonic() - started
                if waited >= limit:
                    raise StuckError(f"writing {value!r} to {path} did not return within {limit:.0f} s")
                self.progress(f"still waiting for the kernel: {value!r} to {path} ({waited:.0f} s)")
            number = int(os.read(answer, 16) or b"5")
        finally:
            os.close(answer)
            _reap(pid)
        if number:
            raise OSError(number, os.strerror(number), path)

    def _fork_reader(self, reader: Callable[[], Json]) -> tuple[int, int]:
        answer, tell = os.pipe()
        pid = os.fork()
        if pid:
            os.close(tell)
            return pid, answer
        try:
            _leave_terminal()
            self._leave_locks()
            os.close(answer)
            data = json.dumps(reader()).encode()
            while data:
                data = data[os.write(tell, data) :]
        finally:
            os._exit(0)

    def _leave_locks(self) -> None:
        """In a forked child: it would keep the host locked for as long as it hangs, which may be until a reboot."""
        for fd in self.locks:
            os.close(fd)


class _Running:
    """A started command; its output goes to memory files, so that no pipe held by a grandchild blocks us."""

    def __init__(self, argv: tuple[str, ...], stdin: str) -> None:
        self.argv = argv
        self._out = os.memfd_create("out")
        self._err = os.memfd_create("err")
        given = os.memfd_create("in")
        os.write(given, stdin.encode()) if stdin else None
        os.lseek(given, 0, os.SEEK_SET)
        self._missing = False
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=given,
                stdout=self._out,
                stderr=self._err,
                env=_environment(),
                start_new_session=True,  # a dying connection signals our group: a command is not to die half-way
            )
        except OSError as error:
            os.write(self._err, f"{error.strerror}: is it installed and on root's PATH?".encode())
        finally:
            os.close(given)

    def ended(self, within: float) -> bool:
        if self._process is None:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        return self._process.returncode is not None

    def collect(self) -> Completed:
        code = 127 if self._process is None else self._process.returncode
        return Completed(self.argv, code, _content(self._out), _content(self._err))

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.ended(1.0)
        os.close(self._out)
        os.close(self._err)


def _content(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0).decode("utf-8", errors="replace")


def _environment() -> dict[str, str]:
    """Our environment, in English, with the folders of root's commands (an SSH exec may lack the sbin ones)."""
    path = os.environ.get("PATH", "/usr/bin:/bin")
    extra = [folder for folder in ("/usr/sbin", "/sbin") if folder not in path.split(":")]
    return os.environ | {"LC_ALL": "C", "PATH": ":".join([path, *extra])}


def _leave_terminal() -> None:
    """In a forked child: sshd keeps a command's channel open for as long as anybody holds its pipes."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _write_and_exit(place: Path, value: str, tell: int) -> NoReturn:
    number = errno.EIO
    try:
        _leave_terminal()
        fd = os.open(place, os.O_WRONLY)
        os.write(fd, value.encode())
        number = 0
    except OSError as error:
        number = error.errno or errno.EIO
    finally:
        os.write(tell, str(number).encode())
        os._exit(0)


def _reap(pid: int) -> None:
    """End a child; one that hangs in the kernel is left behind, since nothing can end it."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        for _ in range(20):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.01)
