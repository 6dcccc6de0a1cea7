"""The located engine, and the environment that runs it apart from a person's own Pulumi."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from testbed.engine.cache import SHARED, Cache, find_cache, link, write_atomically
from testbed.engine.cli_source import DYNAMIC, LANGUAGE, Source, cli_on_path
from testbed.engine.pieces import COMMAND, PROXMOXVE, Origin, Piece, describe
from testbed.engine.versions import show_version

if TYPE_CHECKING:
    from pathlib import Path

ORIGINS = {Source.PATH: Origin.PATH, Source.INSTALLER: Origin.INSTALLED, Source.GO: Origin.BUILT}

# Of the caller's environment, what would change an engine under test: a stale agent breaks the command provider even
# with a key, and these name another account, backend, stack or program than the one asked for.
STRIPPED = ("SSH_AUTH_SOCK", "SSH_AGENT_PID", "PULUMI_ACCESS_TOKEN", "PULUMI_STACK", "PULUMI_CONFIG_PASSPHRASE_FILE")


TESTBED_PASSPHRASE = "testbed"  # noqa: S105 - of stacks whose secrets are the simulator's


@dataclass(frozen=True)
class Engine:
    """Where each piece of the engine is."""

    pulumi: Piece
    language: Piece
    dynamic: Piece
    command: Piece
    proxmoxve: Piece
    python: Path
    bin: Path

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of the pieces, the engine itself first."""
        return (self.pulumi, self.language, self.dynamic, self.command, self.proxmoxve)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of what is not there."""
        absent = tuple(piece.name for piece in self.pieces if piece.origin is Origin.MISSING)
        return absent if self.python.exists() else (*absent, "python packages")

    @property
    def has_stand_ins(self) -> bool:
        """Whether a provider plugin is this project's stand-in."""
        return self.command.is_stand_in or self.proxmoxve.is_stand_in


def search_path(cache: Cache, base: str | None = None) -> str:
    """PATH with the private folder first, which holds only what the rest of PATH lacks, then the environment's."""
    rest = os.environ.get("PATH", os.defpath) if base is None else base
    ours = [str(cache.bin), str(cache.venv / "bin")]
    return os.pathsep.join([*ours, *(entry for entry in rest.split(os.pathsep) if entry not in ours)])


def locate(cache: Cache | None = None) -> Engine:
    """Find the engine that `engine_environment` gives its callers, as the engine itself would look its plugins up."""
    cache = cache or find_cache()
    search = search_path(cache)
    cli = cli_on_path(search)
    if cli is not None and cli.path.parent == cache.bin:
        cli = replace(cli, source=Source.INSTALLER if cli.path.is_symlink() else Source.GO)
    pulumi = (
        Piece("pulumi", cli.path, show_version(cli.version), ORIGINS[cli.source])
        if cli
        else Piece("pulumi", None, "", Origin.MISSING)
    )
    language, dynamic, command, proxmoxve = (
        describe(cache, name, cli, search) for name in (LANGUAGE, DYNAMIC, COMMAND, PROXMOXVE)
    )
    return Engine(pulumi, language, dynamic, command, proxmoxve, cache.python, cache.bin)


def engine_environment(
    cache: Cache, *, home: Path, backend: Path, passphrase: str = TESTBED_PASSPHRASE, base: dict[str, str] | None = None
) -> dict[str, str]:
    """The environment for one `pulumi` with a home and a state of its own.

    `home` becomes PULUMI_HOME and `backend` the folder of a file backend; both are created by whoever runs the
    engine. `base` is the environment to start from, the process's own where it is left out.
    """
    start = dict(os.environ if base is None else base)
    environment = {name: value for name, value in start.items() if name not in STRIPPED}
    environment |= {
        "PATH": search_path(cache, start.get("PATH", os.defpath)),
        "VIRTUAL_ENV": str(cache.venv),
        "PULUMI_HOME": str(home),
        "PULUMI_BACKEND_URL": f"file://{backend}",
        "PULUMI_CONFIG_PASSPHRASE": passphrase,
        **plugin_settings(cache),
    }
    return environment


def plugin_settings(cache: Cache) -> dict[str, str]:
    """The PULUMI_ variables that keep the engine to what is here."""
    settings = {"PULUMI_SKIP_UPDATE_CHECK": "1"}
    if _stand_ins_used(cache):
        settings["PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION"] = "true"
    return settings


def _stand_ins_used(cache: Cache) -> bool:
    return any((cache.bin / name).is_file() and not (cache.bin / name).is_symlink() for name in (COMMAND, PROXMOXVE))


def write_env_file(cache: Cache) -> None:
    """Write the file that gives a person's shell this engine: `source .cache/env`.

    It chooses no home, no backend and no passphrase: the state of a real host belongs neither in a cache that
    `make clean` removes nor under a passphrase that everybody knows.
    """
    lines = ["# Written by `make setup`. In a shell: source .cache/env"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plugin_settings(cache).items()]
    lines.append(f"export VIRTUAL_ENV={shlex.quote(str(cache.venv))}")
    for entry in (cache.venv / "bin", cache.bin):
        quoted = shlex.quote(str(entry))
        lines.append(f'case ":$PATH:" in *:{quoted}:*) ;; *) export PATH={quoted}:"$PATH" ;; esac')
    write_atomically(cache.env_file, "\n".join([*lines, ""]))
    if cache.clone != cache.local:
        # Whatever cache is used, the clone has its environment at one place: Pulumi.yaml can name it.
        link(cache.local / "env", cache.env_file)
        link(cache.local / "venv", cache.venv)
        link(cache.local / SHARED, cache.root)
