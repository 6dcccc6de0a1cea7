from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from testbed.engine.cache import CACHE_VARIABLE, Cache

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class FakePath:
    """A folder of fake programs that is the test's whole PATH, the shell's own folders aside."""

    folder: Path

    def add(self, name: str, script: str = "exit 0") -> Path:
        """Put a program there."""
        return write_program(self.folder / name, script)

    def add_pulumi(self, version: str, *, hosts: bool = True) -> Path:
        """Put a `pulumi` of that version there, with its language hosts unless told otherwise."""
        if hosts:
            self.add("pulumi-language-python")
            self.add("pulumi-resource-pulumi-python")
        return self.add("pulumi", f"echo v{version}")

    @property
    def search(self) -> str:
        """The PATH."""
        return str(self.folder)


def write_program(path: Path, script: str) -> Path:
    """Write a shell script that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePath:
    """A PATH whose first folder is the test's to fill."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return FakePath(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A cache of a clone of its own, with an environment that names the plugins as the real packages do."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    repository = tmp_path / "clone"
    cache = Cache(repository / ".cache", repository)
    for name, described in {
        "command": '{"resource": true, "name": "command", "version": "1.2.1"}',
        "proxmoxve": '{"resource": true, "name": "proxmoxve", "version": "8.6.0", "server": "github://somewhere"}',
    }.items():
        package = cache.venv / "lib" / "python3.11" / "site-packages" / f"pulumi_{name}"
        package.mkdir(parents=True)
        (package / "pulumi-plugin.json").write_text(described)
    write_program(cache.python, "exit 0")
    for name in ("requirements.lock", "pyproject.toml"):
        (repository / name).touch()
    return cache
