from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from tests.topology.specs import raw_stack
from topology.schema import FILE, schema_text, stack_schema

if TYPE_CHECKING:
    from collections.abc import Callable


def _file(edit: Callable[[dict[str, Any]], object] = dict) -> dict[str, Any]:
    topology = raw_stack()
    edit(topology)
    return {"config": {"gpu-topology:topology": topology}, "encryptionsalt": "v1:x"}


def _errors(instance: object) -> list[str]:
    return [error.message for error in Draft202012Validator(stack_schema()).iter_errors(instance)]


def test_the_committed_schema_is_current() -> None:
    """What an editor binds is what the program reads; `python -m topology.schema` writes it."""
    assert FILE.read_text(encoding="utf-8") == schema_text()


def test_the_schema_is_one() -> None:
    """It is valid JSON Schema itself."""
    Draft202012Validator.check_schema(json.loads(schema_text()))


def test_the_stack_file_of_kpro6_is_valid() -> None:
    """The topology passes, with camelCase keys."""
    assert _errors(_file()) == []


@pytest.mark.parametrize("vmid", ["129", '"129"'], ids=["number", "text"])
def test_a_vmid_may_be_a_number_or_text(vmid: str) -> None:
    """Both are valid in YAML."""
    topology = json.dumps(_file()["config"]["gpu-topology:topology"]).replace('"129"', vmid)
    parsed = YAML(typ="safe").load(f"config: {{'gpu-topology:topology': {topology}}}")
    assert _errors(parsed) == []


def test_other_configuration_is_allowed() -> None:
    """Keys of Pulumi and of providers stand beside ours, secrets as Pulumi writes them."""
    file = _file()
    file["config"] |= {"pulumi:tags": {}, "gpu-topology:sshPrivateKey": {"secure": "v1:x"}}
    file["secretsprovider"] = "passphrase"
    assert _errors(file) == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw.update(colour="green"),
        lambda raw: raw["pools"]["serving"].update(numa_node=0),
        lambda raw: raw["pools"]["serving"]["devices"].append("1:0"),
        lambda raw: raw["pools"]["serving"]["devices"].append(3660.0),
        lambda raw: raw["pools"].update({"Bad Name": raw["pools"]["serving"]}),
        lambda raw: raw["containers"].update({"ninety": {"pool": "serving"}}),
        lambda raw: raw["host"].pop("node"),
        lambda raw: raw.update(version="v2"),
        lambda raw: raw["services"]["sglang-qwen"]["model"].update(path=None),
    ],
    ids=["key", "snake case", "address", "number", "pool name", "vmid", "missing", "version", "null"],
)
def test_a_mistake_is_underlined(edit: Callable[[dict[str, Any]], object]) -> None:
    """What the program would refuse for its shape, an editor shows."""
    assert _errors(_file(edit))


def test_a_secret_in_clear_is_underlined() -> None:
    """A private key is never plain text in a stack file."""
    file = _file()
    file["config"]["gpu-topology:sshPrivateKey"] = "-----BEGIN OPENSSH PRIVATE KEY-----"
    assert _errors(file)


def test_a_file_without_a_topology_is_underlined() -> None:
    """The one required key is ours."""
    assert _errors({"config": {}})
