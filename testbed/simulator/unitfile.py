"""systemd unit files, as far as a service that runs SGLang needs them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)\}|(\w+))")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_ESCAPE = re.compile(r"\\(?:([nt])|.)")
_EXEC = ("ExecStartPre", "ExecStart", "ExecStartPost")
_PREFIXES = "-@:+!"


@dataclass(frozen=True)
class Command:
    """A command of a unit; one that is `optional` may fail."""

    argv: list[str]
    optional: bool


@dataclass(frozen=True)
class UnitFile:
    """The directives of a unit and its drop-ins, in order; an empty value resets what came before it."""

    directives: tuple[tuple[str, str, str], ...]

    def values(self, section: str, key: str) -> list[str]:
        """Every value of a directive since its last reset."""
        found: list[str] = []
        for where, name, value in self.directives:
            if (where, name) == (section, key):
                found = [*found, value] if value else []
        return found

    def last(self, section: str, key: str, default: str = "") -> str:
        """The value of a directive that keeps the last one."""
        values = self.values(section, key)
        return values[-1] if values else default

    def names(self, section: str, key: str) -> list[str]:
        """The unit names in every value of a directive."""
        return [name for value in self.values(section, key) for name in value.split()]

    def environment(self, read: Callable[[str], str | None]) -> dict[str, str]:
        """What the process gets from Environment= and EnvironmentFile=.

        Raises:
            FileNotFoundError: an environment file that is not optional is missing.
        """
        result: dict[str, str] = {}
        for line in self.values("Service", "Environment"):
            result |= dict(_assignments(_words(line)))
        for name in self.values("Service", "EnvironmentFile"):
            text = read(name.lstrip("-"))
            if text is None and not name.startswith("-"):
                raise FileNotFoundError(name)
            lines = (line.strip() for line in (text or "").splitlines())
            result |= dict(_assignments(" ".join(shlex.split(x)) for x in lines if x and x[0] not in "#;"))
        return result

    def commands(self, environment: dict[str, str]) -> list[Command]:
        """What a start runs, in order, with variables, `$$` and `%%` replaced."""
        found = [_command(value, environment) for key in _EXEC for value in self.values("Service", key)]
        return [command for command in found if command.argv]


def parse_unit(texts: Iterable[str]) -> UnitFile:
    """Parse a unit file and its drop-ins, in the order systemd reads them."""
    directives: list[tuple[str, str, str]] = []
    for text in texts:
        section = ""
        for line in _joined(text):
            if line.startswith("["):
                section = line.strip("[]")
            elif "=" in line:
                key, _, value = line.partition("=")
                directives.append((section, key.strip(), value.strip()))
    return UnitFile(tuple(directives))


def seconds(span: str) -> float | None:
    """Read a time span such as `180`, `3min` or `1min 30s`; None for `infinity` and 0, which are no limit."""
    return sum(float(number) * _SECONDS[unit] for number, unit in _SPAN.findall(span)) or None


def _joined(text: str) -> list[str]:
    """Lines without comments, continuation lines joined to the one they continue."""
    lines: list[str] = []
    pending = ""
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line.endswith("\\"):
            pending += line[:-1].rstrip() + " "
            continue
        lines.append(pending + line)
        pending = ""
    return [*lines, pending] if pending else lines


def _words(text: str) -> list[str]:
    """A directive's words: quotes and the escapes of newline and tab resolved, `%%` read as one."""
    known = {"n": "\n", "t": "\t"}
    return shlex.split(_ESCAPE.sub(lambda m: known[m[1]] if m[1] else m[0], text).replace("%%", "%"))


def _command(text: str, environment: dict[str, str]) -> Command:
    bare = text.lstrip(_PREFIXES)
    argv = [_VARIABLE.sub(lambda m: m[1] or environment.get(m[2] or m[3], ""), word) for word in _words(bare)]
    return Command(argv, optional="-" in text[: len(text) - len(bare)])


def _assignments(words: Iterable[str]) -> list[tuple[str, str]]:
    return [(k, v) for k, eq, v in (w.partition("=") for w in words) if eq]
