"""The provider's configuration, with the environment variables that the real provider falls back to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from testbed.engine.plugins._resource import ProviderError
from testbed.engine.plugins._schema import Failure
from testbed.engine.plugins._wire import has_unknown, reveal_props

if TYPE_CHECKING:
    from collections.abc import Mapping

    from testbed.engine.plugins._wire import Props

_NOT_CARRIED = ("otp", "randomVmIds", "randomVmIdStart", "randomVmIdEnd")
_TOKEN = re.compile(r"\S+@\S+!\S+=[A-Za-z0-9-]+")
_ROOT = "root@pam"


@dataclass(frozen=True)
class Settings:
    """Where the API is and how to log in; a token goes before a ticket, a ticket before a password."""

    endpoint: str
    api_token: str | None = field(repr=False)
    auth_ticket: str | None = field(repr=False)
    csrf_prevention_token: str | None = field(repr=False)
    username: str | None
    password: str | None = field(repr=False)
    insecure: bool
    min_tls: str

    @classmethod
    def parse(cls, config: Props, environment: Mapping[str, str]) -> Settings:
        """The settings of a checked, revealed configuration; fails if they cannot reach and log in to an API."""

        def text(name: str, variable: str) -> str | None:
            value = config.get(name)
            return value if isinstance(value, str) and value else environment.get(variable) or None

        insecure = config.get("insecure")
        if insecure is None:
            insecure = environment.get("PROXMOX_VE_INSECURE", "").lower() in {"1", "true"}
        settings = cls(
            endpoint=(text("endpoint", "PROXMOX_VE_ENDPOINT") or "").rstrip("/"),
            api_token=text("apiToken", "PROXMOX_VE_API_TOKEN"),
            auth_ticket=text("authTicket", "PROXMOX_VE_AUTH_TICKET"),
            csrf_prevention_token=text("csrfPreventionToken", "PROXMOX_VE_CSRF_PREVENTION_TOKEN"),
            username=text("username", "PROXMOX_VE_USERNAME"),
            password=text("password", "PROXMOX_VE_PASSWORD"),
            insecure=bool(insecure),
            min_tls=text("minTls", "PROXMOX_VE_MIN_TLS") or "1.3",
        )
        if not settings.endpoint:
            raise ProviderError("no endpoint: set proxmoxve:endpoint or PROXMOX_VE_ENDPOINT to https://HOST:8006/")
        if not (settings.api_token or settings.auth_ticket or (settings.username and settings.password)):
            raise ProviderError(
                "no credentials: set proxmoxve:apiToken (PROXMOX_VE_API_TOKEN), or proxmoxve:username and "
                "proxmoxve:password (PROXMOX_VE_USERNAME, PROXMOX_VE_PASSWORD)"
            )
        return settings

    @property
    def is_root_login(self) -> bool:
        """Whether this is root@pam itself; a token of root@pam is not, to Proxmox."""
        return self.api_token is None and (self.username == _ROOT or f"PVE:{_ROOT}:" in (self.auth_ticket or ""))


def failures(config: Props) -> list[Failure]:
    """What is wrong with a configuration that fits the schema."""
    bare = reveal_props(config)
    found = [Failure(name, f"this stand-in doesn't carry {name}") for name in _NOT_CARRIED if bare.get(name)]
    token, endpoint = bare.get("apiToken"), bare.get("endpoint")
    if token and not has_unknown(token) and not _TOKEN.fullmatch(str(token)):
        found.append(Failure("apiToken", "must have the form USER@REALM!TOKENID=SECRET"))
    if endpoint and not has_unknown(endpoint) and not str(endpoint).startswith(("https://", "http://")):
        found.append(Failure("endpoint", f"must be a URL such as https://HOST:8006/, not '{endpoint}'"))
    return found
