"""Which engine is new enough, and which one is fetched."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# `replace_with` came with 3.207. An older engine drops the option without a word, and a service would keep running on
# devices that its pool has lost.
MINIMUM = (3, 207, 0)
PINNED = "3.276.0"

Version = tuple[int, int, int]


def parse_version(text: str) -> Version | None:
    """The first `1.2.3` in a text, a pre-release tag left aside; None where there is none."""
    found = re.search(r"\bv?(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def show_version(version: Version | None) -> str:
    """The version as a person writes it."""
    return ".".join(map(str, version)) if version else "unknown"


def version_of(pulumi: Path) -> Version | None:
    """What `pulumi version` says; None when the program does not run or says no version."""
    try:
        answer = subprocess.run([pulumi, "version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(answer.stdout) if answer.returncode == 0 else None
