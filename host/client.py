"""Typed access to the agent: it is sent along in memory, so nothing need be installed to ask a host anything."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self, cast

from host.bundle import agent_bundle
from host.errors import HostError, OperationError

if TYPE_CHECKING:
    from host.ssh import Connection
    from host.target import Target

JsonObject = Mapping[str, object]

_FACTS_TIMEOUT_S = 60
_OPERATION_TIMEOUT_S = 900
"""An operation limits each of its steps itself; this only catches a host that fell silent."""

# The zipapp's length, then the zipapp, then the request, all on standard input: one round trip, no file on the host.
_LOADER = (
    "import os,runpy,sys;i=sys.stdin.buffer;n=int(i.readline());f=os.memfd_create('agent');"
    "open(f,'wb',closefd=False).write(i.read(n));runpy.run_path('/proc/self/fd/%d'%f,run_name='__main__')"
)


def _ignore(_line: str) -> None:
    """Progress that nobody asked for."""


class AgentClient:
    """Runs the agent's operations on one host over one connection; usable from several threads."""

    def __init__(self, target: Target, *, on_progress: Callable[[str], None] = _ignore) -> None:
        from host.ssh import Connection  # noqa: PLC0415  asyncssh takes 0.2 s, and most processes never connect

        self._root = target.root
        self._connection: Connection = Connection(target)
        self._on_progress = on_progress

    def facts(self, request: JsonObject) -> JsonObject:
        """What the host is and has now: one round trip, nothing changed."""
        return self._call("facts", request, _FACTS_TIMEOUT_S)

    def call(self, operation: str, request: JsonObject) -> JsonObject:
        """Run one operation.

        Raises:
            OperationError: it was refused or failed; its `outcome` says what the host was left in.
            TransportError: the host was not reached or fell silent.
        """
        return self._call(operation, request, _OPERATION_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, operation: str, request: JsonObject, timeout_s: float) -> JsonObject:
        bundle = agent_bundle()
        stdin = b"%d\n%s%s" % (len(bundle), bundle, json.dumps(request).encode())
        command = shlex.join(["python3", "-c", _LOADER, "--root", self._root, operation])
        finished = self._connection.run(command, stdin, timeout_s=timeout_s, on_line=self._on_progress)
        result = _parse(finished.stdout)
        if result is None:
            raise HostError(
                f"the agent did not answer {operation} (exit status {finished.status}): "
                f"{finished.stderr.strip()[-600:] or 'no output'}. Rule: the host has python3 3.11 or newer. "
                "Fix: `python3 --version` on the host; Proxmox VE 8 and 9 have it",
            )
        if finished.status != 0:
            raise OperationError(
                operation,
                str(result.get("outcome", "unknown")),
                str(result.get("message", finished.stderr.strip())),
                cast("JsonObject", result.get("details") or {}),
            )
        return result


def _parse(text: str) -> JsonObject | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
