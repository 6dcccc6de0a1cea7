"""A failure on the host ends in its own words."""

from __future__ import annotations

import sys
import traceback

import pytest

from host.errors import HostError, OperationError, TransportError
from host.resources.binding import DriverBindingProvider
from tests.resources.conftest import FakeHost, binding

REFUSED = OperationError(
    "bind", "refused", "0000:81:00.0 is held by PID 4711 (python3) in lxc/130. Fix: stop it", {"pid": 4711}
)
LOST = TransportError("root@192.0.2.6:22: the connection was lost")


def _call(method: str) -> None:
    provider, inputs = DriverBindingProvider(), binding()
    match method:
        case "create":
            provider.create(inputs)
        case "update":
            provider.update("id", inputs, inputs)
        case "read":
            provider.read("id", inputs)
        case _:
            provider.delete("id", inputs)


def _shown(method: str) -> str:
    """What the dynamic provider host sends to the engine of an exception: its formatted traceback."""
    try:
        _call(method)
    except Exception:  # noqa: BLE001  as the provider host does
        return traceback.format_exc()
    return "nothing was raised"


@pytest.mark.parametrize("method", ["create", "update", "read", "delete"])
@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            REFUSED,
            f"OperationError: bind was refused, nothing was changed: {REFUSED.message}\n",
        ),
        (LOST, "TransportError: root@192.0.2.6:22: the connection was lost\n"),
        (HostError("host.identityFile is missing"), "HostError: host.identityFile is missing\n"),
    ],
)
def test_a_hosts_failure_is_its_message_alone(host: FakeHost, method: str, failure: Exception, said: str) -> None:
    """A person reads what was wrong and how to fix it: no traceback, no module, no cause behind it."""
    host.failure = failure
    assert _shown(method) == said


@pytest.mark.parametrize("method", ["create", "update", "read", "delete"])
def test_a_defect_keeps_its_traceback(host: FakeHost, method: str) -> None:
    """What is no failure of a host is a defect of ours, and is shown with where it happened."""
    host.failure = ZeroDivisionError("a defect")
    shown = _shown(method)
    assert shown.startswith("Traceback (most recent call last):")
    assert "ZeroDivisionError: a defect" in shown
    assert "host/resources/agent_resource.py" in shown


def test_a_defect_keeps_its_traceback_after_a_failure(host: FakeHost) -> None:
    """One process serves every resource of a run: what a failure cut off is whole again for the next one's defect."""
    host.failure = LOST
    _shown("create")
    host.failure = ZeroDivisionError("a defect")
    assert "host/resources/agent_resource.py" in _shown("create")


def test_a_success_leaves_tracebacks_alone(host: FakeHost) -> None:
    """Tracebacks are cut off only once a failure is to be shown."""
    _call("create")
    assert sys.tracebacklimit == 1000
