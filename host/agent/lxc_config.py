"""The GPU lines of a container's configuration: which they are, what they pass, and their rewriting. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NVIDIA_MAJOR = 195
"""Linux, Documentation/admin-guide/devices.txt; the other nvidia majors are dynamic."""
NEEDED = ("/dev/nvidiactl", "/dev/nvidia-uvm")
"""Without these CUDA sees no GPU."""
USEFUL = (*NEEDED, "/dev/nvidia-uvm-tools")
"""What a container that had no GPU is given where the host has it; one that had keeps its own choice."""
CONTROL_MINORS = (254, 255)
"""Minors of nvidia-modeset and nvidiactl on nvidia's own major."""
DEV_OPTIONS = "mode=0666"
"""CUDA of a user other than the container's root opens the nodes for writing; Proxmox's default is 0660."""
DEFAULT_CGROUP_KEY = "lxc.cgroup2.devices.allow"

_DEV = re.compile(r"dev(\d+):\s*(.*?)\s*")
_MOUNT = re.compile(r"lxc\.mount\.entry\s*[:=]\s*(/dev/nvidia\S*)\s.*")
_CGROUP = re.compile(r"(lxc\.cgroup2?\.devices\.allow)\s*[:=]\s*(?:c\s+(\d+):(\d+|\*)|(a))(?:\s+([rwm]+))?\s*.*")
_GPU_NODE = re.compile(r"/dev/nvidia(\d+)")
_NEW_MOUNT = "lxc.mount.entry: {node} {inner} none bind,optional,create=file"


@dataclass(frozen=True)
class Wanted:
    """What a container is to be given: device minors, and what the host's driver has at all."""

    minors: frozenset[int]
    every_minor: frozenset[int]
    useful: tuple[str, ...] = NEEDED  # those of USEFUL that the host has
    major: int = NVIDIA_MAJOR
    other_majors: frozenset[int] = frozenset()
    moved_majors: Mapping[int, int] = field(default_factory=dict)  # an earlier boot's, and the same driver's now

    def nodes(self, config: Config) -> list[str]:
        """The nodes to pass: the GPUs' own, and what goes with them."""
        beside = NEEDED if config.nodes else self.useful
        return [*(f"/dev/nvidia{minor}" for minor in sorted(self.minors)), *(beside if self.minors else ())]

    @property
    def owns_all(self) -> bool:
        """Whether it is given every GPU of the driver: then a wildcard allows no stranger's."""
        return self.minors >= self.every_minor


@dataclass(frozen=True)
class Line:
    """One line of the main section, and what it says of a GPU's node, if anything."""

    text: str
    node: str | None = None  # a device node that it passes
    dev: int | None = None  # N of devN
    cgroup: tuple[int, int | None] | None = None  # nvidia (major, minor) that it allows; None is any
    key: str = ""
    access: str = ""
    allows_all: bool = False

    @property
    def raw(self) -> bool:
        """Whether it is an nvidia line that `pct set` can't touch."""
        return self.cgroup is not None or (self.node is not None and self.dev is None)

    @property
    def ours(self) -> bool:
        """Whether it is a GPU line at all."""
        return self.node is not None or self.cgroup is not None

    @property
    def minor(self) -> int | None:
        """N, where the node is a /dev/nvidiaN."""
        match = _GPU_NODE.fullmatch(self.node or "")
        return int(match.group(1)) if match else None


@dataclass(frozen=True)
class Config:
    """A configuration file: the lines of its main section, and the sections after it (pending, snapshots) as text."""

    lines: tuple[Line, ...]
    rest: str

    @property
    def minors(self) -> frozenset[int]:
        """N of every /dev/nvidiaN that it passes."""
        return frozenset(line.minor for line in self.lines if line.minor is not None)

    @property
    def nodes(self) -> frozenset[str]:
        """Every nvidia node that it passes."""
        return frozenset(line.node for line in self.lines if line.node)

    def text(self) -> str:
        """The file's text."""
        return "".join(line.text + "\n" for line in self.lines) + self.rest

    @property
    def pending_devices(self) -> bool:
        """Whether changes of device entries wait for the container's next start."""
        section = re.search(r"^\[pve:pending\]\n((?:(?!\[).*\n?)*)", self.rest, re.MULTILINE | re.IGNORECASE)
        return bool(section and re.search(r"^(dev\d+|delete):", section.group(1), re.MULTILINE))

    def setting(self, key: str) -> str | None:
        """A plain setting's value."""
        start = f"{key}:"
        return next((line.text[len(start) :].strip() for line in self.lines if line.text.startswith(start)), None)


