"""A person's mistake ends in one clear message, no traceback, and an untouched host."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest

from testbed.stage import split

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.conftest import Stage

pytestmark = [pytest.mark.engine, pytest.mark.simulator]

Topology = dict[str, Any]
OTHER_KEY = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()


def _devices(*devices: object) -> Callable[[Topology], None]:
    def change(topology: Topology) -> None:
        split(topology)
        topology["pools"]["serving"]["devices"][-1:] = devices

    return change


def _set(value: object, *path: str) -> Callable[[Topology], None]:
    def change(topology: Topology) -> None:
        split(topology)
        below = topology
        for name in path[:-1]:
            below = below[name]
        below[path[-1]] = value

    return change


def _no_host_key(topology: Topology) -> None:
    del topology["host"]["hostKey"]


def _missing_vm(topology: Topology) -> None:
    split(topology)
    topology["vms"] = {"250": topology["vms"]["200"]}


MISTAKES = {
    "an address that is not on the host": (_devices("72:00.0"), ("0000:72:00.0", "pool serving")),
    "an address that is no GPU": (_devices("00:01.0"), ("0000:00:01.0", "is a PCI bridge (class 0604")),
    "a GPU on another NUMA node": (_set(1, "pools", "serving", "numaNode"), ("NUMA node 0", "numaNode")),
    "a malformed address": (_devices("7g:00.0"), ("7g:00.0", "is not a PCI address", "lspci -D")),
    "an address that lost its quotes": (_devices(3660.0), ("3660", "quotes", "61:00.0")),
    "an unknown key": (_set(4, "pools", "serving", "numa_nodes"), ("numa_nodes", "numaNode")),
    "no host key": (_no_host_key, ("exactly one of hostKey and knownHosts is required", "ssh-keyscan")),
    "a wrong host key": (
        _set(OTHER_KEY, "host", "hostKey"),
        ("another host key than the pinned one", "ssh-keygen -lf"),
    ),
    "a VM that does not exist": (_missing_vm, ("250", "200")),
    "a container that does not exist": (
        _set({"130": {"pool": "serving", "passthrough": "raw"}}, "containers"),
        ("130", "129"),
    ),
    "a placeholder that was left": (
        _set("<fill in: the host's SSH address; `ip -4 addr` on its console shows it>", "host", "address"),
        ("host.address", "ip -4 addr"),
    ),
    "--tp among the arguments": (
        _set(4, "services", "sglang-qwen", "arguments", "tp"),
        ("sglang-qwen", "tp", "computed"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_message(stage: Stage, mistake: str) -> None:
    """The preview is refused with the value and the fix, and nothing on the host changed."""
    change, said = MISTAKES[mistake]
    found = stage.simulator.contents()
    stage.workspace.edit(change)
    stage.refuses(stage.workspace.preview(), *said)
    assert stage.simulator.contents() == found
    assert not stage.simulator.own_files()


def test_a_host_that_does_not_answer_fails_in_time(stage: Stage) -> None:
    """A host that takes connections and says nothing is given up within 15 s."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        stage.workspace.topology["host"]["port"] = silent.getsockname()[1]
        began = time.monotonic()
        run = stage.workspace.preview()
        elapsed = time.monotonic() - began
    stage.refuses(run, "no SSH server answered within 6 s", "host.address")
    assert elapsed < 15


def test_a_closed_port_is_named(stage: Stage) -> None:
    """A host where no SSH server listens is named with the settings to check."""
    with socket.socket() as deaf:  # bound and not listening, so that nobody else can listen there meanwhile
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        stage.workspace.topology["host"]["port"] = port
        stage.refuses(stage.workspace.preview(), f"127.0.0.1:{port}", "cannot connect", "host.port")


def test_a_recording_that_is_not_there_is_named(stage: Stage) -> None:
    """Facts asked from a recording that nobody made say how to make it."""
    stage.workspace.topology["host"]["facts"] = "recorded"
    stage.refuses(stage.workspace.preview(), "facts/sim.json", "gpu-topology record")
