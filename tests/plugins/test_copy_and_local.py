from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from testbed.engine.plugins._wire import ARCHIVE, ASSET, SIGNATURE, UNKNOWN, has_secret
from testbed.engine.plugins.command.plugin import CommandPlugin
from tests.plugins.driver import Driver, OperationError, driving
from tests.plugins.ssh_host import SshHost, ssh_host

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COPY = "command:remote:CopyToRemote"
LOCAL = "command:local:Command"


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Runs a scenario with a plugin, a host, and a folder of files to copy."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    (here / "tree" / "inner").mkdir(parents=True)
    (here / "tree" / "a.txt").write_text("a")
    (here / "tree" / "inner" / "b.txt").write_text("b")

    def run(scenario: Any) -> None:
        async def main() -> None:
            async with ssh_host(there) as host, driving(CommandPlugin(None), COPY) as driver:
                await scenario(driver, host, here)

        asyncio.run(main())

    return run


def _file(path: Path) -> dict[str, str]:
    return {SIGNATURE: ASSET, "path": str(path), "hash": hashlib.sha256(path.read_bytes()).hexdigest()}


def _text(text: str) -> dict[str, str]:
    return {SIGNATURE: ASSET, "text": text, "hash": hashlib.sha256(text.encode()).hexdigest()}


def _tree(path: str) -> dict[str, str]:
    return {SIGNATURE: ARCHIVE, "path": path, "hash": "of the tree"}


def test_a_file_is_copied_to_its_path_or_into_a_folder(play: Any) -> None:
    """The destination is the file's new path, unless a folder stands there."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        (host.root / "folder").mkdir()
        source = _file(here / "tree" / "a.txt")
        for target in ("copied", "folder"):
            inputs = {"connection": host.connection(), "source": source, "remotePath": target}
            identifier, outputs = await driver.create((await driver.check(inputs)).inputs)
            assert identifier
            assert {name for name, value in outputs.items() if has_secret(value)} == {"connection"}
        assert (host.read("copied"), host.read("folder/a.txt")) == ("a", "a")

    play(scenario)


def test_a_folder_is_copied_whole(play: Any) -> None:
    """Without a trailing slash the folder itself goes into the destination, with one only its content."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        for target, slash in (("one", ""), ("two", "/")):
            source = _tree(f"{here}/tree{slash}")
            await driver.create({"connection": host.connection(), "source": source, "remotePath": target})
        assert (host.read("one/tree/a.txt"), host.read("one/tree/inner/b.txt")) == ("a", "b")
        assert (host.read("two/a.txt"), host.read("two/inner/b.txt")) == ("a", "b")

    play(scenario)


def test_text_becomes_a_file(play: Any) -> None:
    """A string asset is written to the path; a folder there is an error, since nothing names the file."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        inputs = {"connection": host.connection(), "source": _text("unit\n" * 100_000), "remotePath": "x.service"}
        await driver.create(inputs)
        assert host.read("x.service") == "unit\n" * 100_000
        (host.root / "folder").mkdir()
        with pytest.raises(OperationError, match="folder is a directory; when using a text asset"):
            await driver.create({**inputs, "remotePath": "folder"})

    play(scenario)


def test_only_another_content_or_path_copies_again(play: Any) -> None:
    """A changed connection alone copies nothing; neither reading nor deleting reaches the host."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        wanted = {"connection": host.connection(), "source": _text("one"), "remotePath": "file"}
        inputs = (await driver.check(wanted)).inputs
        identifier, state = await driver.create(inputs)
        host.write("file", "changed by somebody")
        assert await driver.read(identifier, state, inputs) == (identifier, state, inputs)
        moved = {**inputs, "connection": host.connection(dialErrorLimit=3)}
        assert (await driver.diff(state, moved)).replaces == []
        state = await driver.update(identifier, state, moved)
        assert host.read("file") == "changed by somebody"
        assert host.attempts == 1
        state = await driver.update(identifier, state, {**moved, "source": _text("two")})
        assert host.read("file") == "two"
        state = await driver.update(identifier, state, {**moved, "source": _text("two"), "remotePath": "other"})
        await driver.delete(identifier, state)
        assert (host.read("file"), host.read("other")) == ("two", "two")

    play(scenario)


