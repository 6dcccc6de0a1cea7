"""The private root folder: plain files, folders and links laid out as a hypervisor's."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

LINK = "-> "


class Tree:
    """Files below `root`; paths are given as the host sees them, with or without the leading slash."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.disk_full = False

    def path(self, name: str) -> Path:
        """Where the host's path really is."""
        return self.root / name.lstrip("/")

    def resolve(self, argument: str, cwd: str) -> Path:
        """Where a command's path argument points: relative to its folder, or absolute in the host's eyes or really."""
        if not argument.startswith("/"):
            return Path(os.path.normpath(Path(cwd) / argument))
        if argument == str(self.root) or argument.startswith(f"{self.root}/"):
            return Path(argument)
        return self.path(argument)

    def put(self, name: str, content: str | bytes = "") -> None:
        """Make a file as the kernel or a boot would; a text of the form `-> target` makes a link."""
        if isinstance(content, str) and content.startswith(LINK):
            self.link(name, content.removeprefix(LINK))
            return
        path = self.path(name)
        data = content.encode() if isinstance(content, str) else content
        try:
            path.write_bytes(data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def save(self, name: str, content: str | bytes) -> None:
        """Replace a file as a program would, atomically.

        Raises:
            OSError: ENOSPC, while the disk is full and the file is below /etc or /var.
        """
        path = self.path(name)
        self.check_space(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.tmp.simulator")
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(path)

    def check_space(self, path: Path) -> None:
        """Fail as a full disk does.

        Raises:
            OSError: ENOSPC, while the disk is full and the path is below /etc or /var.
        """
        real = os.path.realpath(path)
        if self.disk_full and real.startswith((f"{self.root}/etc/", f"{self.root}/var/")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def read(self, name: str) -> str | None:
        """Read a file's text, None where there is none."""
        try:
            return self.path(name).read_text("utf-8")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def link(self, name: str, target: str) -> None:
        """Make a symbolic link, replacing what was there."""
        path = self.path(name)
        try:
            path.symlink_to(target)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
        except FileExistsError:
            path.unlink()
            path.symlink_to(target)

    def drop(self, name: str) -> None:
        """Remove a file, link or folder, if it is there."""
        path = self.path(name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def link_between(self, name: str, target: str) -> None:
        """Make a relative link to another place of the tree, as sysfs has them."""
        parent = self.path(name).parent
        self.link(name, os.path.relpath(self.path(target), parent))