def parse(text: str, majors: frozenset[int] = frozenset({195})) -> Config:
    """Read a configuration; `majors` are the character majors of the host's nvidia drivers."""
    main, bracket, rest = text, "", ""
    if match := re.search(r"^\[", text, re.MULTILINE):
        main, bracket, rest = text[: match.start()], "[", text[match.end() :]
    lines = main.removesuffix("\n").split("\n") if main else []
    return Config(tuple(_line(line, majors) for line in lines), bracket + rest)


def _line(text: str, majors: frozenset[int]) -> Line:
    if match := _DEV.fullmatch(text):
        path = next((part.removeprefix("path=") for part in match.group(2).split(",") if "/dev/" in part), "")
        return Line(text, node=path if path.startswith("/dev/nvidia") else None, dev=int(match.group(1)))
    if match := _MOUNT.fullmatch(text):
        return Line(text, node=match.group(1))
    if match := _CGROUP.fullmatch(text):
        key, major, minor, everything, access = match.groups()
        if everything:
            return Line(text, allows_all=True)
        if int(major) in majors:
            rule = (int(major), None if minor == "*" else int(minor))
            return Line(text, cgroup=rule, key=key, access=access or "rwm")
    return Line(text)


def passes_exactly(config: Config, wanted: Wanted) -> bool:
    """Whether the container is given exactly the wanted GPUs, in whatever style and order."""
    if config.minors != wanted.minors or (wanted.minors and not config.nodes.issuperset(NEEDED)):
        return False
    if renumbered(config, wanted.moved_majors) != config:
        return False
    allowed = {line.cgroup[1] for line in config.lines if line.cgroup and line.cgroup[0] == wanted.major}
    if None in allowed and not wanted.owns_all:
        return False
    mounted = any(line.raw and line.node for line in config.lines)
    if mounted and not any(line.allows_all for line in config.lines):
        by_mount = {line.minor for line in config.lines if line.raw and line.minor is not None}
        others = {line.cgroup[0] for line in config.lines if line.cgroup and line.cgroup[1] is None}
        opened = None in allowed or allowed >= by_mount | {255}
        if not opened or not others >= wanted.other_majors:  # the majors beside nvidia's change with boots
            return False
    return allowed <= {None, *wanted.minors, *CONTROL_MINORS}


def renumbered(config: Config, majors: Mapping[int, int], minors: Mapping[int, int] | None = None) -> Config:
    """Say the same with the numbers of this boot: `majors` and `minors` of nvidia's own major, from old to new."""
    moved = [(line, _moved(line, majors, minors or {})) for line in config.lines]
    rules = {line for line, now in moved if line == now and line.cgroup}
    lines: list[Line] = []
    for line, now in moved:
        # A rule may stand there for the new number already.
        if line == now or now not in rules:
            lines.append(now)
        rules |= {now} if now.cgroup else set()
    return Config(tuple(lines), config.rest)


def _moved(line: Line, majors: Mapping[int, int], minors: Mapping[int, int]) -> Line:
    if line.cgroup:
        major, minor = line.cgroup
        now = (majors.get(major, major), minor)
        if major == NVIDIA_MAJOR and minor is not None:
            now = (major, minors.get(minor, minor))
        old, new = (f"{a}:{'*' if b is None else b}" for a, b in (line.cgroup, now))
        return replace(line, cgroup=now, text=line.text.replace(old, new, 1))
    if line.minor is not None and line.minor in minors:
        old, new = f"nvidia{line.minor}", f"nvidia{minors[line.minor]}"
        return replace(line, node=f"/dev/{new}", text=re.sub(rf"{old}\b", new, line.text))
    return line


def with_raw(config: Config, wanted: Wanted) -> Config:
    """Pass the wanted GPUs by raw lines: kept lines stay in place, the others go, missing ones follow their like."""
    config = renumbered(config, wanted.moved_majors)
    lines = [line for line in config.lines if not (line.node and line.dev is not None)]
    lines = [line for line in lines if not line.node or line.minor in wanted.minors or line.minor is None]
    present = {line.node for line in lines}
    missing = [node for node in wanted.nodes(config) if node not in present]
    new = [Line(_NEW_MOUNT.format(node=node, inner=node[1:]), node=node) for node in missing]
    lines = _after(lines, lambda line: line.node is not None, new)
    return Config(tuple(_with_rules(lines, wanted)), config.rest)


