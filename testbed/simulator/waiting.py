"""Waiting for the simulated machine to change."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Signal:
    """Wakes everyone who waits for a condition, so that each looks again."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Let every waiter look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as the condition holds."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


class HeldPipes:
    """Pipes that processes keep open while they sleep in the simulated kernel, which SIGKILL does not end."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._changed = Signal()

    @contextmanager
    def by_sleeper(self, pipes: Iterable[str]) -> Iterator[None]:
        """Hold pipes, named as /proc/PID/fd names them, for as long as a process is in the kernel."""
        mine = Counter(pipes)
        self._held += mine
        try:
            yield
        finally:
            self._held -= mine
            self._changed.notify()

    async def released(self, pipes: Iterable[str]) -> None:
        """Wait until no sleeper holds any of these pipes."""
        await self._changed.until(lambda: not any(pipe in self._held for pipe in pipes))
