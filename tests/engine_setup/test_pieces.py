from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from testbed.engine.cli_source import Cli, Source
from testbed.engine.doctor import advice, render, rows
from testbed.engine.environment import engine_environment, locate, write_env_file
from testbed.engine.pieces import Origin, ensure_pieces

from .conftest import write_program

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.engine.cache import Cache

    from .conftest import FakePath

STAND_INS = {"pulumi-resource-command", "pulumi-resource-proxmoxve"}

# `pulumi plugin install resource NAME VERSION`, as far as the set-up sees it.
INSTALLS_PLUGINS = """
[ "$1" = version ] && echo v3.276.0 && exit 0
folder="$PULUMI_HOME/plugins/$3-$4-v$5"
mkdir -p "$folder" && printf '#!/bin/sh\\n' > "$folder/pulumi-resource-$4" && chmod +x "$folder/pulumi-resource-$4"
"""
CANNOT_DOWNLOAD = '[ "$1" = version ] && echo v3.276.0 && exit 0; exit 1'


@pytest.fixture
def built(cache: Cache) -> Cli:
    """A `pulumi` as the build from Go modules leaves it."""
    folder = cache.root / "cli" / "3.276.0"
    write_program(folder / "pulumi-language-python-exec", "exit 0")
    write_program(folder / "pulumi-resource-pulumi-python", "exit 0")
    return Cli(write_program(folder / "pulumi", "echo v3.276.0"), (3, 276, 0), Source.GO)


def official(path: FakePath, script: str) -> Cli:
    """An official `pulumi` on PATH that answers as the script does."""
    path.add_pulumi("3.276.0")
    return Cli(path.add("pulumi", script), (3, 276, 0), Source.PATH)


def names(cache: Cache) -> set[str]:
    """What the private folder holds."""
    return {entry.name for entry in cache.bin.iterdir()}


def test_a_built_engine_is_completed(cache: Cache, path: FakePath, built: Cli) -> None:
    """Beside a `pulumi` from Go modules stand the language hosts and both stand-ins, and all are found."""
    ensure_pieces(cache, built, path.search)
    hosts = {"pulumi", "pulumi-language-python", "pulumi-resource-pulumi-python"}
    assert names(cache) == hosts | STAND_INS
    engine = locate(cache)
    assert [piece.origin for piece in engine.pieces] == [
        Origin.BUILT,
        Origin.STAND_IN,
        Origin.BUNDLED,
        Origin.STAND_IN,
        Origin.STAND_IN,
    ]
    assert engine.missing == ()
    assert engine.has_stand_ins


def test_the_hosts_stand_beside_pulumi_itself(cache: Cache, path: FakePath, built: Cli) -> None:
    """`pulumi` is no symbolic link: the engine would look for its hosts where the link leads, and warn of ours."""
    ensure_pieces(cache, built, path.search)
    pulumi = cache.bin / "pulumi"
    assert not pulumi.is_symlink()
    assert pulumi.samefile(built.path)


