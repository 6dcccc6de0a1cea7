"""The command line in a project folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

Topology = dict[str, Any]


@dataclass(frozen=True)
class Project:
    """A project folder, which is the current one."""

    folder: Path

    def stack(self, topology: Topology, name: str = "sim", **settings: object) -> Path:
        """Write a stack file with this topology, and further settings beside it."""
        path = self.folder / f"Pulumi.{name}.yaml"
        with path.open("w") as file:
            config = {"gpu-topology:topology": topology}
            YAML(typ="safe").dump({"config": config | {f"gpu-topology:{k}": v for k, v in settings.items()}}, file)
        return path

    def run(self, *arguments: str) -> Result:
        """Run `gpu-topology` as a terminal of 200 columns would show it; a traceback fails the test."""
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert "Traceback" not in result.output
        return result

    def refuses(self, *arguments: str) -> str:
        """Run it, and give the one message it ends with, white space folded."""
        result = self.run(*arguments)
        assert result.exit_code == 1, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        return " ".join(result.stderr.split())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty project folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return Project(folder)


MakeCommand = Callable[[str], None]


@pytest.fixture
def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCommand:
    """Put a `pulumi` on PATH, and nothing else, that does what a line of shell says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(line: str) -> None:
        (folder / "pulumi").write_text(f"#!/bin/sh\n{line}\n")
        (folder / "pulumi").chmod(0o755)

    return make
