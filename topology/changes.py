"""What will differ, in words for a person: object, what of it, from -> to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ABSENT = "absent"
"""What stands on the side of a change where there is nothing."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between the host and what must be: `service sglang-qwen: tp 8 -> 4`."""

    object: str
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.object}: {self.what} {self.before} -> {self.after}"


def shown(name: str, value: str | None) -> str:
    """A value as a person may see it: absent if None, masked if its name says that it is a secret."""
    if value is None:
        return ABSENT
    return "***" if _SECRET.search(name) else value


def listed(items: Iterable[object]) -> str:
    """Several values in one change; `none` for an empty list."""
    return " ".join(map(str, items)) or "none"