def test_wrappers_run_the_clones_own_interpreter(cache: Cache, path: FakePath, built: Cli) -> None:
    """A wrapper passes the engine's arguments on to the virtual environment of its clone."""
    write_program(cache.python, 'echo "$@"')
    ensure_pieces(cache, built, path.search)
    answer = subprocess.run(
        [cache.bin / "pulumi-resource-command", "-v=3", "127.0.0.1:5"], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "-u -m testbed.engine.plugins.command -v=3 127.0.0.1:5\n"


def test_a_plugin_on_path_is_preferred(cache: Cache, path: FakePath, built: Cli) -> None:
    """A single plugin that somebody put on PATH is used, the others being stood in for."""
    mine = path.add("pulumi-resource-command")
    ensure_pieces(cache, built, path.search)
    assert "pulumi-resource-command" not in names(cache)
    engine = locate(cache)
    assert (engine.command.path, engine.command.origin) == (mine, Origin.PATH)
    assert engine.proxmoxve.is_stand_in


def test_an_official_engine_downloads_its_plugins(cache: Cache, path: FakePath) -> None:
    """With an official `pulumi` that reaches the releases, nothing is stood in for, and acquisition stays on."""
    ensure_pieces(cache, official(path, INSTALLS_PLUGINS), path.search)
    engine = locate(cache)
    assert {piece.name for piece in engine.pieces if piece.origin is Origin.INSTALLED} == STAND_INS
    assert engine.language.origin is Origin.PATH
    assert not engine.has_stand_ins
    environment = engine_environment(cache, home=cache.root, backend=cache.root)
    assert "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION" not in environment


def test_an_official_engine_out_of_reach_of_the_releases_gets_stand_ins(cache: Cache, path: FakePath) -> None:
    """Where plugin downloads fail, the stand-ins do the work of an official `pulumi`."""
    ensure_pieces(cache, official(path, CANNOT_DOWNLOAD), path.search)
    assert names(cache) == STAND_INS
    environment = engine_environment(cache, home=cache.root, backend=cache.root)
    assert environment["PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION"] == "true"


def test_a_failed_download_is_not_tried_at_every_set_up(cache: Cache, path: FakePath) -> None:
    """A download that failed is left for a day, then tried again."""
    ensure_pieces(cache, official(path, CANNOT_DOWNLOAD), path.search)
    ensure_pieces(cache, official(path, INSTALLS_PLUGINS), path.search)
    assert locate(cache).has_stand_ins
    for marker in cache.root.glob("*.out-of-reach"):
        os.utime(marker, (0, 0))
    ensure_pieces(cache, official(path, INSTALLS_PLUGINS), path.search)
    assert not locate(cache).has_stand_ins


def test_what_path_has_by_now_leaves_the_private_folder(cache: Cache, path: FakePath, built: Cli) -> None:
    """After an official engine was installed, the next set-up takes the built one and its hosts away."""
    ensure_pieces(cache, built, path.search)
    ensure_pieces(cache, official(path, CANNOT_DOWNLOAD), path.search)
    assert names(cache) == STAND_INS
    assert locate(cache).pulumi.origin is Origin.PATH


def test_an_engine_that_is_not_there_is_named_as_missing(cache: Cache, path: FakePath) -> None:
    """The doctor names each missing piece and the command that gets it."""
    engine = locate(cache)
    assert set(engine.missing) == {"pulumi", "pulumi-language-python", "pulumi-resource-pulumi-python"} | STAND_INS
    problems = advice(cache, engine)
    assert all(any(name in line and "make setup" in line for line in problems) for name in engine.missing)


def test_the_table_says_what_is_official(cache: Cache, path: FakePath, built: Cli) -> None:
    """Each piece has a line with its origin and its path."""
    ensure_pieces(cache, built, path.search)
    table = render(rows(cache, locate(cache)))
    lines = {line.split()[0]: line for line in table.splitlines()}
    assert "stand-in" in lines["pulumi-resource-command"]
    assert str(cache.bin / "pulumi-resource-command") in lines["pulumi-resource-command"]
    assert "3.276.0" in lines["pulumi"]


def test_the_environment_is_private(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's agent, account and stack do not reach the engine; its own home, state and passphrase do."""
    for name in ("SSH_AUTH_SOCK", "PULUMI_ACCESS_TOKEN", "PULUMI_STACK"):
        monkeypatch.setenv(name, "of-the-caller")
    monkeypatch.setenv("PULUMI_BACKEND_URL", "https://elsewhere")
    environment = engine_environment(cache, home=tmp_path / "home", backend=tmp_path / "state", passphrase="p")  # noqa: S106
    assert "of-the-caller" not in environment.values()
    assert environment["PULUMI_HOME"] == str(tmp_path / "home")
    assert environment["PULUMI_BACKEND_URL"] == f"file://{tmp_path / 'state'}"
    assert environment["PULUMI_CONFIG_PASSPHRASE"] == "p"  # noqa: S105
    assert environment["PULUMI_SKIP_UPDATE_CHECK"] == "1"
    first, second, *rest = environment["PATH"].split(os.pathsep)
    assert (first, second) == (str(cache.bin), str(cache.venv / "bin"))
    assert rest == os.environ["PATH"].split(os.pathsep)


def test_sourcing_the_env_file_gives_the_engine(cache: Cache, path: FakePath, built: Cli) -> None:
    """In a shell that sources the file, once or twice, `pulumi` is the located one."""
    ensure_pieces(cache, built, path.search)
    write_env_file(cache)
    answer = subprocess.run(
        ["/bin/sh", "-c", f'. {cache.env_file}; . {cache.env_file}; command -v pulumi; echo "$PATH"'],
        capture_output=True,
        text=True,
        check=True,
    )
    pulumi, search = answer.stdout.splitlines()
    assert pulumi == str(cache.bin / "pulumi")
    assert search == os.pathsep.join([str(cache.bin), str(cache.venv / "bin"), os.environ["PATH"]])


def test_the_env_file_leaves_state_and_passphrase_to_the_person(cache: Cache, path: FakePath, built: Cli) -> None:
    """No state of a real host lands in a cache that `make clean` removes, or under a passphrase that is published."""
    ensure_pieces(cache, built, path.search)
    write_env_file(cache)
    text = cache.env_file.read_text()
    assert not [name for name in ("PULUMI_HOME", "PULUMI_BACKEND_URL", "PULUMI_CONFIG_PASSPHRASE") if name in text]
