"""What a person wrote into a stack's configuration, and how a mistake there is said."""

from __future__ import annotations

import contextvars
import json
from typing import TYPE_CHECKING, Any

import pulumi
import pytest
from pulumi_proxmoxve import Provider

from components import carry_out, settings
from host.errors import HostError
from tests.components.recording import Secret, record
from tests.facts import hosts
from topology.facts import Facts
from topology.problem import TopologyError

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "sk-not-to-be-shown"


def configured(act: Callable[[], Any], values: dict[str, str], *, secret: bool = True) -> Any:
    """Call `act` with a stack's configuration, all of it secret or none of it."""

    def within() -> Any:
        names = {f"gpu-topology:{name}": value for name, value in values.items()}
        pulumi.runtime.set_all_config(names, list(names) if secret else [])
        return act()

    return contextvars.copy_context().run(within)


def refusal(act: Callable[[], Any], values: dict[str, str], *, secret: bool = True) -> str:
    """What `act` is refused with."""
    with pytest.raises(TopologyError) as refused:
        configured(act, values, secret=secret)
    return str(refused.value)


@pytest.mark.parametrize("name", ["sshPrivateKey", "proxmoxApiToken", "serviceApiKeys"])
def test_a_secret_in_clear_is_refused_and_not_repeated(name: str) -> None:
    """A secret that was set without --secret stands in the stack file: it is named, its value is not."""
    said = refusal(lambda: settings.secret_setting(name), {name: KEY}, secret=False)
    assert f"gpu-topology:{name}: stands in the stack file in clear" in said
    assert f"pulumi config set --secret {name}" in said
    assert KEY not in said


def test_a_secret_is_read() -> None:
    """One that is kept encrypted arrives; one that is not there is none."""
    assert configured(lambda: settings.secret_setting("sshPrivateKey"), {"sshPrivateKey": KEY}) == KEY
    assert configured(lambda: settings.secret_setting("sshPrivateKey"), {}) is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (KEY, "is no JSON object of texts"),
        (json.dumps([KEY]), "is no JSON object of texts"),
        (json.dumps({"sglang-qwen": {"key": KEY}}), "is no JSON object of texts"),
        (json.dumps({"sglang-quen": KEY}), "has a key for sglang-quen"),
    ],
)
def test_api_keys_that_belong_to_no_service_are_refused(keys: str, said: str) -> None:
    """A key for a service that is not there would be left out silently; no key is repeated."""
    text = refusal(lambda: settings.api_key_settings(hosts.split()), {"serviceApiKeys": keys})
    assert f"gpu-topology:serviceApiKeys: {said}" in text
    assert "the services are sglang-qwen" in text
    assert KEY not in text


def test_credentials_stay_secret() -> None:
    """API keys and Proxmox's credentials go on as secrets, for the state holds what they are given to."""

    def use() -> None:
        carry_out.proxmox_provider(hosts.split().proxmox)
        [(service, key)] = settings.api_key_settings(hosts.split()).items()
        Provider(service, api_token=key)

    values = {"proxmoxApiToken": KEY, "proxmoxPassword": KEY, "serviceApiKeys": json.dumps({"sglang-qwen": KEY})}
    made = {r.name: r.inputs for r in record(lambda: configured(use, values)).resources.values()}
    hidden = (made["proxmox"]["apiToken"], made["proxmox"]["password"], made["sglang-qwen"]["apiToken"])
    assert hidden == (Secret(KEY), Secret(KEY), Secret(KEY))
    assert configured(lambda: settings.api_key_settings(hosts.split()), {}) == {}


def test_proxmox_without_credentials_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the stack nor the environment has any: the message names the stack's setting, not the provider's."""
    for name in ("PROXMOX_VE_API_TOKEN", "PROXMOX_VE_PASSWORD", "PROXMOX_VE_AUTH_TICKET"):
        monkeypatch.delenv(name, raising=False)
    text = refusal(lambda: carry_out.proxmox_provider(hosts.split().proxmox), {})
    assert "--secret proxmoxApiToken" in text
    monkeypatch.setenv("PROXMOX_VE_API_TOKEN", "root@pam!test=0")
    assert len(record(lambda: carry_out.proxmox_provider(hosts.split().proxmox)).resources) == 1


@pytest.mark.parametrize(("value", "said"), [("kpro6", "is a str"), ("[]", "is a list"), ("[", "is a str")])
def test_a_topology_that_is_no_mapping_is_named(value: str, said: str) -> None:
    """A text where the topology must be ends in a message of the loader's."""
    assert f"gpu-topology:topology: {said}" in refusal(settings.topology_setting, {"topology": value}, secret=False)


def test_a_recording_that_still_holds_is_carried_out() -> None:
    """Facts that were recorded, and a live host that gives the same plan though other processes run there by now."""
    raw = hosts.raw_facts("kpro6", "found")
    recorded = hosts.plan(hosts.split(), Facts.model_validate(raw))
    raw["services"][0]["main_pid"] = 77
    carry_out.need_same_plan(recorded, hosts.plan(hosts.split(), Facts.model_validate(raw)))


def test_a_recording_that_no_longer_holds_is_refused() -> None:
    """A unit that was edited since would be overwritten by what was recorded of it."""
    raw = hosts.raw_facts("kpro6", "found")
    recorded = hosts.plan(hosts.whole(), Facts.model_validate(raw))
    raw["services"][0]["text"] = raw["services"][0]["text"].replace("--tp 8", "--tp 4")
    with pytest.raises(HostError, match=r"service sglang-qwen: tp 4 -> 8.*gpu-topology record"):
        carry_out.need_same_plan(recorded, hosts.plan(hosts.whole(), Facts.model_validate(raw)))
