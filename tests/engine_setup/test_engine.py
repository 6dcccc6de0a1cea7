"""The located engine, really run: what every other engine test stands on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from testbed.engine.cache import find_cache
from testbed.engine.environment import engine_environment, locate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

DYNAMIC = """
from pathlib import Path
import pulumi
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, ResourceProvider, UpdateResult

class FileProvider(ResourceProvider):
    def create(self, props):
        Path(props["path"]).write_text(props["text"])
        return CreateResult(props["path"], dict(props))

    def read(self, id_, props):
        return ReadResult(id_, {**props, "text": Path(id_).read_text()})

    def diff(self, id_, olds, news):
        return DiffResult(changes=olds["text"] != news["text"])

    def update(self, id_, olds, news):
        Path(id_).write_text(news["text"])
        return UpdateResult(dict(news))

    def delete(self, id_, props):
        Path(id_).unlink()

class File(Resource, module="testbed", name="File"):
    def __init__(self, name, path, text):
        super().__init__(FileProvider(), name, {"path": path, "text": text})

config = pulumi.Config()
File("file", config.require("path"), "as wanted")
"""

POLICY = """
from pulumi_policy import EnforcementLevel, PolicyPack, ResourceValidationPolicy

def no_files(args, report_violation):
    if args.resource_type.endswith(":File"):
        report_violation(f"{args.name}: files are not allowed here")