def test_a_copy_closes_its_connection_and_previews_nothing(play: Any) -> None:
    """Unlike a command, a copy leaves no connection open; a preview opens none."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        inputs = {"connection": {"host": UNKNOWN}, "source": _text("x"), "remotePath": UNKNOWN}
        checked = await driver.check(inputs)
        assert checked.failures == {}
        await driver.create(checked.inputs, preview=True)
        assert host.attempts == 0
        await driver.create({"connection": host.connection(), "source": _text("x"), "remotePath": "file"})
        await host.left.wait()
        assert not host.open

    play(scenario)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (_text("x"), "no/such/folder/file", "failed to create remote file no/such/folder/file"),
        (_tree("HERE/tree"), "file", "remote path file/tree exists but is not a directory|file exists but is not"),
        (_tree("HERE/tree"), "no/such/folder", "failed to create remote directory no/such/folder"),
        ({SIGNATURE: ASSET, "path": "HERE/none", "hash": "x"}, "copy", "open .*none: no such file or directory"),
    ],
)
def test_a_copy_that_cannot_be_made_says_why(play: Any, source: dict[str, str], target: str, reason: str) -> None:
    """What is missing or in the way is named."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        host.write("file", "in the way")
        found = {name: value.replace("HERE", str(here)) for name, value in source.items()}
        with pytest.raises(OperationError, match=reason):
            await driver.create({"connection": host.connection(), "source": found, "remotePath": target})

    play(scenario)


@pytest.mark.parametrize(
    "source", [{SIGNATURE: ARCHIVE, "assets": {}}, {SIGNATURE: ASSET, "uri": "https://example.com/x"}]
)
def test_only_files_folders_and_text_can_be_copied(play: Any, source: dict[str, Any]) -> None:
    """Archives made of parts and remote assets fail the check."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        checked = await driver.check({"connection": host.connection(), "source": source, "remotePath": "x"})
        assert list(checked.failures) == ["source"]

    play(scenario)


def test_a_local_command_runs_where_the_engine_runs(play: Any) -> None:
    """Create, update and delete run in `dir`, with the environment, stdin and the previous output."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        driver.token = LOCAL
        inputs = {"create": 'cat; echo "$WORD"', "dir": str(here), "environment": {"WORD": "word"}, "stdin": "in "}
        identifier, state = await driver.create((await driver.check(inputs)).inputs)
        assert state["stdout"] == "in word"
        assert driver.lines == ["in word"]
        changed = {**inputs, "update": 'echo "$PULUMI_COMMAND_STDOUT" > seen', "delete": "rm seen"}
        state = await driver.update(identifier, state, changed)
        assert (here / "seen").read_text() == "in word\n"
        await driver.delete(identifier, state)
        assert not (here / "seen").exists()

    play(scenario)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"create": "echo no; exit 4"}, 'exit status 4: running "echo no; exit 4":\nno\n'),
        ({"create": "kill -9 $$"}, "signal: killed: running"),
        ({"create": "x", "interpreter": ["/no/such/shell"]}, "cannot start /no/such/shell: No such file"),
    ],
)
def test_a_failing_local_command_says_why(play: Any, inputs: dict[str, Any], reason: str) -> None:
    """Exit status or signal, the command and its output are in the error."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        driver.token = LOCAL
        with pytest.raises(OperationError) as caught:
            await driver.create(inputs)
        assert str(caught.value).startswith(reason)

    play(scenario)


def test_collecting_files_is_not_carried(play: Any) -> None:
    """The paths of assets and archives are refused rather than ignored."""

    async def scenario(driver: Driver, host: SshHost, here: Path) -> None:
        driver.token = LOCAL
        checked = await driver.check({"create": "true", "assetPaths": ["*.txt"]})
        assert checked.failures == {"assetPaths": "this stand-in doesn't carry assetPaths"}

    play(scenario)
