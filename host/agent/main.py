"""Command line: one operation's name, its request as JSON on stdin, its result as JSON (or text) on stdout."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .request import Request
from .result import EXIT_CODES, AgentError, BadRequestError, FailedError, Json
from .root import Root
from .system import System

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

Fields = dict[str, Json]

# An operation's module and function. Only the one asked for is loaded: a zipapp holds source, and compiling all of it
# would take longer than reading a host's facts does.
READING = {
    "check-pool": ("verify", "check_pool"),
    "facts": ("facts", "facts"),
    "verify": ("verify", "verify"),
    "version": ("facts", "version"),
}
MUTATING = {
    "bind": ("bind", "bind"),
    "container": ("container", "container"),
    "container-release": ("container", "container_release"),
    "drain": ("drain", "drain"),
    "register": ("register", "register"),
    "release": ("bind", "release"),
    "serve": ("service", "serve"),
    "stop": ("service", "stop"),
    "unit": ("unit", "unit"),
    "unit-release": ("unit", "unit_release"),
    "vm": ("vm", "vm"),
    "vm-release": ("vm", "vm_release"),
}
WHOLE = {
    "boot": ("boot", "boot"),
    "uninstall": ("uninstall", "uninstall"),
}
"""These lock and record by themselves, and give a whole result."""


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
        if whole := WHOLE.get(operation):
            return _function(*whole)(system, request)
        if read := READING.get(operation):
            return {"ok": True, "changed": False, "steps": [], **_function(*read)(system, request)}
        run_mutating = _function("operation", "run_mutating")
        return run_mutating(system, operation, request, _function(*MUTATING[operation]))
    except AgentError:
        raise
    except Exception as error:
        raise FailedError(
            f"{operation} failed unexpectedly ({type(error).__name__}: {error}). Run it again; that is always safe"
        ) from error


def _function(module: str, name: str) -> Callable[..., Fields]:
    function: Callable[..., Fields] = getattr(import_module(f".{module}", __package__), name)
    return function


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-topology-agent", description=__doc__)
    parser.add_argument("--root", default="/", help="the folder that stands for / (default: /)")
    parser.add_argument("--format", choices=("json", "text"), default="json", help="what stdout carries")
    parser.add_argument("operation", choices=sorted([*READING, *MUTATING, *WHOLE]))
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
