"""A Pulumi program run by the real engine in a folder of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.engine.cache import find_cache
from testbed.engine.environment import engine_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LIMIT_S = 300


@dataclass(frozen=True)
class Stack:
    """One stack of one program; what the program reads from `inputs.json` can change between runs."""

    folder: Path
    environment: dict[str, str]

    @classmethod
    def make(cls, folder: Path, program: str, **variables: str) -> Stack:
        """A new stack in the folder."""
        project, home, backend = (folder / name for name in ("project", "home", "backend"))
        for path in (project, home, backend):
            path.mkdir()
        (project / "Pulumi.yaml").write_text("name: plugins\nruntime: python\n")
        (project / "__main__.py").write_text(program)
        stack = cls(project, engine_environment(find_cache(), home=home, backend=backend) | variables)
        stack.run("stack", "init", "dev")
        return stack

    def give(self, **inputs: Any) -> None:
        """Set what the program reads."""
        (self.folder / "inputs.json").write_text(json.dumps(inputs))

    def run(self, *arguments: str, status: int = 0) -> str:
        """What `pulumi` prints; its exit status must be the one expected."""
        return self._finish(self._start(*arguments), status)

    def interrupt(self, ready: Callable[[], bool]) -> str:
        """What a deployment prints that is interrupted, as by Ctrl-C, once it is ready for it."""
        process = self._start("up", "--yes", "--skip-preview")
        while not ready() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        return self._finish(process, 1)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        command = ["pulumi", *arguments, "--non-interactive", "--color", "never"]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def _finish(self, process: subprocess.Popen[str], status: int) -> str:
        with process:
            printed, _ = process.communicate(timeout=_LIMIT_S)
        assert process.returncode == status, f"{process.args!r}: {process.returncode}\n{printed}"
        return printed

    def up(self, *arguments: str, status: int = 0) -> str:
        """Deploy without asking."""
        return self.run("up", "--yes", "--skip-preview", *arguments, status=status)

    def settled(self, *arguments: str) -> None:
        """Check that a preview finds nothing to do."""
        self.run("preview", "--expect-no-changes", *arguments)

    def state(self) -> dict[str, dict[str, Any]]:
        """The resources in the state by name."""
        exported = json.loads(self.run("stack", "export"))
        return {entry["urn"].rsplit("::", 1)[-1]: entry for entry in exported["deployment"].get("resources", [])}
