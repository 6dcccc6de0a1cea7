"""The folders that the engine lives in, and the rules that keep them whole when several set-ups run at once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.engine.progress import note

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE_VARIABLE = "GPU_TOPOLOGY_CACHE"
SHARED = "shared"  # the link in a clone's .cache to the shared cache that it uses


@dataclass(frozen=True)
class Cache:
    """One cache folder, as one clone of the project sees it.

    The Go caches, the CLI and Pulumi's home serve every clone. The virtual environment and the wrappers belong to
    one clone, because the project is installed editable: in a shared cache each clone has a folder for them.
    """

    root: Path
    repository: Path = REPOSITORY

    @property
    def local(self) -> Path:
        """The folder inside the clone: the cache itself, or links to what a shared cache holds for this clone."""
        return self.repository / ".cache"

    @property
    def clone(self) -> Path:
        """The folder for what belongs to this clone alone."""
        if self.root == self.local:
            return self.root
        key = hashlib.sha256(os.fsencode(self.repository)).hexdigest()[:8]
        return self.root / "clones" / f"{self.repository.name}-{key}"

    @property
    def venv(self) -> Path:
        """The virtual environment."""
        return self.clone / "venv"

    @property
    def python(self) -> Path:
        """The interpreter that programs, policy packs and stand-ins run with."""
        return self.venv / "bin" / "python"

    @property
    def bin(self) -> Path:
        """The private folder for PATH: only what the user's own PATH lacks."""
        return self.clone / "bin"

    @property
    def go(self) -> Path:
        """Go's module cache, build cache and path."""
        return self.root / "go"

    @property
    def pulumi_home(self) -> Path:
        """The PULUMI_HOME that official plugins are downloaded into."""
        return self.root / "pulumi-home"

    @property
    def env_file(self) -> Path:
        """The shell file to source."""
        return self.clone / "env"

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the cache for one set-up; the value says whether another set-up had to be waited for."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as lock:
            waited = False
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                note("another set-up is using this cache: waiting for it to end")
                fcntl.flock(lock, fcntl.LOCK_EX)
                waited = True
            yield waited


def find_cache(repository: Path = REPOSITORY) -> Cache:
    """The cache that `GPU_TOPOLOGY_CACHE` names, else the shared one that the clone was last set up with, else its own.

    Remembering it keeps a shell that lacks the variable from building everything a second time.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Cache(Path(named).expanduser().resolve(), repository)
    remembered = repository / ".cache" / SHARED
    return Cache(remembered.resolve() if remembered.is_dir() else repository / ".cache", repository)


def digest(*parts: str | bytes | Path) -> str:
    """The key of a build: a hash over texts and the contents of files."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()


def is_built(folder: Path, key: str) -> bool:
    """Whether the folder holds a finished build of this key."""
    try:
        return (folder / ".stamp").read_text() == key
    except OSError:
        return False


def mark_built(folder: Path, key: str) -> None:
    """Record that the folder's build is finished: the last thing a build does."""
    (folder / ".stamp").write_text(key)


@contextmanager
def building(folder: Path, key: str) -> Iterator[Path]:
    """Build into a folder beside the wanted one and put it in place, stamped, only when the block succeeds."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        mark_built(partial, key)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file that no reader ever sees half of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.chmod(mode)
    partial.replace(path)


def link(path: Path, target: Path) -> None:
    """Point a symbolic link at a target, replacing what was there in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(path)


def hard_link(path: Path, target: Path) -> None:
    """Give a file of the same cache a second name, replacing what was there in one step."""
    if path.exists() and path.samefile(target) and not path.is_symlink():
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.hardlink_to(target)
    partial.replace(path)
