from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from testbed.engine.plugins._wire import secret
from testbed.engine.plugins.proxmoxve.plugin import ProxmoxPlugin
from testbed.engine.plugins.proxmoxve.settings import Settings
from tests.plugins.driver import Driver, OperationError, driving
from tests.plugins.fake_proxmox import DEVICES, NODE, PASSWORD, TOKEN, FakeProxmox, fake_proxmox

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "proxmoxve:index/getVersion:getVersion"
PCI = "proxmoxve:hardware/getPci:getPci"
ENVIRONMENT = ("ENDPOINT", "API_TOKEN", "USERNAME", "PASSWORD", "INSECURE", "AUTH_TICKET", "CSRF_PREVENTION_TOKEN")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PROXMOX_VE_{name}", raising=False)


def _play(folder: Path, scenario: Any) -> None:
    async def main() -> None:
        async with fake_proxmox(folder) as (api, certificate), driving(ProxmoxPlugin(None)) as driver:
            await scenario(driver, api, certificate)

    asyncio.run(main())


def test_facts_of_the_cluster_are_read(tmp_path: Path) -> None:
    """The version, the nodes and one node come from the API."""

    async def scenario(driver: Driver, api: FakeProxmox, certificate: str) -> None:
        await driver.configure({"endpoint": f"{api.url}/", "insecure": "true", "apiToken": TOKEN})
        version = await driver.invoke(VERSION, {})
        assert version == {"id": "version", "release": "9.0", "repositoryId": "fakepve", "version": "9.0.10"}
        nodes = await driver.invoke("proxmoxve:index/getNodesLegacy:getNodesLegacy", {})
        assert (nodes["names"], nodes["onlines"], nodes["cpuCounts"]) == ([NODE], [True], [4])
        node = await driver.invoke("proxmoxve:index/getNodeLegacy:getNodeLegacy", {"nodeName": NODE})
        assert (node["nodeName"], node["uptime"]) == (NODE, 3600)

    _play(tmp_path, scenario)


def test_pci_devices_are_filtered_from_the_start_of_their_values(tmp_path: Path) -> None:
    """Filters match as prefixes without 0x; the class blacklist goes to the API, an empty one too."""

    async def scenario(driver: Driver, api: FakeProxmox, certificate: str) -> None:
        await driver.configure({"endpoint": api.url, "insecure": True, "apiToken": TOKEN})

        async def found(**args: Any) -> list[str]:
            answer: Any = await driver.invoke(PCI, {"nodeName": NODE, **args})
            return [device["id"] for device in answer["devices"]]

        assert await found(filters={"class": "0302", "vendorId": "0x10DE"}) == ["0000:81:00.0", "0000:c1:00.0"]
        assert await found(filters={"id": "0000:c1"}) == ["0000:c1:00.0"]
        assert len(await found(pciClassBlacklists=[])) == len(DEVICES)
        await found(pciClassBlacklists=["05", "06"])
        assert [query.get("pci-class-blacklist") for query in api.queries] == [None, None, "", "05;06"]

    _play(tmp_path, scenario)


def test_a_password_logs_in_once(tmp_path: Path) -> None:
    """Without a token, the ticket of a login is used for what follows."""

    async def scenario(driver: Driver, api: FakeProxmox, certificate: str) -> None:
        credentials = {"username": "root@pam", "password": PASSWORD}
        await driver.configure({"endpoint": api.url, "insecure": "true", **credentials})
        await asyncio.gather(driver.invoke(VERSION, {}), driver.invoke(VERSION, {}))
        paths = [path for _, path, _ in api.requests]
        assert paths.count("/api2/json/access/ticket") == 1
        assert paths.count("/api2/json/version") == 2

    _play(tmp_path, scenario)


def test_the_environment_fills_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PROXMOX_VE_… variables stand in for what the configuration leaves out."""

    async def scenario(driver: Driver, api: FakeProxmox, certificate: str) -> None:
        monkeypatch.setenv("PROXMOX_VE_ENDPOINT", api.url)
        monkeypatch.setenv("PROXMOX_VE_API_TOKEN", TOKEN)
        monkeypatch.setenv("PROXMOX_VE_INSECURE", "true")
        await driver.configure({})
        assert (await driver.invoke(VERSION, {}))["release"] == "9.0"

    _play(tmp_path, scenario)


def test_a_certificate_is_checked_unless_insecure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown certificate is an error; a trusted one works without `insecure`."""

    async def scenario(driver: Driver, api: FakeProxmox, certificate: str) -> None:
        await driver.configure({"endpoint": api.url, "apiToken": TOKEN})
        with pytest.raises(OperationError, match="CERTIFICATE_VERIFY_FAILED"):
            await driver.invoke(VERSION, {})
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        async with driving(ProxmoxPlugin(None)) as trusting:
            await trusting.configure({"endpoint": api.url, "apiToken": TOKEN})
            assert (await trusting.invoke(VERSION, {}))["release"] == "9.0"

    _play(tmp_path, scenario)


