"""What the dynamic resources of one engine run share: the stack's configuration, one connection, errors fit to read."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from pulumi.dynamic import ConfigureRequest, ResourceProvider

from host.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from host.client import AgentClient

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Self = TypeVar("_Self")

Properties = dict[str, object]

_WHOLE_TRACEBACK = 1000
"""Python's own default of `sys.tracebacklimit`."""

_lock = threading.Lock()
_clients: dict[str, AgentClient] = {}


def readable(method: Callable[Concatenate[_Self, _P], _T]) -> Callable[Concatenate[_Self, _P], _T]:
    """Let a HostError reach the person as its message alone.

    The dynamic provider host sends `traceback.format_exc()`; with a limit of 0 that is just the error's own text. Any
    other exception is a defect of ours and keeps its traceback.
    """

    @functools.wraps(method)
    def wrapper(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(self, *args, **kwargs)
        except HostError as error:
            sys.tracebacklimit = 0
            raise error from None
        except Exception:
            sys.tracebacklimit = _WHOLE_TRACEBACK
            raise

    return wrapper


class HostResourceProvider(ResourceProvider):
    """A provider that reaches the stack's host; credentials come from the stack's configuration, not from its state."""

    serialize_as_secret_always = False

    def configure(self, req: ConfigureRequest) -> None:
        """Keep what is needed to connect; secrets arrive decrypted and stay in this process."""
        self._topology = str(req.config.get("topology") or "{}")
        self._private_key = req.config.get("sshPrivateKey")

    def client(self) -> AgentClient:
        """The connection that all resources of this engine run share.

        A preview only compares inputs: what reaches a host is imported here, since it would double the time that the
        provider's process takes to start.
        """
        from host.client import AgentClient  # noqa: PLC0415
        from host.target import target  # noqa: PLC0415
        from topology.config import Host  # noqa: PLC0415

        with _lock:
            if self._topology not in _clients:
                try:
                    host = Host.model_validate(json.loads(self._topology)["host"])
                except (KeyError, TypeError, ValueError) as error:
                    # A destroy or a refresh runs no program, so nothing has judged the stack file before.
                    raise HostError(
                        f"gpu-topology:topology says no way to the host: {error}. Fix: put its `host` "
                        "in the stack file back as it was at the last `up`; `pulumi preview` names what is wrong",
                    ) from error
                where = target(host, private_key=self._private_key, base=Path.cwd())
                _clients[self._topology] = AgentClient(where, on_progress=_progress)
            return _clients[self._topology]


def whole(value: object) -> object:
    """The value with whole numbers as int: the engine sends every number as a double."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: whole(item) for key, item in value.items()}
        case list() | tuple():
            return [whole(item) for item in value]
        case _:
            return value


def _progress(line: str) -> None:
    # The engine shows a plugin's standard error as diagnostics of the run.
    if os.environ.get("GPU_TOPOLOGY_PROGRESS", "1") != "0":
        print(line, file=sys.stderr, flush=True)  # noqa: T201  standard error is this process's way to the person
