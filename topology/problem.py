"""What a rule says when it fires: object, value, rule and fix, so that a person can act on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much a problem weighs: a refusal stops the run, a warning is shown."""

    REFUSE = "refuse"
    WARN = "warn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One broken rule: `rule` is its name (`tp-divides-heads`), the rest is text for a person."""

    rule: str
    subject: str
    value: str
    why: str
    fix: str
    level: Level = Level.REFUSE

    def __str__(self) -> str:
        return f"{self.subject}: {self.value}. Rule {self.rule}: {self.why}. Fix: {self.fix}."


class TopologyError(Exception):
    """The configuration or the host breaks rules; holds every problem found, not just the first."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = problems
