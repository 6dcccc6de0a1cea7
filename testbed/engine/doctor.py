"""Say which engine and plugins are used, whether they are official, and what is missing: `make doctor`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from testbed.engine.cache import Cache, find_cache
from testbed.engine.cli_source import go_version, on_path
from testbed.engine.environment import Engine, locate
from testbed.engine.progress import note
from testbed.engine.venv import is_current
from testbed.engine.versions import show_version

if TYPE_CHECKING:
    from pathlib import Path

Row = tuple[str, str, str, str]


def rows(cache: Cache, engine: Engine) -> list[Row]:
    """The table's lines: name, version, origin, path."""
    table: list[Row] = [("system python", sys.version.split()[0], "yours", sys.executable)]
    go = on_path("go", None)
    table.append(("go", show_version(go_version(go)), "yours", str(go)) if go else ("go", "", "not on PATH", ""))
    table.append(("python packages", "", _packages_state(cache), str(cache.venv)))
    table += [(piece.name, piece.version, str(piece.origin), _shown(piece.path)) for piece in engine.pieces]
    return table


def _packages_state(cache: Cache) -> str:
    if not cache.python.exists():
        return "missing"
    return "from requirements.lock" if is_current(cache) else "out of date"


def _shown(path: Path | None) -> str:
    return str(path) if path else ""


def render(table: list[Row]) -> str:
    """The table as text, its columns aligned."""
    lines = [("piece", "version", "origin", "path"), *table]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def advice(cache: Cache, engine: Engine) -> list[str]:
    """What is missing and how to get it, and what a stand-in means for the reader."""
    found = [f"missing: {name}: run `make setup`" for name in engine.missing]
    if cache.python.exists() and not is_current(cache):
        found.append("out of date: python packages: run `make setup`")
    return found


def main() -> int:
    """Print the table; the answer is 1 when something is missing or out of date."""
    cache = find_cache()
    engine = locate(cache)
    note(f"cache: {cache.root}\n\n{render(rows(cache, engine))}\n")
    problems = advice(cache, engine)
    for line in problems:
        note(line)
    if problems:
        return 1
    if engine.has_stand_ins:
        note(
            "The engine is complete. Its stand-ins do the real work (SSH, Proxmox's API) where the official plugins\n"
            "cannot be downloaded; put an official `pulumi` or a plugin on PATH and it is used instead."
        )
    else:
        note("The engine is complete and official.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
