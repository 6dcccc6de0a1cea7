"""What the stand-ins for Proxmox's tools share: where guests' files are, their locks, and systemd's scopes."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from testbed.simulator.pveconf import GuestConfig

CONTAINERS = Path("/etc/pve/lxc")
VMS = Path("/etc/pve/qemu-server")


def fail(message: str, code: int = 255) -> NoReturn:
    """End as Proxmox's tools do: the message on standard error, 255 for a failure."""
    sys.stderr.write(f"{message}\n")
    sys.exit(code)


def unknown(tool: str, arguments: Sequence[str]) -> NoReturn:
    """End because the real tool may know this and the stand-in does not: never a silent success."""
    fail(f"{tool}: the lab's stand-in does not know `{' '.join(arguments)}`", 2)


def guest_ids(folder: Path) -> list[int]:
    """The guests that a folder has configurations of."""
    return sorted(int(path.stem) for path in folder.glob("*.conf") if path.stem.isdigit())


def config_path(folder: Path, vmid: str) -> Path:
    """A guest's configuration file; fails as Proxmox does where there is none."""
    path = folder / f"{vmid}.conf"
    if not path.is_file():
        fail(f"Configuration file '{path.resolve().relative_to('/etc/pve')}' does not exist", 2)
    return path


def read_config(path: Path, kind: str) -> GuestConfig:
    """A guest's configuration, of the kind `lxc` or `qemu`."""
    # dataclasses takes an emulated processor long to import: pct's commands without a configuration go without.
    from testbed.simulator.pveconf import GuestConfig  # noqa: PLC0415

    return GuestConfig.parse(path.read_text(), kind)


def show(config: GuestConfig) -> None:
    """Print a configuration as `config` does, pending changes applied."""
    sys.stdout.write("".join(f"{key}: {value}\n" for key, value in config.effective()))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold Proxmox's lock of a guest's configuration."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def quiet(*command: str) -> bool:
    """Run a command for its success alone."""
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def option(arguments: Sequence[str], name: str, default: str) -> str:
    """The value that follows `--name`."""
    words = [word.lstrip("-") for word in arguments]
    return arguments[words.index(name) + 1] if name in words else default


def changes(arguments: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Read what `set` was given, `-key value …` and `-delete key,…`: values to set and keys to delete."""
    values = {key.lstrip("-"): value for key, value in zip(arguments[::2], arguments[1::2], strict=True)}
    return values, set(filter(None, values.pop("delete", "").split(",")))
