"""Paths below the root folder: `/` on a host, a private folder on a stand-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Root:
    """The folder that stands for `/`."""

    folder: Path

    def at(self, absolute: str) -> Path:
        """The place of an absolute path of the host."""
        return self.folder / absolute.lstrip("/")

    def text(self, absolute: str) -> str | None:
        """A small file's text, or None where there is none."""
        try:
            return self.at(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def word(self, absolute: str) -> str | None:
        """A one-line file's text without white space around it; None where it is missing or empty."""
        return (self.text(absolute) or "").strip() or None

    def number(self, absolute: str) -> int | None:
        """A file's whole number, decimal or 0x…, or None."""
        try:
            return int(self.word(absolute) or "", 0)
        except ValueError:
            return None

    def link_name(self, absolute: str) -> str | None:
        """The last part of a symbolic link's target, or None."""
        try:
            return self.at(absolute).readlink().name
        except OSError:
            return None

    def names(self, absolute: str) -> list[str]:
        """A folder's entries, sorted; none where the folder is missing."""
        try:
            return sorted(entry.name for entry in self.at(absolute).iterdir())
        except OSError:
            return []
