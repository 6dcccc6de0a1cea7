"""Get the engine ready on any machine: `python3 -m testbed.engine.setup`, on the system's Python, in one folder."""

from __future__ import annotations

import os
import sys

from testbed.engine.cache import Cache, find_cache
from testbed.engine.cli_source import ensure_cli
from testbed.engine.environment import locate, write_env_file
from testbed.engine.pieces import ensure_pieces
from testbed.engine.progress import SetupError, note
from testbed.engine.venv import ensure_venv


def own_path(cache: Cache) -> str:
    """PATH without what an earlier set-up put there: a shell that sourced the env file asks for the same engine."""
    ours = {str(cache.bin), str(cache.venv / "bin")}
    return os.pathsep.join(entry for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry not in ours)


def set_up(cache: Cache) -> None:
    """Bring the cache up to date: packages, engine, plugins, wrappers, env file; what is there is left alone."""
    search = own_path(cache)
    with cache.locked():
        ensure_venv(cache)
        cli = ensure_cli(cache, search)
        ensure_pieces(cache, cli, search)
        write_env_file(cache)


def main() -> int:
    """Set up and say what is used; the answer is the exit code."""
    cache = find_cache()
    try:
        set_up(cache)
    except SetupError as error:
        sys.stderr.write(f"set-up failed: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("set-up interrupted: run it again to go on\n")
        return 130
    engine = locate(cache)
    for piece in engine.pieces:
        note(f"  {piece.name:<30} {piece.version:<9} {piece.origin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
