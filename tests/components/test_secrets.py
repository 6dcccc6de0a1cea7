"""No secret stands in clear in the state, in a command line or in a log."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.components.programs import API_KEY, PRIVATE_KEY, built, story
from tests.components.recording import Recording, Secret, in_clear

if TYPE_CHECKING:
    from topology.plan import Plan

HELD = "hf_a-token-that-somebody-wrote-on-the-host"


def _clear_texts(recording: Recording) -> list[str]:
    inputs = [resource.inputs for resource in recording.resources.values()]
    return list(in_clear([*inputs, *(outputs for _, outputs in recording.outputs)]))


def _changed_service(**changes: Any) -> Plan:
    plan = story()["split"].plan
    service = plan.spec.services[0]
    if "append" in changes:
        changes = {"text": service.text + changes["append"]}
    return replace(plan, spec=replace(plan.spec, services=(replace(service, **changes),)))


def test_the_private_key_is_only_in_the_connections() -> None:
    """The SSH key leaves the program inside secret connections and nowhere else."""
    recording = built(story()["split"].plan, api_key=API_KEY)
    assert not [text for text in _clear_texts(recording) if "private-key-material" in text]
    for child in recording.children.values():
        hidden = {name: value for name, value in child.inputs.items() if isinstance(value, Secret)}
        if "connection" in hidden:
            connection: Any = hidden.pop("connection").value
            assert connection["privateKey"] == connection["proxy"]["privateKey"] == PRIVATE_KEY
        assert PRIVATE_KEY not in repr(hidden)


def test_the_api_key_is_only_in_secret_requests() -> None:
    """The key that asks a server for its token is on standard input, hidden, of the two actions that ask."""
    recording = built(story()["split"].plan, api_key=API_KEY)
    assert not [text for text in _clear_texts(recording) if API_KEY in text]
    hidden = {
        name: json.loads(str(child.inputs["stdin"].value))
        for name, child in recording.children.items()
        if isinstance(child.inputs.get("stdin"), Secret)
    }
    assert hidden.keys() == {"sglang-qwen-serving", "sglang-qwen-verified"}
    assert hidden["sglang-qwen-serving"]["api_key"] == API_KEY
    assert hidden["sglang-qwen-verified"]["service"]["api_key"] == API_KEY


def test_a_key_changes_nothing_else_in_a_request() -> None:
    """A request with a key is the one without it, and the key."""
    plan = story()["split"].plan
    plain, keyed = built(plan).children, built(plan, api_key=API_KEY).children
    serving = json.loads(keyed["sglang-qwen-serving"].inputs["stdin"].value)
    assert serving.pop("api_key") == API_KEY
    assert serving == json.loads(plain["sglang-qwen-serving"].inputs["stdin"])
    verified = json.loads(keyed["sglang-qwen-verified"].inputs["stdin"].value)
    assert verified["service"].pop("api_key") == API_KEY
    assert verified == json.loads(plain["sglang-qwen-verified"].inputs["stdin"])


def test_no_command_line_carries_a_request() -> None:
    """Command lines are the same for every pool and service: what they are about comes on standard input."""
    recording = built(story()["split"].plan, api_key=API_KEY)
    children = recording.children.values()
    lines = {child.inputs[name] for child in children for name in ("create", "delete") if name in child.inputs}
    words = {word for line in lines for word in line.split()}
    fixed = {"python3", "/usr/local/lib/gpu-topology-agent.pyz", "--root", "/", "--format", "text"}
    assert words - fixed == {"register", "uninstall", "check-pool", "drain", "serve", "stop", "verify"}


@pytest.mark.parametrize(
    "line",
    [
        f"# old: --api-key {HELD}\n",
        f"# old: --api-key={HELD}\n",
        f"ExecStartPre=/usr/bin/check \\\n  --admin-api-key\\\n  {HELD}\n",
        f'Environment="HF_TOKEN={HELD}"\n',
        f"Environment=SGLANG_API_KEY={HELD}\n",
        f"Environment=S3_SECRET='{HELD}'\n",
    ],
)
def test_a_unit_that_holds_a_secret_is_hidden_wherever_it_stands(line: str) -> None:
    """A key that somebody wrote into the unit on the host is a secret in the component, its children and outputs."""
    recording = built(_changed_service(append=line))
    assert not [text for text in _clear_texts(recording) if HELD in text]
    assert isinstance(recording.component("SglangService", "sglang-qwen").inputs["service"]["text"], Secret)
    for name in ("sglang-qwen-unit", "sglang-qwen-copy"):
        assert isinstance(recording.children[name].inputs["text"], Secret)
        # What the provider saw on the host is an output of its own, which the engine would keep in clear.
        assert recording.children[name].secret_outputs == ("observed",)


@pytest.mark.parametrize("line", ["# --api-key ${SGLANG_API_KEY}\n", "# --api-key=$SGLANG_API_KEY\n", ""])
def test_a_unit_without_a_secret_stays_readable(line: str) -> None:
    """A key that comes from an environment file hides nothing, so a preview shows how the unit changes."""
    recording = built(_changed_service(append=line))
    unit = recording.children["sglang-qwen-unit"]
    assert isinstance(unit.inputs["text"], str)
    assert unit.secret_outputs == ()
    assert isinstance(recording.component("SglangService", "sglang-qwen").inputs["service"]["text"], str)


def test_a_token_in_a_drop_in_is_hidden() -> None:
    """What the process gets from a drop-in is an input of the component; a token among it is not in clear."""
    environment = story()["split"].plan.spec.services[0].effective_environment
    recording = built(_changed_service(effective_environment=environment | {"HF_TOKEN": HELD}))
    assert not [text for text in _clear_texts(recording) if HELD in text]
    shown = recording.component("SglangService", "sglang-qwen").inputs["service"]["effective_environment"]
    assert shown == environment | {"HF_TOKEN": Secret(HELD)}
