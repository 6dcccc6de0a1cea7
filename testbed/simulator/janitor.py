"""Ends what a simulator leaves behind when its process dies: it waits for that in a process of its own.

Run in a bare interpreter as `janitor.py MARKER FOLDER`; the end of its standard input means that the simulator is
gone. Everything the simulator started carries MARKER in its environment, daemons that left their session included.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

VARIABLE = "GPU_TOPOLOGY_SIMULATOR"


def watch(marker: str, folder: Path | None) -> "subprocess.Popen[bytes]":
    """Start a janitor for this process: when this process ends, its end of the pipe closes."""
    command = [sys.executable, "-IS", __file__, marker, *([str(folder)] if folder else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def sweep(marker: str, *, sign: int = signal.SIGKILL) -> list[int]:
    """Signal every process that carries the marker, apart from this one; gives their PIDs."""
    found = []
    needle = f"{VARIABLE}={marker}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), sign)
                    found.append(int(entry.name))
    return found


def main() -> None:
    """Wait for the simulator's end, then clean up."""
    sys.stdin.buffer.read()
    while sweep(sys.argv[1]):
        pass
    if len(sys.argv) > 2:
        shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    main()
