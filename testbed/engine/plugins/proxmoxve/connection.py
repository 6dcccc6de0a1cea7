from __future__ import annotations

import os
from typing import TYPE_CHECKING

from testbed.engine.plugins._resource import ProviderError
from testbed.engine.plugins.proxmoxve.settings import Settings

if TYPE_CHECKING:
    from testbed.engine.plugins._wire import Props
    from testbed.engine.plugins.proxmoxve.api import Api


class ApiError(ProviderError):
    """An answer other than success; `reason` is what Proxmox says."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"received an HTTP {status} response - Reason: {reason}")
        self.reason = reason

    @property
    def is_missing(self) -> bool:
        """Whether what was asked for does not exist: Proxmox answers 500 for it and says so only in words."""
        words = ("does not exist", "no such resource", "not found")
        return any(word in self.reason for word in words)


class Connection:
    """The API that the provider's configuration leads to, opened when something is asked of it."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._api: Api | None = None

    def configure(self, config: Props) -> None:
        """Take the configuration, with the environment behind it; fails if it cannot reach and log in to an API."""
        self._settings = Settings.parse(config, os.environ)

    @property
    def settings(self) -> Settings:
        """The settings in use."""
        if self._settings is None:
            raise ProviderError("the provider's configuration is not known yet")
        return self._settings

    @property
    def api(self) -> Api:
        """The API's client."""
        if self._api is None:
            # Loading httpx takes half as long as the rest of the plugin, and most previews ask the API for nothing.
            from testbed.engine.plugins.proxmoxve.api import Api  # noqa: PLC0415

            self._api = Api(self.settings)
        return self._api

    async def close(self) -> None:
        """End the connections to the API."""
        if self._api is not None:
            await self._api.close()
