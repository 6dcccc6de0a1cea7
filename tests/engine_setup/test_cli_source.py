from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.engine import cli_source
from testbed.engine.cli_source import Source, ensure_cli, installed_cli, looks_like_installer, usable_on_path
from testbed.engine.progress import SetupError
from testbed.engine.versions import MINIMUM, PINNED, parse_version, show_version

from .conftest import write_program

if TYPE_CHECKING:
    from testbed.engine.cache import Cache

    from .conftest import FakePath

INSTALLER = f"""
# --install-root, --no-edit-path
test "$1 $2 $3 $5" = "--version {PINNED} --install-root --no-edit-path" || exit 9
mkdir -p "$4/bin"
printf '#!/bin/sh\\necho v{PINNED}\\n' > "$4/bin/pulumi"
chmod +x "$4/bin/pulumi"
"""

GO = f"""
if [ "$1" = list ]; then echo "$GOMODCACHE/sdk"; exit 0; fi
mkdir -p "$GOMODCACHE/sdk/python/cmd" "$GOMODCACHE/sdk/python/dist"
echo executor > "$GOMODCACHE/sdk/python/cmd/pulumi-language-python-exec"
echo dynamic > "$GOMODCACHE/sdk/python/dist/pulumi-resource-pulumi-python"
while [ "$1" != -o ]; do shift; done
printf '#!/bin/sh\\necho v{PINNED}\\n' > "$2"
chmod +x "$2"
"""


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the real installer."""
    monkeypatch.setattr(cli_source, "download_installer", lambda: None)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v3.276.0", (3, 276, 0)),
        ("3.207.1-alpha.1760000000+dirty\n", (3, 207, 1)),
        ("warning: A new version\nv3.210.0", (3, 210, 0)),
        ("no version at all", None),
    ],
)
def test_a_version_is_read_from_what_pulumi_says(text: str, version: tuple[int, int, int] | None) -> None:
    """The version is found with or without its v, its pre-release tag and the warnings around it."""
    assert parse_version(text) == version


def test_pulumi_on_path_is_preferred(cache: Cache, path: FakePath) -> None:
    """A new enough `pulumi` on PATH is used even when the cache holds one."""
    mine = path.add_pulumi(show_version(MINIMUM))
    write_program(installed_cli(cache), f"echo v{PINNED}")
    cli = ensure_cli(cache, path.search)
    assert (cli.path, cli.version, cli.source) == (mine, MINIMUM, Source.PATH)


def test_an_old_pulumi_is_left_aside(cache: Cache, path: FakePath, capsys: pytest.CaptureFixture[str]) -> None:
    """A `pulumi` older than the minimum is named, with both versions, and another way is taken."""
    path.add_pulumi("3.206.9")
    write_program(installed_cli(cache), f"echo v{PINNED}")
    assert ensure_cli(cache, path.search).source is Source.INSTALLER
    told = capsys.readouterr().out
    assert "3.206.9" in told
    assert show_version(MINIMUM) in told


def test_a_pulumi_without_its_hosts_is_left_aside(path: FakePath, capsys: pytest.CaptureFixture[str]) -> None:
    """A `pulumi` that could run no Python program is not used, and the missing host is named."""
    path.add_pulumi(PINNED, hosts=False)
    assert usable_on_path(path.search) is None
    assert "pulumi-language-python" in capsys.readouterr().out


def test_a_pulumi_that_does_not_run_is_left_aside(path: FakePath) -> None:
    """A broken `pulumi` on PATH is no engine."""
    path.add("pulumi", "exit 1")
    assert usable_on_path(path.search) is None


def test_the_official_installer_comes_second(cache: Cache, path: FakePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a `pulumi` on PATH the official installer puts one into the cache, and is not asked again."""
    monkeypatch.setattr(cli_source, "download_installer", lambda: f"#!/bin/sh{INSTALLER}")
    first = ensure_cli(cache, path.search)
    assert (first.path, first.source) == (installed_cli(cache), Source.INSTALLER)
    monkeypatch.setattr(cli_source, "download_installer", lambda: pytest.fail("asked again"))
    assert ensure_cli(cache, path.search) == first


def test_go_modules_come_third(cache: Cache, path: FakePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installer that fails is followed by a build from Go modules, with the SDK's scripts beside it."""
    monkeypatch.setattr(cli_source, "download_installer", lambda: "#!/bin/sh\necho no release >&2; exit 1")
    path.add("go", GO)
    cli = ensure_cli(cache, path.search)
    assert cli.source is Source.GO
    assert not cli.official
    assert cli.path.with_name("pulumi-language-python-exec").read_text() == "executor\n"
    assert cli.path.with_name("pulumi-resource-pulumi-python").read_text() == "dynamic\n"
    assert not cache.go.exists()


def test_without_any_way_the_three_are_named(cache: Cache, path: FakePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `pulumi`, no network, no Go: the error says what would help."""
    monkeypatch.setenv("PATH", path.search)
    with pytest.raises(SetupError, match=r"(?s)on PATH.*let this machine reach.*put Go on PATH"):
        ensure_cli(cache, path.search)


def test_a_failing_build_shows_its_last_lines(cache: Cache, path: FakePath) -> None:
    """A build that fails is shown with what Go said, and with the other ways; nothing half-built stays."""
    path.add("go", "echo 'go: module lookup disabled'; exit 1")
    with pytest.raises(SetupError, match=r"(?s)on PATH.*ended with 1.*module lookup disabled"):
        ensure_cli(cache, path.search)
    assert not list((cache.root / "cli").glob("*"))


@pytest.mark.parametrize(
    ("download", "expected"),
    [
        (f"#!/bin/sh{INSTALLER}", True),
        ("<!doctype html><title>Sign in to the guest network</title>", False),
        ("#!/bin/sh\nrm -rf something", False),
    ],
)
def test_only_the_installer_is_run(download: str, expected: bool) -> None:
    """A page that answers in the installer's place is not taken for it."""
    assert looks_like_installer(download) is expected
