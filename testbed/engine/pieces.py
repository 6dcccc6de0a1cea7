"""The engine's other programs: those that PATH has, those that an official engine brings, wrappers for the rest."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from testbed.engine.cache import Cache, hard_link, link, write_atomically
from testbed.engine.cli_source import DYNAMIC, EXECUTOR, LANGUAGE, Cli, Source, on_path
from testbed.engine.progress import step
from testbed.engine.versions import show_version

LANGUAGE_HOST = Path(__file__).with_name("language_host.py")
PLUGIN_TIMEOUT = 120.0  # seconds for one plugin's download
RETRY_AFTER = 86400.0  # seconds until a download that failed is tried again; `make clean` forgets it sooner


class Origin(StrEnum):
    """Where a piece of the engine came from."""

    PATH = "official, on PATH"
    INSTALLED = "official, downloaded"
    BUILT = "official source, built here"
    BUNDLED = "official, with pulumi"
    STAND_IN = "stand-in"
    MISSING = "missing"


@dataclass(frozen=True)
class Piece:
    """One program of the engine: its name, where it is, its version as far as known, where it came from."""

    name: str
    path: Path | None
    version: str
    origin: Origin

    @property
    def is_stand_in(self) -> bool:
        """Whether this project's own code stands in for the official program."""
        return self.origin is Origin.STAND_IN


COMMAND = "pulumi-resource-command"
PROXMOXVE = "pulumi-resource-proxmoxve"
PROVIDERS = (COMMAND, PROXMOXVE)


def wrapper(cache: Cache, *arguments: str | Path) -> str:
    """The shell script that runs the virtual environment's interpreter with these arguments."""
    command = [str(cache.python), "-u", *map(str, arguments)]
    return f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'


@dataclass(frozen=True)
class Wanted:
    """A plugin as its Python package names it: name, version and, where it is not Pulumi's, its releases' server."""

    name: str
    version: str
    server: str


def wanted_plugin(cache: Cache, name: str) -> Wanted:
    """The plugin that the locked Python package of a provider asks for."""
    found = next(cache.venv.glob(f"lib/python3*/site-packages/pulumi_{name}/pulumi-plugin.json"))
    described = json.loads(found.read_text())
    return Wanted(name, described["version"], described.get("server", ""))


def downloaded_plugin(cache: Cache, plugin: Wanted) -> Path:
    """Where the engine puts a downloaded plugin's program."""
    folder = cache.pulumi_home / "plugins" / f"resource-{plugin.name}-v{plugin.version}"
    return folder / f"pulumi-resource-{plugin.name}"


def ensure_pieces(cache: Cache, cli: Cli, search: str | None) -> None:
    """Fill the private folder with what the user's PATH lacks, and with nothing else."""
    cache.bin.mkdir(parents=True, exist_ok=True)
    links: dict[str, Path] = {}
    scripts: dict[str, str] = {}
    if cli.source is Source.INSTALLER:
        links["pulumi"] = cli.path
    if cli.source is Source.GO:
        # The engine warns of a host on PATH unless it stands beside `pulumi`, and follows symbolic links to find out.
        hard_link(cache.bin / "pulumi", cli.path)
        links[DYNAMIC] = cli.path.with_name(DYNAMIC)
        # -P: this host's folder holds modules of ours that must not come before the standard library's.
        scripts[LANGUAGE] = wrapper(cache, "-P", LANGUAGE_HOST, cli.path.with_name(EXECUTOR))
    for name in PROVIDERS:
        if on_path(name, search) is None:
            if official := _download(cache, cli, name):
                links[name] = official
            else:
                scripts[name] = wrapper(cache, "-m", f"testbed.engine.plugins.{_provider(name)}")
    for name, target in links.items():
        link(cache.bin / name, target)
    for name, text in scripts.items():
        write_atomically(cache.bin / name, text, mode=0o755)
    kept = {*links, *scripts, *(["pulumi"] if cli.source is Source.GO else [])}
    for stale in {path.name for path in cache.bin.iterdir()} - kept:
        (cache.bin / stale).unlink()


def _provider(name: str) -> str:
    return name.removeprefix("pulumi-resource-")


def _download(cache: Cache, cli: Cli, name: str) -> Path | None:
    """The official plugin's program, downloaded once; None where its releases are out of reach."""
    plugin = wanted_plugin(cache, _provider(name))
    path = downloaded_plugin(cache, plugin)
    if path.exists():
        return path
    # An engine built from Go modules stands on a machine that reaches registries alone: asking would only cost time.
    if not cli.official or _failed_lately(cache, name):
        return None
    with step(f"plugin {plugin.name}") as current:
        command = [str(cli.path), "plugin", "install", "resource", plugin.name, plugin.version]
        command += ["--server", plugin.server] if plugin.server else []
        environment = {**os.environ, "PULUMI_HOME": str(cache.pulumi_home), "PULUMI_SKIP_UPDATE_CHECK": "1"}
        try:
            subprocess.run(command, env=environment, capture_output=True, timeout=PLUGIN_TIMEOUT, check=True)
        except (OSError, subprocess.SubprocessError):
            current.outcome = "its releases are out of reach: a stand-in does the work"
            _failure(cache, name).touch()
            return None
        current.outcome = plugin.version
    return path if path.exists() else None


def _failure(cache: Cache, name: str) -> Path:
    return cache.root / f"{name}.out-of-reach"


def _failed_lately(cache: Cache, name: str) -> bool:
    """Whether a download failed within a day: a set-up that asked each time would take minutes behind a firewall."""
    marker = _failure(cache, name)
    return marker.exists() and time.time() - marker.stat().st_mtime < RETRY_AFTER


def describe(cache: Cache, name: str, cli: Cli | None, search: str | None) -> Piece:
    """Which program of that name the engine will use, looked up as the engine does: PATH, then beside `pulumi`."""
    path = on_path(name, search)
    if path is None and cli is not None and (beside := cli.beside(name)):
        return Piece(name, beside, show_version(cli.version), Origin.BUNDLED)
    if path is None:
        return Piece(name, None, "", Origin.MISSING)
    if path.parent != cache.bin:
        return Piece(name, path, "", Origin.PATH)
    if not path.is_symlink():
        return Piece(name, path, "", Origin.STAND_IN)
    if name == DYNAMIC:
        return Piece(name, path, show_version(cli.version) if cli else "", Origin.BUNDLED)
    return Piece(name, path.resolve(), wanted_plugin(cache, _provider(name)).version, Origin.INSTALLED)
