from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from testbed.engine.cache import CACHE_VARIABLE, Cache, building, digest, find_cache, is_built, link

if TYPE_CHECKING:
    from pathlib import Path

LOCK_AND_TELL = """
import sys
from pathlib import Path
from testbed.engine.cache import Cache
with Cache(Path(sys.argv[1])).locked() as waited:
    Path(sys.argv[2]).write_text(str(waited))
"""


def test_the_clone_has_its_own_cache_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a variable and without an earlier choice the cache is `.cache` in the clone."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert find_cache(tmp_path).root == tmp_path / ".cache"


def test_the_variable_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU_TOPOLOGY_CACHE wins over what the clone used before."""
    link(tmp_path / ".cache" / "shared", tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    assert find_cache(tmp_path).root == tmp_path / "elsewhere"


def test_a_shared_cache_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone that was set up with a shared cache keeps to it in a shell that lacks the variable."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    (tmp_path / "big").mkdir()
    link(tmp_path / "clone" / ".cache" / "shared", tmp_path / "big")
    assert find_cache(tmp_path / "clone").root == tmp_path / "big"


def test_clones_share_a_cache_without_sharing_an_environment(tmp_path: Path) -> None:
    """Two clones of the same name in one cache have folders of their own for environment and wrappers."""
    one = Cache(tmp_path / "big", tmp_path / "a" / "clone")
    two = Cache(tmp_path / "big", tmp_path / "b" / "clone")
    assert one.venv != two.venv
    assert one.bin != two.bin
    assert one.go == two.go


def test_a_build_appears_whole(tmp_path: Path) -> None:
    """A finished build is in place with its stamp, and no partial folder stays behind."""
    with building(tmp_path / "cli", "key") as partial:
        (partial / "pulumi").write_text("new")
        assert not (tmp_path / "cli").exists()
    assert (tmp_path / "cli" / "pulumi").read_text() == "new"
    assert is_built(tmp_path / "cli", "key")
    assert [path.name for path in tmp_path.iterdir()] == ["cli"]


def test_a_failed_build_leaves_the_earlier_one(tmp_path: Path) -> None:
    """What was built before still stands when its successor fails half-way."""
    with building(tmp_path / "cli", "old") as partial:
        (partial / "pulumi").write_text("old")
    with pytest.raises(OSError, match="disk full"), building(tmp_path / "cli", "new"):
        raise OSError("disk full")
    assert (tmp_path / "cli" / "pulumi").read_text() == "old"
    assert is_built(tmp_path / "cli", "old")
    assert not is_built(tmp_path / "cli", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["cli"]


def test_a_key_tells_its_parts_apart(tmp_path: Path) -> None:
    """The same bytes, divided otherwise among the parts, are another key; a file counts by its content."""
    (tmp_path / "lock").write_text("ab")
    assert digest("ab", "c") != digest("a", "bc")
    assert digest(tmp_path / "lock") == digest("ab")


def test_a_second_set_up_waits_for_the_first(tmp_path: Path) -> None:
    """While one set-up holds the cache, another says that it waits, and goes on only afterwards."""
    told = tmp_path / "told"
    with Cache(tmp_path / "big").locked() as waited:
        assert not waited
        second = subprocess.Popen(
            [sys.executable, "-c", LOCK_AND_TELL, tmp_path / "big", told], stdout=subprocess.PIPE, text=True
        )
        assert second.stdout
        assert "waiting" in second.stdout.readline()
        assert not told.exists()
    second.communicate()
    assert told.read_text() == "True"
