"""The folder with what a shell on the simulated host finds on its PATH: shims, and a python3 of its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.simulator.commands.dispatch import COMMANDS

if TYPE_CHECKING:
    from testbed.simulator.tree import Tree

GUEST = Path(__file__).with_name("guest")
SYSTEM_PATH = "/usr/bin:/bin"


class GuestHome:
    """`bin` goes first on PATH; `full` is the file whose presence means that the disk is full."""

    def __init__(self, folder: Path, tree: Tree, socket: str) -> None:
        self.bin = folder / "bin"
        self.full = folder / "disk-full"
        told = json.dumps({"root": str(tree.root), "socket": socket, "full": str(self.full)})
        # A virtual environment without packages: the host has the standard library only, also for a child that is
        # started by sys.executable, isolated (-I) or with an empty environment.
        python = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]  # noqa: SLF001
        site = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        for place in (self.bin, site):
            place.mkdir(parents=True, exist_ok=True)
            (place / "simulator.json").write_text(told)
        (folder / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
        (self.bin / "python3").symlink_to(python)
        shutil.copy(GUEST / "sitecustomize.py", site)
        shim = self.bin / "shim"
        shim.write_text(f"#!{python} -IS\n{(GUEST / 'shim.py').read_text('utf-8')}")
        shim.chmod(0o755)
        for name in (*COMMANDS, "nsenter"):
            (self.bin / name).symlink_to("shim")

    def environment(self, tree: Tree) -> dict[str, str]:
        """The environment that a command gets from the SSH server."""
        return {
            "PATH": f"{self.bin}:{SYSTEM_PATH}",
            "HOME": str(tree.path("root")),
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
        }
