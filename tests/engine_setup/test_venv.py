from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import pytest

from testbed.engine.cache import mark_built
from testbed.engine.progress import SetupError, run, step
from testbed.engine.venv import create, is_current, venv_key

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.engine.cache import Cache

PYPROJECT = '[project]\nname = "x"\n[tool.ruff]\nline-length = {width}\n'


@pytest.fixture
def project(cache: Cache) -> Path:
    """The clone, with a lock and a description."""
    (cache.repository / "requirements.lock").write_text("pulumi==3.272.0\n")
    (cache.repository / "pyproject.toml").write_text(PYPROJECT.format(width=120))
    return cache.repository


def without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    """Hide modules from the set-up."""
    find = importlib.util.find_spec

    def found(name: str, *rest: Any) -> Any:
        return None if name in absent else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", found)


def test_a_finished_environment_of_the_same_lock_is_kept(cache: Cache, project: Path) -> None:
    """The stamp of the present lock makes an environment current; changing a tool's options does not undo that."""
    assert not is_current(cache)
    mark_built(cache.venv, venv_key(cache))
    assert is_current(cache)
    (project / "pyproject.toml").write_text(PYPROJECT.format(width=100))
    assert is_current(cache)


def test_another_lock_makes_the_environment_stale(cache: Cache, project: Path) -> None:
    """An environment built from an earlier lock is built anew."""
    mark_built(cache.venv, venv_key(cache))
    (project / "requirements.lock").write_text("pulumi==3.273.0\n")
    assert not is_current(cache)


def test_an_environment_whose_interpreter_is_gone_is_stale(cache: Cache, project: Path) -> None:
    """A Python that was uninstalled takes its environments with it."""
    mark_built(cache.venv, venv_key(cache))
    cache.python.unlink()
    assert not is_current(cache)


def test_without_ensurepip_another_pip_fills_the_environment(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Debian without python3-venv the environment is created bare, and the system's pip installs into it."""
    without(monkeypatch, "ensurepip")
    cache.python.unlink()
    with step("Python packages") as current:
        pip = create(cache, current)
    assert cache.python.exists()
    assert not (cache.venv / "bin" / "pip").exists()
    assert pip[:5] == [sys.executable, "-m", "pip", "--python", str(cache.python)]


def test_without_any_pip_the_error_says_what_to_install(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that can install nothing is an error that names the package to install."""
    without(monkeypatch, "ensurepip", "pip")
    with step("Python packages") as current, pytest.raises(SetupError, match="apt install python3-venv"):
        create(cache, current)


def test_a_step_says_its_name_its_time_and_its_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    """In a log a step is one line when it ends."""
    with step("pulumi") as current:
        current.outcome = "3.276.0"
    assert capsys.readouterr().out.startswith("✓ pulumi  0.")


def test_a_failing_command_is_shown_with_its_last_lines() -> None:
    """The error of a command that fails holds the command, its exit code and what it said last."""
    with step("build") as current, pytest.raises(SetupError, match=r"(?s)ended with 3:.*the reason"):
        run(["/bin/sh", "-c", "echo the reason; exit 3"], current)
