"""Debian packages that the lab needs on the machine it runs on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from testbed.engine.progress import SetupError, run, step

PACKAGES = (
    "acpica-tools",
    "cpio",
    "e2fsprogs",
    "gcc",
    "kmod",
    "linux-headers-amd64",
    "make",
    "mmdebstrap",
    "openssh-client",
    "qemu-system-x86",
    "qemu-utils",
    "seabios",
)
INSTALL = "apt-get install --yes --no-install-recommends"
"""Recommended packages would bring desktop libraries with QEMU."""


def missing_packages() -> list[str]:
    """The packages that are not installed."""
    try:
        listed = subprocess.run(
            ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}${Package}\\n", *PACKAGES],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        ).stdout
    except FileNotFoundError as error:
        raise SetupError("the lab is built from Debian's packages, and there is no dpkg here: use Debian 12") from error
    installed = {line[2:].strip() for line in listed.splitlines() if line.startswith("ii")}
    return [name for name in PACKAGES if name not in installed]


def ensure_packages(*, install: bool) -> None:
    """Install what is missing where that is wanted; else say how.

    Raises:
        SetupError: something is missing, and it is not to be installed or can't be.
    """
    missing = missing_packages()
    if not missing:
        return
    command = f"{INSTALL} {' '.join(missing)}"
    if not install:
        sudo = "" if os.geteuid() == 0 else "sudo "
        raise SetupError(
            f"the lab needs packages that are not installed: {', '.join(missing)}. "
            f"Install them with `{sudo}{command}`, or add INSTALL=1 to the `make` command"
        )
    with step(f"install {len(missing)} packages") as current:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (["apt-get", "update"], command.split()):
            run([*_as_root(), *arguments], current, env=environment)


def kernel_release() -> str:
    """The newest kernel that headers are installed for: the guest runs this one.

    Raises:
        SetupError: there are none.
    """
    found = sorted(Path("/usr/src").glob("linux-headers-*-amd64"), key=_version)
    if not found:
        raise SetupError(f"no kernel headers in /usr/src: `{INSTALL} linux-headers-amd64`")
    return found[-1].name.removeprefix("linux-headers-")


def _version(path: Path) -> list[int]:
    return [int(part) for part in path.name.replace("-", ".").split(".") if part.isdigit()]


def _as_root() -> list[str]:
    return [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
