"""An event loop in a thread of its own, for servers that tests start and stop."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
TIMEOUT_S = 240  # more than a boot takes whose unit runs into its own limit


class LoopThread:
    """An event loop that others may hand work to, from whatever thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="testbed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the loop."""
        if self._thread:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._thread = None

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine there, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def run(self, act: Callable[[], T]) -> T:
        """Run a function there, or here where that is the loop's thread or there is none."""
        if self._thread is None or threading.get_ident() == self._thread.ident:
            return act()

        async def run() -> T:
            return act()

        return self.call(run())