def _with_rules(lines: list[Line], wanted: Wanted) -> list[Line]:
    """Narrow the cgroup rules of nvidia's major to the passed minors; the other majors have no minor per GPU."""
    if any(line.allows_all for line in lines):
        return lines
    rules = [line for line in lines if line.cgroup]
    own = [line for line in rules if line.cgroup and line.cgroup[0] == wanted.major]
    key, access = (own[0].key, own[0].access) if own else (DEFAULT_CGROUP_KEY, "rwm")

    def rule(major: int, minor: int | None) -> Line:
        text = f"{key}: c {major}:{'*' if minor is None else minor} {access}"
        return Line(text, cgroup=(major, minor), key=key, access=access)

    if wanted.owns_all and any(line.cgroup == (wanted.major, None) for line in own):
        targets: list[int] = []
        allowed: set[int | None] = {None}
    else:
        targets = [*sorted(wanted.minors), 255]
        allowed = {*targets, *CONTROL_MINORS}
    kept = [line for line in lines if line not in own or (line.cgroup and line.cgroup[1] in allowed)]
    present = {line.cgroup for line in kept}
    new = [rule(wanted.major, minor) for minor in targets if (wanted.major, minor) not in present]
    majors = {line.cgroup[0] for line in rules if line.cgroup}
    new += [rule(major, None) for major in sorted(wanted.other_majors - majors)]
    if own and own[0] not in kept:
        before = sum(1 for line in lines[: lines.index(own[0])] if line in kept)
        return [*kept[:before], *new, *kept[before:]]
    return _after(kept, lambda line: line.cgroup is not None, new)


def _after(lines: list[Line], like: Callable[[Line], bool], new: list[Line]) -> list[Line]:
    """Insert lines after the last of their like, or at the end of the main section."""
    last = max((index for index, line in enumerate(lines) if like(line)), default=None)
    if last is None:
        last = max((index for index, line in enumerate(lines) if line.text.strip()), default=-1)
    return [*lines[: last + 1], *new, *lines[last + 1 :]]


@dataclass(frozen=True)
class DevPlan:
    """How to pass GPUs by devN: the file without nvidia's raw lines, then what `pct set` sets and deletes."""

    without_raw: Config
    sets: dict[str, str] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()


def plan_dev(config: Config, wanted: Wanted) -> DevPlan:
    """Pass the wanted GPUs by devN: entries that stay keep their number, new ones take the lowest free."""
    nodes = wanted.nodes(config)
    devs = {line.dev: line for line in config.lines if line.dev is not None}
    gone = [number for number, line in devs.items() if line.node and line.minor is not None and line.node not in nodes]
    kept = {line.node for number, line in devs.items() if number not in gone and line.node}
    free = (number for number in range(256) if number not in devs or number in gone)
    sets = {f"dev{next(free)}": f"{node},{DEV_OPTIONS}" for node in nodes if node not in kept}
    deletes = tuple(f"dev{number}" for number in sorted(gone) if f"dev{number}" not in sets)
    without = Config(tuple(line for line in config.lines if not line.raw), config.rest)
    return DevPlan(without, sets, deletes)


def with_gpu_lines_of(config: Config, found: Config, strangers: frozenset[int] = frozenset()) -> Config:
    """Give a configuration back the GPU lines that were found, without those of minors that others have by now."""
    lines = tuple(line for line in found.lines if line.minor is None or line.minor not in strangers)
    plain = tuple(line for line in config.lines if not line.ours)
    if plain == tuple(line for line in lines if not line.ours):
        return Config(lines, config.rest)
    taken = {line.dev for line in plain if line.dev is not None}
    free = (number for number in range(256) if number not in taken)
    own = [line if line.dev is None else _renumbered(line, next(free)) for line in lines if line.ours]
    return Config(tuple(_after(list(plain), lambda _line: False, own)), config.rest)


def _renumbered(line: Line, number: int) -> Line:
    return Line(re.sub(r"^dev\d+", f"dev{number}", line.text), node=line.node, dev=number)
