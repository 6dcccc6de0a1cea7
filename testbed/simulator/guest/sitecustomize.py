"""Makes a Python process on the simulated host see a kernel: attributes of sysfs, a full disk, network namespaces.

It is copied into the site folder of the simulated host's python3, beside `simulator.json`. A write through `os.open`
and `os.write` to an attribute below R/sys goes to the simulator, which answers 0 or an errno, or not at all.
"""

import builtins
import errno
import io
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

TOLD: dict[str, Any] = json.loads(Path(__file__).with_name("simulator.json").read_text("utf-8"))
SYS = TOLD["root"] + "/sys/"
DISK = (TOLD["root"] + "/etc/", TOLD["root"] + "/var/")
ATTRIBUTES: dict[int, str] = {}
LOOPBACK = ("127.", "localhost", "0.0.0.0", "::1")

real_open, real_write, real_close = os.open, os.write, os.close
real_file_open = io.open
RealSocket = socket.socket


def ask(**request: object) -> dict[str, Any]:
    """Ask the simulator over its socket."""
    with RealSocket(socket.AF_UNIX) as line:
        line.connect("\0" + TOLD["socket"])
        line.sendall(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(b"".join(iter(lambda: line.recv(65536), b"")))
        return answer


def is_full(path: object) -> bool:
    """Whether a write to the path must fail for want of space."""
    if isinstance(path, int) or not Path(TOLD["full"]).exists():
        return False
    return os.path.realpath(os.fspath(path)).startswith(DISK)  # type: ignore[call-overload, no-any-return]


def no_space(fd: int) -> int:
    """Let every write to an open file fail with ENOSPC, by putting /dev/full in its place."""
    full = real_open("/dev/full", os.O_WRONLY)
    os.dup2(full, fd, inheritable=False)
    real_close(full)
    return fd


def open_pipes() -> list[str]:
    """The names, such as `pipe:[4242]`, of this process's pipes: it keeps them open while it sleeps in the kernel."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            names.append(str(link.readlink()))
    return [name for name in names if name.startswith("pipe:")]


def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """Open as os.open does, and note attributes of the kernel and full disks."""
    writing = flags & (os.O_WRONLY | os.O_RDWR)
    real = os.path.realpath(path) if writing and dir_fd is None and not isinstance(path, int) else ""
    if os.fsdecode(real).startswith(SYS):
        fd = real_open(path, flags & ~os.O_TRUNC & ~os.O_CREAT, mode)
        ATTRIBUTES[fd] = os.fsdecode(real)[len(SYS) :]
        return fd
    fd = real_open(path, flags, mode, dir_fd=dir_fd)
    ATTRIBUTES.pop(fd, None)
    return no_space(fd) if real and is_full(path) else fd


def write(fd: int, data: Any) -> int:
    """Write as os.write does; a kernel attribute is written by the simulator."""
    if fd not in ATTRIBUTES:
        return real_write(fd, data)
    answer = ask(op="write", path=ATTRIBUTES[fd], data=bytes(data).decode(), pipes=open_pipes())
    if answer["errno"]:
        raise OSError(answer["errno"], os.strerror(answer["errno"]))
    return len(data)


def close(fd: int) -> None:
    """Close as os.close does."""
    ATTRIBUTES.pop(fd, None)
    real_close(fd)


def file_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """Open as open does; kernel attributes are for os.open and os.write, where each write's errno is seen."""
    if any(c in mode for c in "wax+") and not isinstance(file, int):
        path = os.fsdecode(os.path.realpath(file))
        if path.startswith(SYS):
            raise OSError(errno.EOPNOTSUPP, "simulator: write kernel attributes by os.open and os.write", path)
        if is_full(file):
            opener = kwargs.pop("opener", None) or (lambda name, flags: real_open(name, flags, 0o666))
            kwargs["opener"] = lambda name, flags: no_space(opener(name, flags))
    return real_file_open(file, mode, *args, **kwargs)


class Socket(RealSocket):
    """A socket whose loopback is that of the process's network namespace."""

    def connect(self, address: Any) -> None:
        """Connect to what listens on the port in this namespace, and to nothing beyond loopback."""
        super().connect(self._here(address))

    def connect_ex(self, address: Any) -> int:
        """Connect, giving an errno."""
        try:
            return super().connect_ex(self._here(address))
        except OSError as error:
            return error.errno or errno.ECONNREFUSED

    def _here(self, address: Any) -> Any:
        if self.family not in (socket.AF_INET, socket.AF_INET6):
            return address
        host, port = address[0], address[1]
        if not host.startswith(LOOPBACK):
            raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
        answer = ask(op="port", namespace=os.environ.get("GPU_TOPOLOGY_NETNS", "host"), port=port)
        if answer["port"] is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return ("127.0.0.1", answer["port"])


os.open, os.write, os.close = open_, write, close
io.open = builtins.open = file_open
socket.socket = Socket  # type: ignore[misc]
