from __future__ import annotations

from typing import Any

import pytest

from testbed.engine.plugins._schema import Failure, Schema
from testbed.engine.plugins._wire import ASSET, SIGNATURE, UNKNOWN, reveal, secret, signature

REMOTE = "command:remote:Command"
COPY = "command:remote:CopyToRemote"
VM = "proxmoxve:index/vmLegacy:VmLegacy"


@pytest.fixture(scope="module")
def command() -> Schema:
    """The schema of the command plugin."""
    return Schema.shipped("command")


@pytest.mark.parametrize(
    ("props", "failure"),
    [
        ({}, Failure("connection", "missing required property 'connection'")),
        ({"connection": {"host": "h"}, "creat": "x"}, Failure("creat", "unknown property 'creat'; is 'create' meant?")),
        ({"connection": {"host": "h"}, "zzz": 1}, Failure("zzz", "unknown property 'zzz'")),
        ({"connection": {}}, Failure("connection.host", "missing required property 'host'")),
        ({"connection": {"host": "h", "port": "22"}}, Failure("connection.port", "must be a number, not a string")),
        (
            {"connection": {"host": "h", "dialErrorLimit": 1.5}},
            Failure("connection.dialErrorLimit", "must be an integer, not a number"),
        ),
        ({"connection": "h"}, Failure("connection", "must be an object, not a string")),
        (
            {"connection": {"host": "h", "proxy": {"host": 1}}},
            Failure("connection.proxy.host", "must be a string, not a number"),
        ),
        ({"connection": {"host": "h"}, "create": ["x"]}, Failure("create", "must be a string, not an array")),
        (
            {"connection": {"host": "h"}, "environment": {"A": 1}},
            Failure("environment.A", "must be a string, not a number"),
        ),
        ({"connection": {"host": "h"}, "triggers": "x"}, Failure("triggers", "must be an array, not a string")),
        (
            {"connection": {"host": "h"}, "addPreviousOutputInEnv": 1},
            Failure("addPreviousOutputInEnv", "must be a boolean, not a number"),
        ),
        (
            {"connection": {"host": "h"}, "logging": "all"},
            Failure("logging", "must be one of stdout, stderr, stdoutAndStderr, none, not 'all'"),
        ),
    ],
)
def test_a_wrong_input_is_named_with_its_reason(command: Schema, props: dict[str, Any], failure: Failure) -> None:
    """Unknown and missing properties, wrong types and values outside an enumeration are found at any depth."""
    assert command.check(REMOTE, props) == [failure]


@pytest.mark.parametrize(
    "props",
    [
        {"connection": {"host": "h"}},
        {"connection": secret({"host": secret("h"), "privateKey": secret("k")}), "stdin": secret("s")},
        {"connection": UNKNOWN, "create": UNKNOWN, "triggers": UNKNOWN},
        {"connection": {"host": UNKNOWN, "port": UNKNOWN}, "logging": UNKNOWN},
        {"connection": {"host": "h"}, "triggers": [1, "x", {"a": [True]}, None], "delete": None},
        {"connection": {"host": "h", "port": 22}, "logging": "none", "environment": {"A": "b"}},
    ],
)
def test_a_right_input_passes(command: Schema, props: dict[str, Any]) -> None:
    """Secrets and unknowns stand for values of any type."""
    assert command.check(REMOTE, props) == []


def test_a_secret_of_the_wrong_type_is_not_shown(command: Schema) -> None:
    """The failure says what kind of value it was, not which."""
    props: dict[str, Any] = {"connection": secret("hunter2"), "stdin": secret(12345), "logging": secret("hunter2")}
    failures = command.check(REMOTE, props)
    assert [failure.path for failure in failures] == ["connection", "stdin", "logging"]
    assert "hunter2" not in str(failures)
    assert "12345" not in str(failures)


def test_an_asset_is_an_asset(command: Schema) -> None:
    """A path as plain text is not taken for a file."""
    props: dict[str, Any] = {"connection": {"host": "h"}, "remotePath": "/x"}
    assert command.check(COPY, {**props, "source": {SIGNATURE: ASSET, "path": "/a"}}) == []
    assert command.check(COPY, {**props, "source": "/a"}) == [
        Failure("source", "must be an asset or an archive, not a string")
    ]


def test_defaults_fill_in_at_any_depth(command: Schema) -> None:
    """A connection gets its defaults, a proxy too, and a secret stays one."""
    filled = command.with_defaults(REMOTE, {"connection": secret({"host": "h", "proxy": {"host": "p", "port": 2222}})})
    assert signature(filled["connection"]) is not None
    defaults = {"dialErrorLimit": 10, "perDialTimeout": 15, "user": "root"}
    proxy = {"host": "p", "port": 2222, **defaults}
    assert reveal(filled["connection"]) == {"host": "h", "port": 22, "proxy": proxy, **defaults}


def test_only_triggers_replace_a_command(command: Schema) -> None:
    """Every other input is changed in place."""
    assert {name for name in command.inputs(REMOTE) if command.replaces(REMOTE, name)} == {"triggers"}
    assert {name for name in command.inputs(COPY) if command.replaces(COPY, name)} == {"triggers"}


def test_the_vm_replaces_as_its_schema_says() -> None:
    """Memory encryption is the one top-level input that the schema itself says replaces."""
    schema = Schema.shipped("proxmoxve")
    assert {name for name in schema.inputs(VM) if schema.replaces(VM, name)} == {"amdSev"}


@pytest.mark.parametrize(("name", "version"), [("command", "1.2.1"), ("proxmoxve", "8.6.0")])
def test_the_versions_are_those_of_the_real_plugins(name: str, version: str) -> None:
    """The SDKs that the program uses ask for exactly these plugins."""
    assert Schema.shipped(name).version == version
