"""Which of the host's GPUs an LXC container's configuration passes, read as Proxmox VE and LXC read it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from topology.changes import Change, listed
from topology.config import Passthrough

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.address import PciAddress
    from topology.facts import ContainerFacts, Facts

NEEDED_NODES = frozenset({"nvidiactl", "nvidia-uvm"})
"""Without these CUDA sees no GPU; nvidia-uvm-tools, nvidia-modeset and nvidia-caps may be passed or not."""

_NVIDIA_MAJOR = 195
"""Linux, Documentation/admin-guide/devices.txt."""
_CONTROL_MINOR = 255
_MODESET_MINOR = 254
_LINE = re.compile(r"(lxc\.[a-z0-9_.-]+|[a-z][a-z0-9_-]*)(?::|\s*=)\s*(.*?)\s*")
_DEV_KEY = re.compile(r"dev\d+")
_NODE = re.compile(r"/?dev/(nvidia(?:\d+|ctl|-[a-z-]+(?:/.*)?))")
_GPU_NODE = re.compile(r"nvidia(\d+)")
_CGROUP_RULE = re.compile(r"(?:a|c\s+(\d+|\*):(\d+|\*))(?:\s.*)?")
_CGROUP_KEYS = {"lxc.cgroup2.devices.allow", "lxc.cgroup.devices.allow"}


@dataclass(frozen=True, slots=True)
class Passed:
    """The nvidia part of a container's configuration.

    `nodes` are names below /dev; `rules` are (major, minor) of character devices that raw lines allow, None for any.
    """

    nodes: frozenset[str]
    raw_nodes: frozenset[str]
    rules: frozenset[tuple[int | None, int | None]]

    @property
    def minors(self) -> frozenset[int]:
        """N of every /dev/nvidiaN."""
        return frozenset(int(match[1]) for node in self.nodes if (match := _GPU_NODE.fullmatch(node)))

    @property
    def style(self) -> Passthrough | None:
        """How the nodes are passed; None if none is."""
        if not self.nodes:
            return None
        return Passthrough.RAW if self.raw_nodes else Passthrough.DEV

    def allows(self, major: int, minor: int) -> bool:
        """Whether raw rules allow a device."""
        return any(ma in {None, major} and (mi is None or mi == minor) for ma, mi in self.rules)


def read_container(config: str) -> Passed:
    """Read a container's configuration file; its description, snapshots and pending changes do not count."""
    raw, dev, rules = set[str](), set[str](), set[tuple[int | None, int | None]]()
    for key, value in _current_lines(config):
        if _DEV_KEY.fullmatch(key):
            dev.update(node for part in value.split(",") for node in _nodes(part.removeprefix("path=")))
        elif key == "lxc.mount.entry":
            raw.update(_nodes(value.split()[0] if value else ""))
        elif key in _CGROUP_KEYS and (rule := _CGROUP_RULE.fullmatch(value)):
            rules.add((_number(rule[1]), _number(rule[2])))
    return Passed(frozenset(dev | raw), frozenset(raw), frozenset(rules))


def _current_lines(config: str) -> Iterator[tuple[str, str]]:
    for line in config.splitlines():
        if line.startswith("["):
            return
        if match := _LINE.fullmatch(line):
            yield match[1], match[2]


def _nodes(path: str) -> Iterator[str]:
    if match := _NODE.fullmatch(path):
        yield match[1]


def _number(text: str | None) -> int | None:
    return int(text) if text and text != "*" else None


def passed_devices(container: ContainerFacts, facts: Facts) -> tuple[PciAddress, ...]:
    """The GPUs whose device nodes the container's configuration passes, in the bus's order."""
    minors = read_container(container.config or "").minors
    return tuple(sorted(d.address for d in facts.devices if d.minor is not None and d.minor in minors))


def container_changes(container: ContainerFacts, wanted: tuple[PciAddress, ...], facts: Facts) -> tuple[Change, ...]:
    """What must differ for the container's configuration to pass exactly the GPUs `wanted`; empty if nothing."""
    subject = f"lxc {container.vmid}"
    passed = read_container(container.config or "")
    devices = passed_devices(container, facts)
    stale = passed.minors - {d.minor for d in facts.devices}
    changes: list[Change] = []
    if set(devices) != set(wanted) or stale:
        before = [*(a.short for a in devices), *(f"/dev/nvidia{n} (no GPU)" for n in sorted(stale))]
        changes.append(Change(subject, "GPUs", listed(before), listed(a.short for a in sorted(wanted))))
    if missing := NEEDED_NODES - passed.nodes:
        changes.append(Change(subject, "device nodes", "without " + listed(sorted(missing)), "with them"))
    if not changes:
        changes += _rule_changes(subject, passed, wanted, facts)
    return tuple(changes)


def _rule_changes(subject: str, passed: Passed, wanted: tuple[PciAddress, ...], facts: Facts) -> Iterator[Change]:
    """Raw lines need cgroup rules beside them, `dev[n]` keys bring their own; neither may allow another's GPU."""
    minors = {d.minor for d in facts.devices if d.address in wanted and d.minor is not None}
    others = {d.minor for d in facts.devices if d.minor is not None} - minors
    rules = {minor for major, minor in passed.rules if major == _NVIDIA_MAJOR}
    surplus = (
        others if None in rules else {n for n in rules if n is not None} - {*minors, _MODESET_MINOR, _CONTROL_MINOR}
    )
    if surplus:
        before = "allowing " + listed(f"{_NVIDIA_MAJOR}:{n}" for n in sorted(surplus))
        yield Change(subject, "cgroup rules", before, "only its own GPUs")
    if not passed.raw_nodes:
        return
    lacking = [f"{_NVIDIA_MAJOR}:{n}" for n in sorted({*minors, _CONTROL_MINOR}) if not passed.allows(_NVIDIA_MAJOR, n)]
    uvm = facts.nvidia.uvm_major
    if uvm is not None and not passed.allows(uvm, 0):
        lacking.append(f"{uvm}:*")  # uvm's major is dynamic and may be another after a boot
    if lacking:
        yield Change(subject, "cgroup rules", "without " + listed(lacking), "with them")
