"""Dynamic resources without an engine and without a host."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.struct_pb2 import Struct  # type: ignore[import-untyped]
from pulumi.runtime.rpc import deserialize_properties

from host.resources.session import HostResourceProvider
from tests.facts import hosts

if TYPE_CHECKING:
    from pulumi.dynamic import CreateResult, ReadResult, UpdateResult

    from host.resources.session import Properties

SERVING = ["0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0"]
CONFIDENTIAL = ["0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0"]
MANAGED = {
    "services": [{"name": "sglang-qwen", "unit": "sglang-qwen.service", "container": 129}],
    "vms": [200],
    "containers": [129],
}


@dataclass
class FakeHost:
    """Answers with facts, notes every request, and fails where it is told to."""

    raw: hosts.Raw = field(default_factory=lambda: hosts.raw_facts("kpro6", "split"))
    requests: list[tuple[str, Any]] = field(default_factory=list)
    failure: Exception | None = None

    def facts(self, request: Any) -> hosts.Raw:
        """The facts."""
        return self.call("facts", request)

    def call(self, operation: str, request: Any) -> hosts.Raw:
        """An operation."""
        self.requests.append((operation, request))
        if self.failure is not None:
            raise self.failure
        return self.raw if operation == "facts" else {"ok": True, "changed": True}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """The host that every provider reaches: kpro6 as it is split."""
    fake = FakeHost()
    monkeypatch.setattr(HostResourceProvider, "client", lambda _provider: fake)
    # A failure turns tracebacks off for good, in a process that has no other purpose.
    monkeypatch.setattr(sys, "tracebacklimit", 1000, raising=False)
    return fake


def wired(**inputs: object) -> Properties:
    """Inputs as the engine hands them to a provider: whole numbers as doubles, nothing for None."""
    message = Struct()
    message.update(inputs)
    value: Properties = deserialize_properties(message)
    return value


def kept(result: CreateResult | UpdateResult | ReadResult) -> dict[str, Any]:
    """What the state then has of a resource."""
    assert result.outs is not None
    return result.outs


def binding(**changes: object) -> Properties:
    """Inputs of the confidential pool's binding."""
    sound = {"pool": "confidential", "devices": CONFIDENTIAL, "driver": "vfio-pci", "others": SERVING}
    return wired(**{**sound, "managed": MANAGED, "revision": "one", **changes})


def container(**changes: object) -> Properties:
    """Inputs of LXC 129's GPUs."""
    sound = {"vmid": 129, "devices": SERVING, "style": "raw", "units": ["sglang-qwen.service"]}
    return wired(**{**sound, "revision": "one", **changes})


def vm(**changes: object) -> Properties:
    """Inputs of VM 200's GPUs."""
    sound = {"vmid": 200, "mapping": "gpu-confidential", "count": 4, "start": True, "pool": "confidential"}
    return wired(**{**sound, "devices": CONFIDENTIAL, "revision": "one", **changes})


def unit(**changes: object) -> Properties:
    """Inputs of the service's unit file, as deployed on the host."""
    sound = {"name": "sglang-qwen", "unit": "sglang-qwen.service", "container": 129, "tp": 4, "enabled": True}
    path, text = "/etc/systemd/system/sglang-qwen.service", deployed_text()
    return wired(**{**sound, "path": path, "text": text, "revision": "one", **changes})


def deployed_text() -> str:
    """The unit's text on the host."""
    text = hosts.raw_facts("kpro6", "split")["services"][0]["text"]
    assert isinstance(text, str)
    return text
