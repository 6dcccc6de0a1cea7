"""Which GPUs a container's configuration passes, in either style, and what must differ."""

from __future__ import annotations

import pytest

from tests.facts import hosts
from topology.address import PciAddress
from topology.config import Passthrough
from topology.facts import ContainerFacts, Facts
from topology.lxc import container_changes, passed_devices, read_container

ALL = tuple(PciAddress(f"{bus}:00.0") for bus in ("01", "11", "61", "71", "81", "91", "e1", "f1"))
NODE_0 = ALL[:4]
FOUND = hosts.facts("kpro6", "found")
SPLIT = hosts.facts("kpro6", "split")

RAW = """\
lxc.cgroup2.devices.allow: c 195:0 rwm
lxc.cgroup2.devices.allow: c 195:1 rwm
lxc.cgroup2.devices.allow: c 195:2 rwm
lxc.cgroup2.devices.allow: c 195:3 rwm
lxc.cgroup2.devices.allow: c 195:255 rwm
lxc.cgroup2.devices.allow: c 511:* rwm
lxc.mount.entry: /dev/nvidiactl dev/nvidiactl none bind,optional,create=file
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
lxc.mount.entry: /dev/nvidia3 dev/nvidia3 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry = /dev/nvidia1 dev/nvidia1 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia2 dev/nvidia2 none bind,optional,create=file
"""
DEV = """\
dev0: /dev/nvidia0,mode=0666
dev1: path=/dev/nvidia1
dev2: gid=44,path=/dev/nvidia2
dev3: /dev/nvidia3
dev4: /dev/nvidiactl
dev5: /dev/nvidia-uvm
dev6: /dev/ttyUSB0
"""


def container(config: str) -> ContainerFacts:
    """A running container with this configuration."""
    return ContainerFacts(vmid=129, exists=True, status="running", config=config)


def said(config: str, wanted: tuple[PciAddress, ...], facts: Facts) -> list[str]:
    """The changes as text."""
    return [str(change) for change in container_changes(container(config), wanted, facts)]


@pytest.mark.parametrize(("config", "style"), [(RAW, Passthrough.RAW), (DEV, Passthrough.DEV), ("cores: 4\n", None)])
def test_either_style_is_read(config: str, style: Passthrough | None) -> None:
    """Raw mount entries and dev keys name the same nodes, in whatever order and spelling."""
    passed = read_container(config)
    assert passed.minors == (frozenset({0, 1, 2, 3}) if style else frozenset())
    assert passed.style is style


def test_description_snapshots_and_pending_changes_do_not_count() -> None:
    """Only the current section passes devices."""
    config = (
        f"#lxc.mount.entry: /dev/nvidia7 dev/nvidia7 none bind\n{DEV}\n[pve:pending]\ndev0: /dev/nvidia5\n[s]\n{RAW}"
    )
    assert read_container(config) == read_container(DEV)


def test_gpus_are_told_by_their_addresses() -> None:
    """A minor stands for the GPU that has it now."""
    assert passed_devices(container(DEV), FOUND) == NODE_0


@pytest.mark.parametrize("config", [RAW, DEV])
def test_lines_that_pass_exactly_these_gpus_are_as_wanted(config: str) -> None:
    """Style and order are left as they are."""
    assert said(config, NODE_0, FOUND) == []


def test_gpus_too_many_and_too_few_are_named() -> None:
    """A change names the GPUs before and after."""
    assert said(DEV, NODE_0[:2], FOUND) == ["lxc 129: GPUs 01:00.0 11:00.0 61:00.0 71:00.0 -> 01:00.0 11:00.0"]
    assert said("", NODE_0[:1], FOUND)[0] == "lxc 129: GPUs none -> 01:00.0"


def test_a_line_for_a_gpu_that_left_the_driver_is_stale() -> None:
    """It would pass another GPU as soon as one gets that minor."""
    config = DEV + "dev7: /dev/nvidia6\n"
    assert said(config, NODE_0, SPLIT) == [
        "lxc 129: GPUs 01:00.0 11:00.0 61:00.0 71:00.0 /dev/nvidia6 (no GPU) -> 01:00.0 11:00.0 61:00.0 71:00.0",
    ]


def test_control_nodes_are_needed() -> None:
    """Without nvidiactl and nvidia-uvm CUDA sees no GPU."""
    config = DEV.replace("dev5: /dev/nvidia-uvm\n", "")
    assert said(config, NODE_0, FOUND) == ["lxc 129: device nodes without nvidia-uvm -> with them"]


def test_a_wildcard_rule_is_as_wanted_while_the_container_owns_every_gpu() -> None:
    """The same line allows strangers as soon as the host's driver has GPUs of others."""
    config = RAW.replace("c 195:0 rwm", "c 195:* rwm")
    assert said(config, NODE_0, SPLIT) == []
    assert said(config, NODE_0, FOUND) == [
        "lxc 129: cgroup rules allowing 195:4 195:5 195:6 195:7 -> only its own GPUs",
    ]


def test_a_rule_for_another_gpu_is_surplus_in_either_style() -> None:
    """A rule left over from raw lines still allows the device to what can make its node."""
    assert said(DEV + "lxc.cgroup2.devices.allow: c 195:5 rwm\n", NODE_0, FOUND) == [
        "lxc 129: cgroup rules allowing 195:5 -> only its own GPUs",
    ]


def test_raw_lines_need_rules_for_their_nodes_and_for_uvm() -> None:
    """A mount entry without a cgroup rule gives a node that cannot be opened; uvm's major may change at boot."""
    lines = RAW.replace("c 195:2 rwm", "c 1:2 rwm").replace("c 511:*", "c 509:*")
    assert said(lines, NODE_0, FOUND) == ["lxc 129: cgroup rules without 195:2 511:* -> with them"]
    everything = "lxc.cgroup2.devices.allow: a\n" + "".join(
        line for line in RAW.splitlines(keepends=True) if "cgroup" not in line
    )
    assert said(everything, NODE_0, FOUND) == []
