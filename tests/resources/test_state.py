"""What stands in a stack's state of a provider, and how it reaches the host without anything standing there."""

from __future__ import annotations

import base64
import io
import json
import pickletools
from typing import TYPE_CHECKING, Any

import dill  # type: ignore[import-untyped]
import pytest
from pulumi.dynamic import Config, ConfigureRequest
from pulumi.dynamic.dynamic import serialize_provider

from host.errors import HostError
from host.resources import session
from host.resources.binding import DriverBinding, DriverBindingProvider
from host.resources.canonical import CanonicalUnit
from host.resources.container import ContainerGpus
from host.resources.session import HostResourceProvider, whole
from host.resources.unit import UnitFile, secret_in_clear
from host.resources.vm import VmGpus
from tests.facts import hosts

if TYPE_CHECKING:
    from pathlib import Path

    from host.resources.agent_resource import ObservedResource
    from host.target import Target

RESOURCES = [DriverBinding, ContainerGpus, VmGpus, UnitFile, CanonicalUnit]
PINNED = {
    "dynamic/gpu-topology:DriverBinding": ("host.resources.binding", "DriverBindingProvider"),
    "dynamic/gpu-topology:ContainerGpus": ("host.resources.container", "ContainerGpusProvider"),
    "dynamic/gpu-topology:VmGpus": ("host.resources.vm", "VmGpusProvider"),
    "dynamic/gpu-topology:UnitFile": ("host.resources.unit", "UnitFileProvider"),
    "dynamic/gpu-topology:CanonicalUnit": ("host.resources.canonical", "CanonicalUnitProvider"),
}
"""Each stack's state holds these: its refresh, update and destroy load the class by module and name.

Moving or renaming one makes every state written before unusable, so a name here may only be added.
"""
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nprivate-key-material\n"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA"


class FakeClient:
    """A client that was made and not connected."""

    made: list[Target]

    def __init__(self, target: Target, **_: object) -> None:
        self.made.append(target)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Target]:
    """The targets of the clients that were made."""
    targets: list[Target] = []
    monkeypatch.setattr("host.client.AgentClient", type("Client", (FakeClient,), {"made": targets}))
    monkeypatch.setattr(session, "_clients", {})
    return targets


def _configured(key: str | None, **host: object) -> HostResourceProvider:
    topology = {"host": {"node": "kpro6", "address": "192.0.2.6", "hostKey": HOST_KEY, **host}}
    config = {"gpu-topology:topology": json.dumps(topology)}
    config |= {"gpu-topology:sshPrivateKey": key} if key else {}
    provider = DriverBindingProvider()
    provider.configure(ConfigureRequest(config=Config(raw_config=config, project_name="gpu-topology")))
    return provider


@pytest.mark.parametrize("topology", ["{", "null", "{}", '{"host": {"node": "kpro6"}}'])
def test_a_stack_file_without_a_way_to_the_host_is_said(topology: str) -> None:
    """A destroy runs no program that would have named the mistake before."""
    provider = DriverBindingProvider()
    config = Config(raw_config={"gpu-topology:topology": topology}, project_name="gpu-topology")
    provider.configure(ConfigureRequest(config=config))
    with pytest.raises(HostError, match="says no way to the host"):
        provider.client()


def test_types_modules_and_classes_are_pinned() -> None:
    """Every state written so far can still be read."""
    found = {
        kind._resource_type_name: (kind.provider_type.__module__, kind.provider_type.__qualname__) for kind in RESOURCES
    }
    assert found == PINNED


@pytest.mark.parametrize("kind", RESOURCES)
def test_a_provider_is_kept_by_reference(kind: type[ObservedResource]) -> None:
    """The state has the class's module and name and none of its code, so editing the code is no difference."""
    pickled = base64.b64decode(serialize_provider(kind.provider_type()))
    texts = [value for operation, value, _ in pickletools.genops(io.BytesIO(pickled)) if isinstance(value, str)]
    assert texts == [*PINNED[kind._resource_type_name]]
    assert type(dill.loads(pickled)) is kind.provider_type  # noqa: S301  our own bytes
    assert kind.provider_type.serialize_as_secret_always is False


def test_the_key_comes_from_the_configuration(made: list[Target]) -> None:
    """The private key is in the stack's configuration, encrypted; it is needed on destroy, too, and in no state."""
    _configured(KEY).client()
    [target] = made
    assert (target.address, target.port, target.host_key, target.private_key) == ("192.0.2.6", 22, HOST_KEY, KEY)
    assert "private-key-material" not in repr(target)


