from __future__ import annotations

from typing import Any

import pytest

from tests.topology.specs import raw_stack
from topology.address import PciAddress
from topology.config import Driver
from topology.load import load_topology, nearest
from topology.problem import Problem, TopologyError


def _problems(raw: object) -> dict[str, Problem]:
    with pytest.raises(TopologyError) as caught:
        load_topology(raw)
    return {problem.subject: problem for problem in caught.value.problems}


def _edited(*path: str | int, value: Any) -> dict[str, Any]:
    raw = raw_stack()
    here: Any = raw
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    return raw


def test_a_stack_file_becomes_a_topology() -> None:
    """Addresses are canonical, VMIDs numbers, and what is left out has its default."""
    topology = load_topology(raw_stack())
    assert topology.pools["serving"].devices[0] == PciAddress("0000:01:00.0")
    assert topology.pools["confidential"].driver is Driver.VFIO
    assert topology.containers[129].pool == "serving"
    assert topology.services["sglang-qwen"].port == 30000


@pytest.mark.parametrize("vmid", [129, "129"], ids=["number", "text"])
def test_a_vmid_may_be_a_number_or_text(vmid: object) -> None:
    """YAML reads an unquoted VMID as a number, JSON has only text for keys."""
    assert list(load_topology(_edited("containers", value={vmid: {"pool": "serving"}})).containers) == [129]


@pytest.mark.parametrize(("raw", "says"), [(None, "is missing"), ("text", "is a str"), ([], "is a list")])
def test_no_topology_is_one_problem(raw: object, says: str) -> None:
    """Without a mapping under the key the message names the key and where to see an example."""
    problem = _problems(raw)["gpu-topology:topology"]
    assert problem.value == says
    assert "Pulumi.sim.yaml" in problem.fix


@pytest.mark.parametrize(
    ("path", "value", "subject", "says"),
    [
        (("host", "address"), "<fill in: the host's address, `ip -br a`>", "host.address", "the host's address"),
        (("host", "hostKey"), "<FILL IN `ssh-keyscan HOST`>", "host.hostKey", "`ssh-keyscan HOST`"),
        (("pools", "serving", "devices", 2), "<fill in an address>", "pools.serving.devices[2]", "an address"),
        (("services", "sglang-qwen", "port"), "<fill in a port>", "services.sglang-qwen.port", "a port"),
    ],
)
def test_a_placeholder_says_what_to_put_there(path: tuple[str | int, ...], value: str, subject: str, says: str) -> None:
    """A placeholder left in is one problem by its path, whatever the field's type, and its text is the fix."""
    problems = _problems(_edited(*path, value=value))
    assert list(problems) == [subject]
    assert problems[subject].rule == "placeholder"
    assert says in problems[subject].fix
    assert ">" not in problems[subject].fix


def test_a_placeholder_may_be_a_key() -> None:
    """A VMID that the owner must fill in is a key, and is reported once."""
    raw = _edited("vms", value={"<fill in the VM's VMID: `qm list`>": {"pool": "confidential", "mapping": "gpus"}})
    problems = _problems(raw)
    assert list(problems) == ["vms"]
    assert problems["vms"].fix == "fill in the VM's VMID: `qm list`"


def test_every_problem_is_reported_at_once() -> None:
    """Placeholders, unknown keys and wrong values come in one error."""
    raw = _edited("host", "address", value="<fill in the address>")
    raw["pools"]["serving"]["colour"] = "green"
    raw["pools"]["confidential"]["driver"] = "nouveau"
    assert list(_problems(raw)) == ["host.address", "pools.serving.colour", "pools.confidential.driver"]


def test_an_rsa_host_key_is_refused() -> None:
    """One that half of the connections could not use is named before any is opened."""
    problem = _problems(_edited("host", "hostKey", value="ssh-rsa AAAAB3NzaC1yc2EAAAADAQAB"))["host.hostKey"]
    assert "an RSA host key cannot be pinned" in problem.why
    assert "ssh-keyscan -t ed25519" in problem.fix


