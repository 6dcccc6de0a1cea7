"""The Proxmox VE API over HTTPS, as far as the resources need it."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from testbed.engine.plugins._resource import ProviderError
from testbed.engine.plugins.proxmoxve.connection import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from testbed.engine.plugins._wire import Value
    from testbed.engine.plugins.proxmoxve.settings import Settings

_TLS = {"1.0": ssl.TLSVersion.TLSv1, "1.1": ssl.TLSVersion.TLSv1_1, "1.2": ssl.TLSVersion.TLSv1_2}
_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0

Form = dict[str, Any]


@dataclass
class Api:
    """A client that logs in with its first request."""

    settings: Settings
    _client: httpx.AsyncClient | None = None
    _login: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def get(self, path: str, **query: Any) -> Any:
        """What GET answers."""
        return await self._request("GET", path, params=query)

    async def post(self, path: str, form: Form | None = None) -> Any:
        """What POST answers; a list in the form is sent as a repeated field."""
        return await self._request("POST", path, data=form or {})

    async def put(self, path: str, form: Form) -> Any:
        """What PUT answers."""
        return await self._request("PUT", path, data=form)

    async def delete(self, path: str, **query: Any) -> Any:
        """What DELETE answers."""
        return await self._request("DELETE", path, params=query)

    async def finish(self, upid: Value, limit_s: float) -> None:
        """Wait for the task that an answer names; a task that fails is an error."""
        task = str(upid)
        path = f"/nodes/{task.split(':')[1]}/tasks/{quote(task, safe='')}/status"
        pause = _FIRST_POLL_S
        try:
            async with asyncio.timeout(limit_s):
                while (status := await self.get(path))["status"] != "stopped":
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LONGEST_POLL_S)
        except TimeoutError as error:
            raise ProviderError(f"timeout while waiting for task {task!r} to complete after {limit_s:g} s") from error
        ending = str(status.get("exitstatus"))
        if ending != "OK" and not ending.startswith("WARNINGS"):
            raise ProviderError(f"task {task!r} failed to complete with exit code: {ending}")

    async def close(self) -> None:
        """End the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _request(self, method: str, path: str, **content: Any) -> Any:
        async with self._login:
            client = self._client = self._client or await self._open()
        return await _exchange(client, method, path, **content)

    async def _open(self) -> httpx.AsyncClient:
        settings = self.settings
        client = httpx.AsyncClient(
            base_url=f"{settings.endpoint}/api2/json", verify=_tls(settings), trust_env=False, timeout=60
        )
        if settings.api_token is not None:
            client.headers["Authorization"] = f"PVEAPIToken={settings.api_token}"
            return client
        ticket, csrf = settings.auth_ticket, settings.csrf_prevention_token
        if ticket is None:
            credentials = {"username": settings.username, "password": settings.password}
            answer: Mapping[str, Any] = await _exchange(client, "POST", "/access/ticket", data=credentials)
            ticket, csrf = answer["ticket"], answer["CSRFPreventionToken"]
        client.cookies.set("PVEAuthCookie", ticket)
        client.headers["CSRFPreventionToken"] = csrf or ""
        return client


def _tls(settings: Settings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = _TLS.get(settings.min_tls, ssl.TLSVersion.TLSv1_3)
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def _exchange(client: httpx.AsyncClient, method: str, path: str, **content: Any) -> Any:
    try:
        response = await client.request(method, path, **content)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        message = f"failed to perform HTTP {method} request (path: {path}) - Reason: {reason}"
        raise ProviderError(message) from error
    if response.is_success:
        return response.json()["data"]
    raise ApiError(response.status_code, _reason(response))


def _reason(response: httpx.Response) -> str:
    """What Proxmox says went wrong: the status line's text, and the parameters it does not accept."""
    reason = response.reason_phrase
    try:
        errors = response.json().get("errors") or {}
    except ValueError:  # a proxy in between answers HTML
        return reason
    details = ", ".join(f"{name}: {str(text).strip()}" for name, text in errors.items())
    return f"{reason} ({details})" if details else reason