def test_without_a_key_the_agent_is_used(made: list[Target]) -> None:
    """A stack without a private key leaves it to the person's SSH agent."""
    _configured(None).client()
    assert made[0].private_key is None


def test_one_connection_serves_all_resources(made: list[Target]) -> None:
    """Sshd drops bursts of connections, so all resources of a run share one; another host has its own."""
    first, second = _configured(KEY).client(), _configured(KEY).client()
    assert first is second
    assert _configured(KEY, address="192.0.2.7").client() is not first
    assert [target.address for target in made] == ["192.0.2.6", "192.0.2.7"]


def test_a_missing_key_file_is_named(made: list[Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in the stack file is relative to the project's folder, and one that isn't there is named."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HostError, match=r"host\.identityFile: 'keys/none' cannot be read"):
        _configured(None, identityFile="keys/none").client()
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "none").write_text(KEY)
    _configured(None, identityFile="keys/none").client()
    assert made[0].private_key == KEY


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (129.0, "129"),
        (2.5, "2.5"),
        (True, "true"),
        (None, "null"),
        ("1.0", '"1.0"'),
        ([1.0, [2.0]], "[1, [2]]"),
        ({"a": {"b": 3.0}}, '{"a": {"b": 3}}'),
    ],
)
def test_whole_numbers_are_sent_as_such(given: object, sent: str) -> None:
    """The engine makes 129 a 129.0, which the agent refuses as a VMID; texts and truths are left alone."""
    assert json.dumps(whole(given)) == sent


@pytest.mark.parametrize("shown", ["1", "0"])
def test_progress_reaches_the_person(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shown: str
) -> None:
    """A line of the host's progress goes to standard error, which the engine shows, unless it is turned off."""
    heard: list[Any] = []
    monkeypatch.setattr("host.client.AgentClient", lambda _target, on_progress: heard.append(on_progress))
    monkeypatch.setattr(session, "_clients", {})
    monkeypatch.setenv("GPU_TOPOLOGY_PROGRESS", shown)
    _configured(KEY).client()
    heard[0]("0000:81:00.0: unbound from nvidia")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == ("0000:81:00.0: unbound from nvidia\n" if shown == "1" else "")


@pytest.mark.parametrize(
    "line",
    [
        "ExecStart=serve --api-key sk-1",
        "ExecStart=serve --api-key=sk-1",
        "ExecStart=serve --admin-api-key 'sk-1'",
        "ExecStart=serve --api-key \\\n    sk-1",
        "ExecStart=serve --api-key\\\n    sk-1",
        "ExecStart=serve --api-key\tsk-1",
        "# ExecStart=serve --api-key sk-1",
        "Environment=SGLANG_API_KEY=sk-1",
        'Environment="A=1" "HF_TOKEN=hf_1"',
        'Environment=DB_PASSWORD="x y"',
        "ExecStart=env AWS_SECRET_ACCESS_KEY=x serve",
    ],
)
def test_a_secret_in_a_unit_is_found(line: str) -> None:
    """A key or token is found in each way of writing it that systemd takes."""
    assert secret_in_clear(f"[Service]\n{line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "ExecStart=serve --api-key ${SGLANG_API_KEY}",
        "ExecStart=serve --api-key=${SGLANG_API_KEY}",
        "ExecStart=serve --api-key \\\n    $SGLANG_API_KEY",
        "ExecStart=serve --api-key '${SGLANG_API_KEY}'",
        "EnvironmentFile=/etc/sglang/api-key.env",
        "Environment=NCCL_P2P_DISABLE=1",
        "Environment=SGLANG_API_KEY=",
        "--api-key=***",
        "ExecStart=serve --tokenizer-path=/models/qwen --max-total-tokens=4096",
    ],
)
def test_a_reference_is_no_secret(line: str) -> None:
    """A variable that systemd puts in, and a word that only looks alike, hide no unit from a preview."""
    assert not secret_in_clear(f"[Service]\n{line}\nRestart=on-failure\n")


def test_the_units_of_the_project_hold_none() -> None:
    """What the simulated and the real host have deployed is shown in previews."""
    for state in ("found", "split"):
        for service in hosts.raw_facts("kpro6", state)["services"]:
            assert not secret_in_clear(service["text"])