def test_a_wrong_token_is_refused_and_never_shown(tmp_path: Path) -> None:
    """The error is the API's, without the token."""

    async def scenario(driver: Driver, api: FakeProxmox, certificate: str) -> None:
        wrong = "automation@pve!gpu=99999999-9999"
        await driver.configure({"endpoint": api.url, "insecure": "true", "apiToken": secret(wrong)})
        with pytest.raises(OperationError) as caught:
            await driver.invoke(VERSION, {})
        assert str(caught.value) == "received an HTTP 401 response - Reason: authentication failure"

    _play(tmp_path, scenario)


def test_an_api_that_is_down_is_an_error_that_says_so(tmp_path: Path) -> None:
    """A refused connection names the request and the reason."""

    async def scenario(driver: Driver, api: FakeProxmox, certificate: str) -> None:
        await driver.configure({"endpoint": "https://127.0.0.1:1", "insecure": "true", "apiToken": TOKEN})
        with pytest.raises(OperationError, match=r"failed to perform HTTP GET request \(path: /version\)"):
            await driver.invoke(VERSION, {})

    _play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "no endpoint"),
        ({"endpoint": "https://pve.example:8006"}, "no credentials"),
        ({"endpoint": "https://pve.example:8006", "username": "root@pam"}, "no credentials"),
    ],
)
def test_a_configuration_that_leads_nowhere_fails_at_once(tmp_path: Path, config: dict[str, str], reason: str) -> None:
    """Configure fails, as the real provider does, before any resource is looked at."""

    async def main() -> None:
        async with driving(ProxmoxPlugin(None)) as driver:
            with pytest.raises(OperationError, match=reason):
                await driver.configure(config)

    asyncio.run(main())


def test_configuration_is_checked_by_name_and_form() -> None:
    """A misspelt, misformed or unsupported setting is named, a secret's value never."""

    async def main() -> None:
        async with driving(ProxmoxPlugin(None)) as driver:
            assert await driver.check_config({"endpont": "x"}) == {
                "endpont": "unknown property 'endpont'; is 'endpoint' meant?"
            }
            assert await driver.check_config({"insecure": "maybe"}) == {"insecure": "must be a boolean, not a string"}
            assert await driver.check_config({"otp": "123456"}) == {"otp": "this stand-in doesn't carry otp"}
            failures = await driver.check_config({"apiToken": secret("not-a-token"), "endpoint": "pve:8006"})
            assert set(failures) == {"apiToken", "endpoint"}
            assert "not-a-token" not in str(failures)
            assert await driver.check_config({"endpoint": "https://pve:8006", "apiToken": secret(TOKEN)}) == {}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("config", "is_root"),
    [
        ({"username": "root@pam", "password": "x"}, True),
        ({"authTicket": "PVE:root@pam:65F1::abc"}, True),
        ({"apiToken": "root@pam!tf=1", "username": "root@pam", "password": "x"}, False),
        ({"username": "root@pve", "password": "x"}, False),
    ],
)
def test_only_root_itself_is_root(config: dict[str, str], is_root: bool) -> None:
    """A token of root@pam does not count as root@pam."""
    settings = Settings.parse({"endpoint": "https://pve:8006", **config}, {})
    assert settings.is_root_login is is_root


def test_a_function_that_is_not_carried_says_so() -> None:
    """An unknown function is an error that names it."""

    async def main() -> None:
        async with driving(ProxmoxPlugin(None)) as driver:
            with pytest.raises(OperationError, match="doesn't carry the function proxmoxve:index/getVmLegacy"):
                await driver.invoke("proxmoxve:index/getVmLegacy:getVmLegacy", {})
            driver.token = "proxmoxve:index/containerLegacy:ContainerLegacy"  # noqa: S105 - a type token
            with pytest.raises(OperationError, match=r"doesn't carry the resource .*ContainerLegacy"):
                await driver.check({"nodeName": NODE})

    asyncio.run(main())


def test_what_the_engine_adds_to_the_configuration_is_no_mistake() -> None:
    """The engine's own keys pass the check of a provider's configuration."""

    async def main() -> None:
        async with driving(ProxmoxPlugin(None)) as driver:
            own = {"version": "8.6.0", "pluginDownloadURL": "github://api.github.com/x", "__internal": {}}
            assert await driver.check_config({"endpoint": "https://pve:8006", **own}) == {}

    asyncio.run(main())
