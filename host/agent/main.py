"""Command line: one operation's name, its request as JSON on stdin, its result as JSON (or text) on stdout."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .bind import bind, release
from .container import container, container_release
from .drain import drain
from .facts import VERSION, facts
from .operation import register, run_mutating
from .request import Request
from .result import EXIT_CODES, AgentError, BadRequestError, FailedError, Json
from .root import Root
from .service import serve, stop
from .system import System
from .uninstall import uninstall
from .unit import unit, unit_release
from .verify import check_pool, verify
from .vm import vm, vm_release

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from .operation import Operation

Fields = dict[str, Json]

READING: dict[str, Callable[[System, Request], Fields]] = {
    "check-pool": check_pool,
    "facts": facts,
    "verify": verify,
    "version": lambda _system, _request: {"version": VERSION},
}
MUTATING: dict[str, Callable[[Operation, Request], Fields]] = {
    "bind": bind,
    "container": container,
    "container-release": container_release,
    "drain": drain,
    "register": register,
    "release": release,
    "serve": serve,
    "stop": stop,
    "unit": unit,
    "unit-release": unit_release,
    "vm": vm,
    "vm-release": vm_release,
}
UNINSTALL = "uninstall"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one operation and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one operation; its exit code."""
    asked = _parser().parse_args(arguments)
    as_text = asked.format == "text"
    system = System(Root(Path(asked.root)), sys.stdout if as_text else sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, partial(_cut_off, system))
    try:
        fields = perform(system, asked.operation, _request())
    except AgentError as error:
        return _fail(error, as_text=as_text)
    _tell(_summary(asked.operation, fields) if as_text else json.dumps(fields), sys.stdout)
    return 0


def perform(system: System, operation: str, request: Request) -> Fields:
    """One operation's result; AgentError when it did not succeed."""
    try:
        if operation == UNINSTALL:
            return uninstall(system, request)
        if read := READING.get(operation):
            return {"ok": True, "changed": False, "steps": [], **read(system, request)}
        return run_mutating(system, operation, request, MUTATING[operation])
    except AgentError:
        raise
    except Exception as error:
        raise FailedError(
            f"{operation} failed unexpectedly ({type(error).__name__}: {error}). Nothing was changed"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-topology-agent", description=__doc__)
    parser.add_argument("--root", default="/", help="the folder that stands for / (default: /)")
    parser.add_argument("--format", choices=("json", "text"), default="json", help="what stdout carries")
    parser.add_argument("operation", choices=sorted([*READING, *MUTATING, UNINSTALL]))
    return parser


def _request() -> Request:
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    try:
        return Request.of(json.loads(text or "{}"))
    except ValueError as error:
        raise BadRequestError(f"the request on stdin is not JSON: {error}") from error


def _cut_off(system: System, _number: int, _frame: FrameType | None) -> None:
    """A lost connection: what was begun is finished; only the wait for a token looks at this."""
    system.cut_off = True


def _fail(error: AgentError, *, as_text: bool) -> int:
    if as_text:
        _tell(f"{error.outcome}: {error.message}", sys.stderr)
    else:
        result: Fields = {
            "ok": False,
            "outcome": str(error.outcome),
            "message": error.message,
            "steps": list(error.steps),
            "details": error.details,
        }
        _tell(json.dumps(result), sys.stdout)
    return EXIT_CODES[error.outcome]


def _summary(operation: str, fields: Fields) -> str:
    shown = {key: value for key, value in fields.items() if key not in ("ok", "changed", "steps")}
    details = f" {json.dumps(shown)}" if shown else ""
    return f"{operation}: {'done' if fields['changed'] else 'nothing to do, all is as wanted'}.{details}"


def _tell(text: str, stream: object) -> None:
    """The connection may be gone; the exit code still says how it ended."""
    try:
        print(text, file=stream, flush=True)  # type: ignore[call-overload]
    except OSError:
        return
