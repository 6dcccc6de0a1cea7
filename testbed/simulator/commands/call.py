"""A command that was called, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.simulator.machine import HostMachine

LIMIT_CODE = 2


@dataclass(frozen=True)
class Answer:
    """What a command prints and its exit code."""

    stdout: str = ""
    stderr: str = ""
    code: int = 0


class LimitError(Exception):
    """The simulator does not do this; the command exits 2 and says so."""


@dataclass(frozen=True)
class Call:
    """A command's name, arguments and folder; `container` is the VMID it runs in, None on the host."""

    machine: HostMachine
    name: str
    args: tuple[str, ...]
    cwd: str
    container: int | None = None

    def path(self, argument: str) -> Path:
        """Where a path argument really points."""
        return self.machine.tree.resolve(argument, self.cwd)

    def limit(self) -> LimitError:
        """The refusal of arguments that the simulator does not know."""
        return LimitError(f"the simulator's {self.name} does not know: {self.name} {' '.join(self.args)}")


def options(
    args: tuple[str, ...],
    *,
    flags: tuple[str, ...] = (),
    valued: tuple[str, ...] = (),
) -> tuple[list[str], dict[str, list[str]]]:
    """Split arguments into words and options; `-p X`, `--property=X` and `-pX` give the same.

    Raises:
        LimitError: an option is in neither list.
    """
    words: list[str] = []
    found: dict[str, list[str]] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        name, eq, value = word.partition("=")
        short = next((v for v in valued if len(v) == 2 and word.startswith(v) and word != v), None)
        if name in valued:
            if not eq and not rest:
                raise LimitError(f"option {name} needs a value")
            found.setdefault(name, []).append(value if eq else rest.pop(0))
        elif name in flags and not eq:
            found.setdefault(name, []).append("")
        elif short:
            found.setdefault(short, []).append(word[2:])
        else:
            raise LimitError(f"the simulator does not know the option {word!r}")
    return words, found
