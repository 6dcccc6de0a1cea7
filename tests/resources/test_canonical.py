"""The workstation's copy of a unit: a person's own file, kept equal to what is deployed."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from host.errors import HostError
from host.resources.canonical import CanonicalUnitProvider, read_copy
from tests.resources.conftest import kept, wired

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXT = "[Service]\nExecStart=/bin/serve --tp 4\n# für später\n"
pytestmark = pytest.mark.usefixtures("host")


@pytest.fixture
def narrow() -> Iterator[None]:
    """A person's umask that hides new files from others."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def _props(path: Path | str, **changes: object) -> dict[str, Any]:
    return wired(**{"path": str(path), "text": TEXT, "revision": "fresh", **changes})


def test_a_copy_is_written_where_there_was_none(tmp_path: Path) -> None:
    """Folders on the way are made; the ID is the path, the state has the text as observed."""
    path = tmp_path / "units" / "kpro6" / "sglang.service"
    made = CanonicalUnitProvider().create(_props(path))
    assert path.read_text() == TEXT
    assert made.id == str(path)
    assert made.outs == {**_props(path), "observed": TEXT}


def test_a_copy_is_readable_by_others(tmp_path: Path, narrow: None) -> None:
    """It is a project file like others, whatever the umask of who runs the program."""
    path = tmp_path / "sglang.service"
    CanonicalUnitProvider().create(_props(path))
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_copy_is_replaced_whole(tmp_path: Path) -> None:
    """Whoever reads while it is written sees the old text or the new one: the file is renamed into its place."""
    path, open_elsewhere = tmp_path / "sglang.service", tmp_path / "the-old-file"
    path.write_text("old\n")
    open_elsewhere.hardlink_to(path)
    CanonicalUnitProvider().update("id", {}, _props(path))
    assert path.read_text() == TEXT
    assert open_elsewhere.read_text() == "old\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sglang.service", "the-old-file"]


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is the home of who runs the program."""
    monkeypatch.setenv("HOME", str(tmp_path))
    CanonicalUnitProvider().create(_props("~/sglang.service"))
    assert read_copy("~/sglang.service") == (tmp_path / "sglang.service").read_text() == TEXT


def test_a_copy_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    """A folder in the file's place, or a file in a folder's, is an error that says which path; no rest stays."""
    (tmp_path / "sglang.service").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "sglang.service", tmp_path / "file" / "sglang.service"):
        message = f"canonicalUnit: '{path}' cannot be written ("
        with pytest.raises(HostError, match=f"^{re.escape(message)}.*Fix: name a writable path$"):
            CanonicalUnitProvider().create(_props(path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "sglang.service"]


def test_a_copy_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Bytes that are no text, or a folder, are an error that says which path and what to do."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "bytes"):
        message = f"canonicalUnit: '{path}' cannot be read ("
        with pytest.raises(HostError, match=f"^{re.escape(message)}.*Fix: make it a readable file$"):
            read_copy(str(path))


def test_a_read_sees_what_a_person_changed(tmp_path: Path) -> None:
    """A copy that was edited reads as it stands, and the next `up` writes it again."""
    path = tmp_path / "sglang.service"
    made = CanonicalUnitProvider().create(_props(path))
    path.write_text("edited\n")
    read = kept(CanonicalUnitProvider().read(made.id, kept(made)))
    assert read["observed"] == "edited\n"
    assert CanonicalUnitProvider().diff(made.id, read, _props(path, revision="adopted")).changes is True


def test_a_copy_that_is_gone_reads_as_deleted(tmp_path: Path) -> None:
    """A copy that somebody removed leaves the state, and is made again."""
    read = CanonicalUnitProvider().read("id", _props(tmp_path / "none"))
    assert (read.id, read.outs) == ("", {})


def test_a_destroy_leaves_the_copy(tmp_path: Path) -> None:
    """The copy is the person's own file, also when the stack is gone."""
    path = tmp_path / "sglang.service"
    made = CanonicalUnitProvider().create(_props(path))
    CanonicalUnitProvider().delete(made.id, kept(made))
    assert path.read_text() == TEXT


@pytest.mark.parametrize(
    ("olds", "news", "changes"),
    [
        ({}, {}, False),
        ({}, {"text": "other\n"}, True),
        ({}, {"path": "elsewhere"}, True),
        ({"observed": "edited\n"}, {}, True),
        # The plan looked at the file itself, and it does not have the unit's text.
        ({}, {"revision": "fresh"}, True),
        # A repair leaves its revision in the state; the next plan finds the copy as wanted, which is no change.
        ({"revision": "fresh"}, {}, False),
        # The same drift a second time has the same revision as the first, and is a change all the same.
        ({"revision": "fresh"}, {"revision": "fresh"}, True),
    ],
)
def test_a_copy_is_written_when_it_differs(olds: dict[str, object], news: dict[str, object], changes: bool) -> None:
    """What the plan saw of the file decides, not how its revision compares with the one in the state."""
    sound = {"path": "units/sglang.service", "text": TEXT, "revision": "adopted"}
    state: dict[str, object] = {**sound, "observed": TEXT, **olds}
    assert CanonicalUnitProvider().diff("id", state, {**sound, **news}).changes is changes


def test_a_copy_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with ~ is that of the home folder for who plans as for who writes; a relative one starts from the base."""
    monkeypatch.setenv("HOME", str(tmp_path))
    CanonicalUnitProvider().create(_props("~/units/sglang.service"))
    assert read_copy("~/units/sglang.service", tmp_path / "project") == TEXT
    assert read_copy("units/sglang.service", tmp_path) == TEXT
