"""Wait until a service generates a token: an open port, or a healthy status, is no proof."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from .diagnose import journal
from .result import FailedError, Json, LeftStartingError
from .unit import show

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import InspectLoader

    from .request import Request, Service
    from .system import System

PROGRESS_EVERY = 10.0
PAUSE = 0.5


@dataclass(frozen=True)
class Server:
    """A model server as it is to be: where it listens, its size, and how long it may take."""

    service: Service
    port: int
    host: str
    tp: int
    gpus: int
    deadline: float
    token_timeout: float
    api_key: str | None

    @classmethod
    def of(cls, request: Request) -> Server:
        """As the request has it."""
        return cls(
            service=request.service(),
            port=request.number("port"),
            host=request.text("host", "127.0.0.1"),
            tp=request.number("tp"),
            gpus=request.number("gpus"),
            deadline=request.seconds("deadline_s", 1200.0),
            token_timeout=request.seconds("token_timeout_s", 120.0),
            api_key=request.text_or_none("api_key"),
        )


class NotReadyError(FailedError):
    """The service ended, or gave no token in time; to be diagnosed."""


def ask(system: System, server: Server, timeout: float, watch: Callable[[], None] | None = None) -> dict[str, Json]:
    """One probe of the server, from within its container's network namespace.

    Its own source goes along as an argument and its request on stdin: the agent need not be a file on the host, and
    no secret is in a command line.
    """
    argv: tuple[str, ...] = ("python3", "-c", _probe_source())
    if server.service.container is not None:
        vmid = str(server.service.container)
        pid = system.need("lxc-info", "-n", vmid, "-p", "-H", limit=20).out.strip()
        argv = ("nsenter", f"--net={system.root.at(f'/proc/{pid}/ns/net')}", "--", *argv)
    request = {"host": server.host, "port": server.port, "api_key": server.api_key, "timeout_s": timeout}
    done = system.run(*argv, limit=timeout + 15, stdin=json.dumps(request), watch=watch)
    try:
        return cast("dict[str, Json]", json.loads(done.out))
    except ValueError:
        said = done.err.strip().splitlines()[-1:] or ["no answer"]
        return {"state": "loading", "detail": f"the probe failed: {said[0][:200]}"}


def wait_for_token(system: System, server: Server) -> tuple[float, dict[str, Json]]:
    """Seconds until a token came, and the probe's answer; NotReadyError when the unit ends or the time is over."""
    waiting = _Waiting(system, server, time.monotonic())
    waiting.check()
    while True:
        left = server.deadline - waiting.elapsed
        answer = ask(system, server, max(1.0, min(server.token_timeout, left)), waiting.look)
        if answer["state"] == "token":
            return waiting.elapsed, answer
        waiting.state = str(answer["state"])
        if waiting.state == "denied":
            raise NotReadyError(f"{server.service.unit} refuses the API key: give the one that its unit has")
        waiting.check()
        if waiting.elapsed >= server.deadline:
            raise NotReadyError(
                f"{server.service.unit} generated no token within {server.deadline:.0f} s (it was {waiting.state})"
            )
        waiting.tell()
        time.sleep(PAUSE)


@dataclass
class _Waiting:
    """A wait for one server: its start, what was last seen, when the person was last told."""

    system: System
    server: Server
    started: float
    state: str = "asked for a token"
    told: float = 0.0
    restarts: int | None = None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def look(self) -> None:
        """Called while a probe waits."""
        self.check()
        self.tell()

    def check(self) -> None:
        """Notice the unit's end, and a connection that is gone."""
        if self.system.cut_off:
            raise LeftStartingError(
                f"the connection was lost while {self.server.service.unit} was loading: it goes on; run again"
            )
        shown = show(self.system, self.server.service)
        active, restarts = shown.get("ActiveState", ""), int(shown.get("NRestarts") or 0)
        self.restarts = restarts if self.restarts is None else self.restarts
        ended = active in ("failed", "inactive", "deactivating") or shown.get("SubState") == "auto-restart"
        if ended or restarts > self.restarts:
            raise NotReadyError(f"{self.server.service.unit} ended after {self.elapsed:.0f} s ({active})")

    def tell(self) -> None:
        """A progress line with the journal's last, if the last one is long ago."""
        if time.monotonic() - self.told < PROGRESS_EVERY:
            return
        self.told = time.monotonic()
        last = (journal(self.system, self.server.service, 1, self.server.api_key) or ["nothing yet"])[-1]
        time_used = f"{self.elapsed:.0f} of {self.server.deadline:.0f} s"
        self.system.progress(f"{self.server.service.unit}: {self.state}, {time_used}; journal: {last}")


def _probe_source() -> str:
    """The probe's source, from a folder or from the zip that runs."""
    name = f"{__package__}.probe"
    spec = find_spec(name)
    source = cast("InspectLoader", spec.loader).get_source(name) if spec else None
    if not source:
        raise FailedError("the agent has no source of its probe: build it again")
    return source
