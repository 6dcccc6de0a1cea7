"""Copying by SFTP with the path rules of pulumi-command, which depend on what stands at the destination.

| source | destination is a folder | is missing  | is a file   |
|--------|-------------------------|-------------|-------------|
| dir    | dest/dir                | dest/dir    | error       |
| dir/   | content into dest       | into dest   | error       |
| file   | dest/file               | dest        | overwritten |
"""

from __future__ import annotations

import posixpath
from pathlib import Path, PurePath

import asyncssh

from testbed.engine.plugins._resource import ProviderError

_CHUNK = 256 * 1024


async def copy_text(connection: asyncssh.SSHClientConnection, text: str, target: str) -> None:
    """Write the text to a file; a folder at that path is an error, since nothing gives the file a name."""
    async with connection.start_sftp_client() as client:
        if await _is_folder(client, target):
            raise ProviderError(
                f"remote path {target} is a directory; when using a text asset, remotePath must be a file path"
            )
        await _write(client, text.encode(), target)


async def copy_path(connection: asyncssh.SSHClientConnection, source: str, target: str) -> None:
    """Copy a file, or a folder with everything in it."""
    content, name = _read(source), PurePath(source).name
    async with connection.start_sftp_client() as client:
        if content is not None:
            path = posixpath.join(target, name) if await _is_folder(client, target) else target
            await _write(client, content, path)
            return
        await _ensure_folder(client, target)
        if not source.endswith("/"):
            target = posixpath.join(target, name)
            await _ensure_folder(client, target)
        for relative in _tree(source):
            content = _read(f"{source}/{relative}")
            if content is None:
                await _ensure_folder(client, posixpath.join(target, relative))
            else:
                await _write(client, content, posixpath.join(target, relative))


def _read(path: str) -> bytes | None:
    """The content of a local file, None for a folder."""
    return None if Path(path).is_dir() else Path(path).read_bytes()


def _tree(folder: str) -> list[str]:
    """Everything in a local folder, each folder before its content."""
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*"))


async def _is_folder(client: asyncssh.SFTPClient, path: str) -> bool | None:
    """Whether a folder is at the path; None if nothing is."""
    try:
        attributes = await client.stat(path)
    except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
        return None
    except asyncssh.Error as error:
        raise ProviderError(f"failed to stat remote path {path}: {error.reason}") from error
    return attributes.type == asyncssh.FILEXFER_TYPE_DIRECTORY


async def _ensure_folder(client: asyncssh.SFTPClient, path: str) -> None:
    found = await _is_folder(client, path)
    if found is False:
        raise ProviderError(f"remote path {path} exists but is not a directory")
    if found is None:
        try:
            await client.mkdir(path)
        except asyncssh.Error as error:
            raise ProviderError(f"failed to create remote directory {path}: {error.reason}") from error


async def _write(client: asyncssh.SFTPClient, content: bytes, path: str) -> None:
    try:
        file = await client.open(path, "wb")
    except asyncssh.Error as error:
        raise ProviderError(f"failed to create remote file {path}: {error.reason}") from error
    try:
        async with file:
            for start in range(0, len(content), _CHUNK):
                await file.write(content[start : start + _CHUNK])
    except asyncssh.Error as error:
        raise ProviderError(f"failed to copy to remote path {path}: {error.reason}") from error
