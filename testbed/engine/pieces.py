"""The engine's other programs: which of them PATH has, which an official engine brings, and the wrappers for the rest."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from testbed.engine.cache import Cache, link, write_atomically
from testbed.engine.cli_source import Cli, Source, on_path
from testbed.engine.progress import step
from testbed.engine.versions import show_version

LANGUAGE_HOST = Path(__file__).with_name("language_host.py")
PLUGIN_TIMEOUT = 120.0  # seconds for one plugin's download


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


LANGUAGE = "pulumi-language-python"
DYNAMIC = "pulumi-resource-pulumi-python"
COMMAND = "pulumi-resource-command"
PROXMOXVE = "pulumi-resource-proxmoxve"
HOSTS = (LANGUAGE, DYNAMIC)
PROVIDERS = (COMMAND, PROXMOXVE)


def wrapper(cache: Cache, name: str) -> str:
    """The shell script that starts our own program of that name in the virtual environment."""
    arguments = {
        LANGUAGE: ["-u", "-P", str(LANGUAGE_HOST)],
        DYNAMIC: ["-u", "-m", "pulumi.dynamic"],
        COMMAND: ["-u", "-m", "testbed.engine.plugins.command"],
        PROXMOXVE: ["-u", "-m", "testbed.engine.plugins.proxmoxve"],
    }[name]
    return f'#!/bin/sh\nexec {shlex.join([str(cache.python), *arguments])} "$@"\n'


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
    wanted: dict[str, str | Path] = {}
    if cli.source is not Source.PATH:
        wanted["pulumi"] = cli.path
    for name in HOSTS:
        if on_path(name, search) is None and bundled(cli, name) is None:
            wanted[name] = wrapper(cache, name)
    for name in PROVIDERS:
        if on_path(name, search) is None:
            wanted[name] = _download(cache, cli, name) or wrapper(cache, name)
    for stale in {path.name for path in cache.bin.iterdir()} - set(wanted):
        (cache.bin / stale).unlink()
    for name, content in wanted.items():
        if isinstance(content, Path):
            link(cache.bin / name, content)
        else:
            write_atomically(cache.bin / name, content, mode=0o755)


def bundled(cli: Cli, name: str) -> Path | None:
    """The program of that name beside an official `pulumi`, where the engine looks after PATH."""
    beside = cli.path.resolve().with_name(name)
    return beside if beside.exists() else None


def _download(cache: Cache, cli: Cli, name: str) -> Path | None:
    """The official plugin's program, downloaded once; None where its releases are out of reach."""
    plugin = wanted_plugin(cache, name.removeprefix("pulumi-resource-"))
    path = downloaded_plugin(cache, plugin)
    if path.exists():
        return path
    # An engine built from Go modules stands on a machine that reaches registries alone: asking would only cost time.
    if not cli.official:
        return None
    with step(f"plugin {plugin.name}") as current:
        command = [cli.path, "plugin", "install", "resource", plugin.name, plugin.version]
        command += ["--server", plugin.server] if plugin.server else []
        environment = {**os.environ, "PULUMI_HOME": str(cache.pulumi_home), "PULUMI_SKIP_UPDATE_CHECK": "1"}
        try:
            subprocess.run(command, env=environment, capture_output=True, timeout=PLUGIN_TIMEOUT, check=True)
        except (OSError, subprocess.SubprocessError):
            current.outcome = "its releases are out of reach: a stand-in does the work"
            return None
        current.outcome = plugin.version
    return path if path.exists() else None


def describe(cache: Cache, name: str, cli: Cli | None, search: str | None) -> Piece:
    """Which program of that name the engine will use, looked up as the engine does: PATH, then beside `pulumi`."""
    path = on_path(name, search)
    if path is None and cli is not None and (beside := bundled(cli, name)):
        return Piece(name, beside, show_version(cli.version), Origin.BUNDLED)
    if path is None:
        return Piece(name, None, "", Origin.MISSING)
    if path.parent != cache.bin:
        return Piece(name, path, "", Origin.PATH)
    if path.is_symlink():
        return Piece(
            name, path.resolve(), wanted_plugin(cache, name.removeprefix("pulumi-resource-")).version, Origin.INSTALLED
        )
    return Piece(name, path, "", Origin.STAND_IN)
