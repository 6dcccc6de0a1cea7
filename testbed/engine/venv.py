"""The virtual environment: the locked dependencies by hash, and the project itself, editable."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tomllib

from testbed.engine.cache import Cache, digest, is_built, mark_built
from testbed.engine.progress import SetupError, Step, run, step


def venv_key(cache: Cache) -> str:
    """The key of the environment: the lock, what is said of the project as a package, the interpreter, the clone."""
    repository = cache.repository
    described = tomllib.loads((repository / "pyproject.toml").read_text())
    package = json.dumps([described.get(table) for table in ("build-system", "project")])
    return digest(repository / "requirements.lock", package, sys.version, str(repository))


def is_current(cache: Cache) -> bool:
    """Whether the environment there is finished and was built from the present lock."""
    return is_built(cache.venv, venv_key(cache)) and cache.python.exists()


def ensure_venv(cache: Cache) -> None:
    """Build the virtual environment unless the one there was built from the same lock.

    It is built in place, since a virtual environment cannot be moved; the stamp, written last, tells a finished one.
    """
    with step("Python packages") as current:
        if cache.venv.is_symlink():  # left by a set-up of this clone with another cache
            cache.venv.unlink()
        if is_current(cache):
            current.outcome = "already there"
            return
        shutil.rmtree(cache.venv, ignore_errors=True)
        pip = create(cache, current)
        repository = cache.repository
        run([*pip, "install", "--require-hashes", "-r", repository / "requirements.lock"], current)
        run([*pip, "install", "--no-deps", "--no-build-isolation", "-e", repository], current)
        mark_built(cache.venv, venv_key(cache))
        current.outcome = f"installed from requirements.lock for Python {sys.version.split()[0]}"


def create(cache: Cache, current: Step) -> list[str]:
    """Create the empty environment; the answer is the pip command that installs into it."""
    if importlib.util.find_spec("ensurepip"):
        run([sys.executable, "-m", "venv", cache.venv], current)
        return [str(cache.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # Debian ships venv without ensurepip unless python3-venv is installed: another pip can fill the environment.
    if importlib.util.find_spec("pip"):
        run([sys.executable, "-m", "venv", "--without-pip", cache.venv], current)
        return [sys.executable, "-m", "pip", "--python", str(cache.python), "--disable-pip-version-check", "--no-input"]
    raise SetupError(
        f"{sys.executable} has neither ensurepip nor pip, so no package can be installed.\n"
        "    Debian, Ubuntu, Proxmox: apt install python3-venv; or name another interpreter: make PYTHON=... setup"
    )
