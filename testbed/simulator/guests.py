"""What containers and machines share: Proxmox's lock files, which the program may hold too."""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from testbed.simulator.pveconf import GuestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.simulator.tree import Tree

TIMEOUT_S = 10.0  # Proxmox's own
POLL_S = 0.02


@asynccontextmanager
async def guest_lock(tree: Tree, name: str) -> AsyncIterator[None]:
    """Hold a guest's lock.

    Raises:
        GuestError: someone else held it for 10 s.
    """
    path = tree.path(f"run/lock/{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        await _take(handle, name)
        yield
    finally:
        os.close(handle)


async def _take(handle: int, name: str) -> None:
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if asyncio.get_running_loop().time() > deadline:
                raise GuestError(f"can't lock file '/var/lock/{name}' - got timeout") from None
            await asyncio.sleep(POLL_S)
        else:
            return