@pytest.mark.parametrize(
    ("path", "subject", "near"),
    [
        (("host", "hostkey"), "host.hostkey", "did you mean hostKey"),
        (("pools", "serving", "device"), "pools.serving.device", "did you mean devices"),
        (("containers", "129", "pol"), "containers.129.pol", "did you mean pool"),
        (("services", "sglang-qwen", "model", "presets"), "services.sglang-qwen.model.presets", "did you mean preset"),
        (("zzz",), "zzz", "containers, host, pools"),
    ],
)
def test_an_unknown_key_names_the_nearest_known(path: tuple[str, ...], subject: str, near: str) -> None:
    """A misspelt key is refused with its path, the nearest known key and those that there are."""
    problem = _problems(_edited(*path, value="x"))[subject]
    assert problem.rule == "unknown-key"
    assert near in problem.fix


def test_an_address_without_quotes_is_told_from_a_malformed_one() -> None:
    """A number is an address that lost its quotes in YAML 1.1; other text says how addresses are written."""
    raw = _edited("pools", "serving", "devices", value=["01:00.0", 3660.0, "1:0.0", "01:20.0"])
    problems = _problems(raw)
    assert {p.rule for p in problems.values()} == {"pci-address"}
    assert 'in quotes, "61:00.0"' in problems["pools.serving.devices[1]"].fix
    assert "lspci" in problems["pools.serving.devices[2]"].fix
    assert "slots 00 to 1f" in problems["pools.serving.devices[3]"].fix


def test_a_missing_host_key_says_how_to_get_it() -> None:
    """Host keys are pinned: without one the fix is the command that prints it."""
    raw = raw_stack()
    del raw["host"]["hostKey"]
    problem = _problems(raw)["host"]
    assert "hostKey" in problem.why
    assert "ssh-keyscan -t ed25519 192.0.2.6" in problem.fix


@pytest.mark.parametrize(
    ("path", "value", "subject", "says"),
    [
        (("pools", "serving", "gpu"), 3, "pools.serving.gpu", "preset"),
        (("pools", "serving", "gpu"), {"name": "x", "pciId": "10de:1"}, "pools.serving.gpu.memoryMib", "nvidia-smi"),
        (("pools", "serving", "numaNode"), -1, "pools.serving.numaNode", "where every device must sit"),
        (("pools", "serving", "numaNode"), None, "pools.serving", "spanNumaNodes"),
        (("pools", "serving", "devices"), ["01:00.0", "0000:01:00.0"], "pools.serving", "list a GPU once"),
        (("pools", "Serving"), {}, "pools.Serving", "small letters"),
        (("containers", "99"), {"pool": "serving"}, "containers.99", "VMID"),
        (("version",), "v2", "version", "write exactly that"),
        (("services", "sglang-qwen", "port"), "http", "services.sglang-qwen.port", "whole number"),
        (("services", "sglang-qwen", "model"), {"path": "x"}, "services.sglang-qwen.model", "gpu-topology presets"),
        (("services", "sglang-qwen", "arguments"), {"x": {}}, "services.sglang-qwen.arguments.x", "quotes"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(path: tuple[str, ...], value: object, subject: str, says: str) -> None:
    """The path is as the YAML spells it, and the fix says what to write there."""
    problems = _problems(_edited(*path, value=value))
    assert subject in problems
    assert says in problems[subject].fix
    assert str(problems[subject]).startswith(f"{subject}: ")


def test_a_long_value_is_cut() -> None:
    """A message stays readable however long the value is that somebody pasted."""
    problem = _problems(_edited("pools", "serving", "driver", value="x" * 500))["pools.serving.driver"]
    assert len(problem.value) < 100


def test_nearest_lists_what_there_is() -> None:
    """A word like nothing known gets the list alone."""
    assert nearest("abc", ("xyz",)) == "use one of: xyz"
    assert nearest("abc", ()) == "use one of: none"