PolicyPack("house", policies=[
    ResourceValidationPolicy("no-files", "No files.", no_files, enforcement_level=EnforcementLevel.MANDATORY)
])
"""


@dataclass(frozen=True)
class Project:
    """A Pulumi project in a folder of its own, with a private engine."""

    folder: Path
    environment: dict[str, str]

    def write(self, program: str, *, description: str = "", config: str = "") -> None:
        """Write the program, more of Pulumi.yaml, and the stack's configuration."""
        (self.folder / "Pulumi.yaml").write_text(f"name: tiny\nruntime: python\n{description}")
        (self.folder / "__main__.py").write_text(program)
        (self.folder / "Pulumi.dev.yaml").write_text(f"config: {{{config}}}\n")

    def pulumi(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the engine; the answer holds its exit code and both its outputs in one."""
        return subprocess.run(
            ["pulumi", *arguments, "--non-interactive"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def succeed(self, *arguments: str) -> str:
        """Run the engine and demand that it ends well; the answer is what it said."""
        answer = self.pulumi(*arguments)
        assert answer.returncode == 0, answer.stdout
        return answer.stdout

    def resources(self) -> list[dict[str, Any]]:
        """The resources in the stack's state."""
        exported: dict[str, Any] = json.loads(self.succeed("stack", "export", "--stack", "dev"))
        found: list[dict[str, Any]] = exported["deployment"].get("resources", [])
        return found


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project whose stack exists."""
    cache = find_cache()
    missing = locate(cache).missing
    assert not missing, f"the engine is incomplete, run `make setup`: {', '.join(missing)}"
    for name in ("project", "home", "state"):
        (tmp_path / name).mkdir()
    environment = engine_environment(cache, home=tmp_path / "home", backend=tmp_path / "state")
    project = Project(tmp_path / "project", environment)
    project.write("")
    project.succeed("stack", "init", "dev")
    return project


def test_a_program_goes_through_its_life(project: Project) -> None:
    """Preview, up and destroy run a program, show what it prints and keep its outputs in the state."""
    program = 'import pulumi\nprint("said by the program")\npulumi.export("a", pulumi.Config().require_object("a"))\n'
    project.write(program, config="'tiny:a': [61:00.0, 01:00.0, 22]")
    preview = project.succeed("preview", "--stack", "dev")
    assert "said by the program" in preview
    assert "pulumi-language-python from $PATH" not in preview
    project.succeed("up", "--yes", "--skip-preview", "--stack", "dev")
    # The engine reads YAML 1.2: an unquoted address stays text, and does not become a number in base 60.
    assert json.loads(project.succeed("stack", "output", "--json", "--stack", "dev")) == {
        "a": ["61:00.0", "01:00.0", 22]
    }
    project.succeed("destroy", "--yes", "--skip-preview", "--stack", "dev")
    assert project.resources() == []


def test_a_dynamic_resource_is_observed(project: Project, tmp_path: Path) -> None:
    """A dynamic resource is created, its drift is seen by a refreshing preview, repaired by up, and deleted."""
    kept = tmp_path / "file"
    project.write(DYNAMIC, config=f"'tiny:path': {kept}")
    project.succeed("up", "--yes", "--skip-preview", "--stack", "dev")
    assert kept.read_text() == "as wanted"
    project.succeed("preview", "--refresh", "--expect-no-changes", "--stack", "dev")
    kept.write_text("changed by hand")
    drifted = project.pulumi("preview", "--refresh", "--diff", "--expect-no-changes", "--stack", "dev")
    assert drifted.returncode != 0
    assert "changed by hand" in drifted.stdout
    project.succeed("up", "--yes", "--skip-preview", "--refresh", "--stack", "dev")
    assert kept.read_text() == "as wanted"
    project.succeed("destroy", "--yes", "--skip-preview", "--stack", "dev")
    assert not kept.exists()


@pytest.mark.parametrize("operation", [["preview"], ["up", "--yes"]])
def test_a_mandatory_policy_stops_the_engine(project: Project, tmp_path: Path, operation: list[str]) -> None:
    """A violated mandatory policy fails the operation, is named, and nothing is created."""
    kept = tmp_path / "file"
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "PulumiPolicy.yaml").write_text("runtime: python\n")
    (pack / "__main__.py").write_text(POLICY)
    project.write(DYNAMIC, config=f"'tiny:path': {kept}")
    answer = project.pulumi(*operation, "--policy-pack", str(pack), "--stack", "dev")
    assert answer.returncode != 0
    assert "file: files are not allowed here" in answer.stdout
    assert not kept.exists()


@pytest.mark.parametrize(
    ("program", "said", "not_said"),
    [
        (
            "import pulumi\nraise pulumi.RunError('a mistake in the stack file')",
            "a mistake in the stack file",
            "Traceback",
        ),
        ("raise ValueError('boom')", "ValueError: boom", "non-zero exit code"),
        ("import sys\nsys.exit(3)", "Program exited with non-zero exit code: 3", "Traceback"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9", "Traceback"),
        ("import pulumi, sys\npulumi.log.error('said once')\nsys.exit(32)", "said once", "non-zero exit code"),
    ],
    ids=["run-error", "exception", "exit", "signal", "already-shown"],
)
def test_a_failing_program_fails_the_operation(project: Project, program: str, said: str, not_said: str) -> None:
    """However a program fails, the operation fails and says why, in the official host's words."""
    project.write(program)
    answer = project.pulumi("preview", "--stack", "dev")
    assert answer.returncode != 0
    assert said in answer.stdout
    assert not_said not in answer.stdout


def test_the_virtualenv_option_is_honoured(project: Project) -> None:
    """A program runs in the virtual environment that Pulumi.yaml names, relative to it."""
    (project.folder / "named").symlink_to(find_cache().venv)
    program = "import sys, pulumi\npulumi.export('prefix', sys.prefix)\n"
    project.write(program, description="options: {refresh: always}\n")
    text = (project.folder / "Pulumi.yaml").read_text()
    named = text.replace("runtime: python", "runtime: {name: python, options: {virtualenv: named}}")
    (project.folder / "Pulumi.yaml").write_text(named)
    assert str(project.folder / "named") in project.succeed("preview", "--stack", "dev")
    (project.folder / "named").unlink()
    answer = project.pulumi("preview", "--stack", "dev")
    assert answer.returncode != 0
    assert "'named'" in answer.stdout
    assert "make setup" in answer.stdout


def test_a_program_elsewhere_with_another_configuration(project: Project, tmp_path: Path) -> None:
    """`main` may name another folder, and `--config-file` another stack file."""
    project.write("raise SystemExit('not this one')", description="main: ../elsewhere\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "__main__.py").write_text("import pulumi\nprint('a is', pulumi.Config().require('a'))\n")
    (tmp_path / "other.yaml").write_text("config: {'tiny:a': from the other file}\n")
    said = project.succeed("preview", "--stack", "dev", "--config-file", str(tmp_path / "other.yaml"))
    assert "a is from the other file" in said


def test_a_killed_engine_leaves_no_program_running(project: Project, tmp_path: Path) -> None:
    """When the engine is killed, its program ends too, and with it whatever it would still have changed."""
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    # The program holds the pipe open for as long as it lives: end of file is the sign of its death.
    project.write(f"import time\nkept = open({str(alive)!r}, 'w')\nkept.write('x')\nkept.flush()\ntime.sleep(600)\n")
    engine = subprocess.Popen(
        ["pulumi", "preview", "--stack", "dev", "--non-interactive"],
        cwd=project.folder,
        env=project.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with alive.open() as pipe:
        assert pipe.read(1) == "x"
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        assert pipe.read() == ""
