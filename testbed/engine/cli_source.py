"""The `pulumi` program: from PATH, else by the official installer, else built from Go modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass
from enum import StrEnum
from http.client import HTTPException
from pathlib import Path

from testbed.engine.cache import Cache, building, digest
from testbed.engine.progress import SetupError, Step, note, run, step
from testbed.engine.versions import MINIMUM, PINNED, Version, parse_version, show_version, version_of

MODULE = Path(__file__).with_name("pulumi_cli")  # go.mod and go.sum: the versions and checksums of what is built
PACKAGE = "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi"
SDK = "github.com/pulumi/pulumi/sdk/v3"
LANGUAGE = "pulumi-language-python"
EXECUTOR = "pulumi-language-python-exec"
DYNAMIC = "pulumi-resource-pulumi-python"
# Official scripts that the SDK's module carries. The language host itself is Go, and its module is not served.
SCRIPTS = {EXECUTOR: f"python/cmd/{EXECUTOR}", DYNAMIC: f"python/dist/{DYNAMIC}"}
INSTALLER_URL = "https://get.pulumi.com/install.sh"
INSTALLER_TIMEOUT = 4.0  # seconds: a machine without a way out falls through to Go soon


class Source(StrEnum):
    """Where a `pulumi` came from."""

    PATH = "PATH"
    INSTALLER = "official installer"
    GO = "Go modules"


@dataclass(frozen=True)
class Cli:
    """A `pulumi` program that is new enough."""

    path: Path
    version: Version
    source: Source

    @property
    def official(self) -> bool:
        """Whether it is an official release, which has its language host beside it."""
        return self.source is not Source.GO

    def beside(self, name: str) -> Path | None:
        """The program of that name in the folder of `pulumi`, where the engine looks for its hosts after PATH."""
        path = self.path.resolve().with_name(name)
        return path if path.exists() else None


def installed_cli(cache: Cache) -> Path:
    """Where the official installer's `pulumi` is put."""
    return cache.root / "official" / PINNED / "bin" / "pulumi"


def built_cli(cache: Cache) -> Path:
    """Where the `pulumi` built from Go modules is put."""
    return cache.root / "cli" / PINNED / "pulumi"


def on_path(name: str, search: str | None) -> Path | None:
    """The program of that name on a PATH, as an absolute path."""
    found = shutil.which(name, path=search)
    return Path(found).absolute() if found else None


def cli_on_path(search: str | None) -> Cli | None:
    """The PATH's own `pulumi`, when it is new enough."""
    path = on_path("pulumi", search)
    version = version_of(path) if path else None
    if path is None or version is None or version < MINIMUM:
        return None
    return Cli(path, version, Source.PATH)


def usable_on_path(search: str | None) -> Cli | None:
    """The PATH's own `pulumi` when it is new enough and has its language hosts; else say why it is left aside."""
    path = on_path("pulumi", search)
    if path is None:
        return None
    cli = cli_on_path(search)
    if cli is None:
        note(f"  {path} is {show_version(version_of(path))}, {show_version(MINIMUM)} is needed: left aside")
        return None
    for name in (LANGUAGE, DYNAMIC):
        if on_path(name, search) is None and cli.beside(name) is None:
            note(f"  {path} has no {name} beside it or on PATH: left aside")
            return None
    return cli


def cached_cli(cache: Cache) -> Cli | None:
    """The `pulumi` that an earlier set-up left in the cache, the official one first."""
    for path, source in ((installed_cli(cache), Source.INSTALLER), (built_cli(cache), Source.GO)):
        version = version_of(path) if path.exists() else None
        if version is not None and version >= MINIMUM:
            return Cli(path, version, source)
    return None


def ensure_cli(cache: Cache, search: str | None) -> Cli:
    """Find or make a `pulumi`; raise SetupError, naming the three ways, where none is open."""
    with step("pulumi") as current:
        cli = usable_on_path(search) or cached_cli(cache) or _install(cache, current) or _build(cache, current)
        current.outcome = f"{show_version(cli.version)} from {cli.source}"
        return cli


