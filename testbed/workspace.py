"""A Pulumi project of its own in a folder: the real program on the real engine, with a stack file made for one host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ruamel.yaml import YAML

from testbed.engine.cache import REPOSITORY, Cache, find_cache
from testbed.engine.environment import engine_environment, locate

PROJECT = "gpu-topology"
Change = Callable[[dict[str, Any]], None]
"""Edits a topology as a person edits the stack file; the object is what stands under `gpu-topology:topology`."""


@dataclass(frozen=True)
class Run:
    """One `pulumi` run: exit status, and its standard output and error as they came."""

    status: int
    output: str

    @property
    def text(self) -> str:
        """The output with its white space folded, since the engine wraps nothing but messages are long."""
        return " ".join(self.output.split())


class Workspace:
    """A project folder with one stack; `topology` is written to the stack file before each run."""

    def __init__(
        self, folder: Path, topology: dict[str, Any], *, stack: str = "sim", cache: Cache | None = None
    ) -> None:
        self.folder = folder
        self.stack = stack
        self.topology = topology
        self.secrets: dict[str, str] = {}
        self._cache = cache or find_cache()
        home, backend = folder / "home", folder / "state"
        for path in (folder, home, backend):
            path.mkdir(parents=True, exist_ok=True)
        self.environment = engine_environment(self._cache, home=home, backend=backend)
        self._write_project()
        if not self._stack_exists():
            self.pulumi("stack", "init", stack, check=True)

    def edit(self, change: Change) -> None:
        """Edit the topology."""
        change(self.topology)

    def command(self, *arguments: str) -> list[str]:
        """The command line of one `pulumi` run."""
        return ["pulumi", *arguments, "--non-interactive", "--color", "never", "--cwd", str(self.folder)]

    def pulumi(self, *arguments: str, check: bool = False, echo: IO[str] | None = None) -> Run:
        """Run `pulumi`; with `echo` its lines are also shown as they come."""
        lines = []
        with self.start(*arguments) as process:
            for line in process.stdout or ():
                lines.append(line)
                if echo is not None:
                    echo.write(line)
                    echo.flush()
        run = Run(process.returncode, "".join(lines))
        if check and run.status != 0:
            raise RuntimeError(f"`pulumi {' '.join(arguments)}` ended with {run.status}:\n{run.output}")
        return run

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `pulumi` on the topology as it is by now, as the leader of a process group of its own."""
        self._write_stack()
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill a run and everything it started, as a power cut of the workstation would."""
        for pid in [process.pid, *_descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        self.pulumi("cancel", "--yes")

    def preview(self, *arguments: str, check: bool = False, echo: IO[str] | None = None) -> Run:
        """`pulumi preview`."""
        return self._run("preview", *arguments, check=check, echo=echo)

    def up(self, *arguments: str, check: bool = False, echo: IO[str] | None = None) -> Run:
        """`pulumi up`."""
        return self._run("up", "--yes", *arguments, check=check, echo=echo)

    def destroy(self, *arguments: str, check: bool = False, echo: IO[str] | None = None) -> Run:
        """`pulumi destroy`."""
        return self._run("destroy", "--yes", *arguments, check=check, echo=echo)

    def export(self) -> dict[str, Any]:
        """`pulumi stack export`."""
        run = self.pulumi("stack", "export", "--stack", self.stack, check=True)
        value: dict[str, Any] = json.loads(run.output)
        return value

    def outputs(self) -> dict[str, Any]:
        """The stack's outputs."""
        run = self.pulumi("stack", "output", "--json", "--stack", self.stack, check=True)
        value: dict[str, Any] = json.loads(run.output)
        return value

    def _run(self, *arguments: str, check: bool, echo: IO[str] | None) -> Run:
        return self.pulumi(*arguments, "--stack", self.stack, "--suppress-progress", check=check, echo=echo)

    def _stack_exists(self) -> bool:
        return any((self.folder / "state").rglob(f"{self.stack}.json"))

    def _write_project(self) -> None:
        project = {
            "name": PROJECT,
            "runtime": {"name": "python", "options": {"virtualenv": str(self._cache.venv)}},
        }
        engine = locate(self._cache)
        # Named here, a plugin is not looked for on PATH, where the engine would warn of each one at each run.
        stand_ins = [
            {"name": name, "path": str(piece.path.parent)}
            for name, piece in (("command", engine.command), ("proxmoxve", engine.proxmoxve))
            if piece.is_stand_in and piece.path is not None
        ]
        _dump(self.folder / "Pulumi.yaml", project | ({"plugins": {"providers": stand_ins}} if stand_ins else {}))
        program = self.folder / "__main__.py"
        if not program.exists():
            program.symlink_to(REPOSITORY / "__main__.py")

    def _write_stack(self) -> None:
        path = self.folder / f"Pulumi.{self.stack}.yaml"
        # The engine keeps the stack's encryption salt in the same file.
        kept = _load(path) if path.exists() else {}
        config = {f"{PROJECT}:topology": self.topology, **self.secrets}
        _dump(path, {**kept, "config": config})


def shipped_topology(stack: str) -> dict[str, Any]:
    """The topology of a stack file that this project ships."""
    loaded = _load(REPOSITORY / f"Pulumi.{stack}.yaml")
    topology: dict[str, Any] = loaded["config"][f"{PROJECT}:topology"]
    return topology


def _descendants(pid: int) -> Sequence[int]:
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _dump(path: Path, value: Mapping[str, Any]) -> None:
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    with path.open("w") as file:
        yaml.dump(dict(value), file)


def _load(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = YAML(typ="safe").load(path.read_text())
    return value
