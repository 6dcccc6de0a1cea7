"""The agent's zipapp."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from host.bundle import agent_bundle, write_bundle

if TYPE_CHECKING:
    from pathlib import Path


def test_the_same_source_gives_the_same_bytes() -> None:
    """Two builds of unchanged source are equal, so an unchanged agent is no change in a preview."""
    first = agent_bundle()
    agent_bundle.cache_clear()
    assert agent_bundle() == first


def test_an_equal_file_is_left_alone(tmp_path: Path) -> None:
    """Writing the bundle twice writes it once."""
    path = write_bundle(tmp_path)
    before = path.stat()
    assert write_bundle(tmp_path) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_the_bundle_runs_alone(tmp_path: Path) -> None:
    """The zipapp answers without this project on the path, as on a hypervisor."""
    path = write_bundle(tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", str(path), "version"],
        input="{}",
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=30,
    )
    assert json.loads(done.stdout)["ok"] is True