def looks_like_installer(script: str) -> bool:
    """Whether a download is Pulumi's installer and not, say, a captive portal's page."""
    return script.startswith("#!") and all(option in script for option in ("--install-root", "--no-edit-path"))


def download_installer() -> str | None:
    """The official installer's text; None where it cannot be had."""
    try:
        with urllib.request.urlopen(INSTALLER_URL, timeout=INSTALLER_TIMEOUT) as answer:
            script = answer.read(1_000_000).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return None
    return script if looks_like_installer(script) else None


def _install(cache: Cache, current: Step) -> Cli | None:
    current.say("asking the official installer")
    script = download_installer()
    if script is None:
        return None
    root = installed_cli(cache).parents[1]
    try:
        with building(root, digest(PINNED)) as partial:
            installer = partial / "install.sh"
            installer.write_text(script)
            arguments = ["--version", PINNED, "--install-root", str(partial), "--no-edit-path"]
            run(["sh", installer, *arguments], current)
            installer.unlink()
    except SetupError as failure:
        # The script answered, its release download did not: an allow-list that names the one host only.
        note(f"  the official installer did not finish, trying Go modules\n{failure}")
        return None
    return cached_cli(cache)


def go_version(go: Path) -> Version | None:
    """What `go env GOVERSION` says, outside any module; None when it does not answer."""
    try:
        answer = subprocess.run(
            [go, "env", "GOVERSION"], capture_output=True, text=True, timeout=30, check=False, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout.strip().removeprefix("go")
    return parse_version(text if text.count(".") > 1 else f"{text}.0")


def _build(cache: Cache, current: Step) -> Cli:
    go = on_path("go", None)
    if go is None:
        raise SetupError(f"there is no engine, and no Go to build one with.\n{_ways(cache)}")
    folder = built_cli(cache).parent
    current.say(f"building it with {go}, a few minutes the first time")
    with building(folder, digest(MODULE / "go.mod", MODULE / "go.sum")) as partial:
        try:
            run(_build_command(go, partial / "pulumi"), current, env=go_environment(cache), cwd=MODULE)
        except SetupError as failure:
            raise SetupError(f"there is no engine, and building one failed.\n{_ways(cache)}\n{failure}") from failure
        for name, inside in SCRIPTS.items():
            script = partial / name
            script.write_bytes((_sdk_folder(go, cache) / inside).read_bytes())
            script.chmod(0o755)
    shutil.rmtree(cache.go, ignore_errors=True)  # 3 GB that only another version's build would read again
    cli = cached_cli(cache)
    if cli is None:
        raise SetupError(f"{built_cli(cache)} was built but does not run: remove {folder} and try again")
    return cli


def _ways(cache: Cache) -> str:
    return (
        "Any of these three helps:\n"
        f"    1. put `pulumi` {show_version(MINIMUM)} or newer on PATH (https://www.pulumi.com/docs/install/)\n"
        f"    2. let this machine reach {INSTALLER_URL}, and run this again: it installs into {cache.root}\n"
        f"    3. put Go on PATH, with a Go module proxy in reach: the engine is then built from its modules"
    )


def _build_command(go: Path, output: Path) -> list[str | Path]:
    version = "github.com/pulumi/pulumi/sdk/v3/go/common/version.Version"
    flags = f"-s -w -X {version}=v{PINNED}"  # without symbols: 170 MB become 120
    return [go, "build", "-v", "-trimpath", f"-ldflags={flags}", "-o", output, PACKAGE]


def _sdk_folder(go: Path, cache: Cache) -> Path:
    """The SDK's module in the module cache, which the build has just filled."""
    command = [str(go), "list", "-m", "-f", "{{.Dir}}", SDK]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=go_environment(cache), cwd=MODULE)
    return Path(answer.stdout.strip())


def go_environment(cache: Cache) -> dict[str, str]:
    """The environment for `go build`: its caches in ours, its module cache removable, no flags of the user's."""
    return {
        **os.environ,
        "GOPATH": str(cache.go / "path"),
        "GOMODCACHE": str(cache.go / "mod"),
        "GOCACHE": str(cache.go / "build"),
        "GOFLAGS": "-modcacherw -mod=readonly -buildvcs=false",
        "GOWORK": "off",
    }
