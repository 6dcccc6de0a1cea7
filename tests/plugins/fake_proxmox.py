"""A Proxmox VE API to talk to: fakepve with PCI mappings that it keeps, as Proxmox does."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from fakepve.certs import make_cert  # type: ignore[import-untyped]
from fakepve.model import PveError  # type: ignore[import-untyped]
from fakepve.server import USER, FakePve, ok, params  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NODE = "pve1"
TOKEN = "automation@pve!gpu=0b1c2d3e-aaaa-bbbb-cccc-0123456789ab"  # noqa: S105 - of the fake
PASSWORD = "open sesame"  # noqa: S105 - of the fake
_PCI = "/cluster/mapping/pci"
_DESTROY = re.compile(r"/api2/json/nodes/(?P<node>[^/]+)/qemu/(?P<vmid>\d+)/")
DEVICES = [
    {"id": "0000:81:00.0", "class": "0x030200", "vendor": "0x10de", "device": "0x2bb5", "iommugroup": 40},
    {"id": "0000:c1:00.0", "class": "0x030200", "vendor": "0x10de", "device": "0x2bb5", "iommugroup": 41, "mdev": 1},
    {"id": "0000:02:00.0", "class": "0x010802", "vendor": "0x144d", "device": "0xa824", "iommugroup": 7},
]


class FakeProxmox(FakePve):  # type: ignore[misc]
    """fakepve, with stateful PCI mappings, PCI devices, and the trailing slash that the real provider deletes with."""

    def __init__(self) -> None:
        super().__init__(password=PASSWORD, host="127.0.0.1", port=0)
        self.time_scale = 0
        self.mappings: dict[str, dict[str, Any]] = {}
        self.queries: list[dict[str, Any]] = []
        name, _, secret = TOKEN.partition("=")
        self.apitokens[name] = secret

    def _routes_testbed(self) -> list[tuple[str, str, Any]]:
        one = f"{_PCI}/{{id}}"
        return [
            ("POST", _PCI, self._create),
            ("GET", one, self._read),
            ("PUT", one, self._update),
            ("DELETE", one, self._remove),
            ("GET", "/nodes/{node}/hardware/pci", self._hardware),
            ("PUT", "/nodes/{node}/qemu/{vmid}/resize", self._resize),
        ]

    async def _generic(self, request: Any) -> Any:
        found = _DESTROY.fullmatch(request.path)
        if request.method != "DELETE" or found is None:
            return await super()._generic(request)
        values = {**found.groupdict(), **await params(request)}
        self.queries.append(values)
        return ok(await self._qm_destroy(values, request[USER]))

    async def _create(self, values: dict[str, Any], user: str) -> None:
        if values["id"] in self.mappings:
            raise PveError(500, f"mapping ID '{values['id']}' already exists")
        self.mappings[values["id"]] = values

    async def _read(self, values: dict[str, Any], user: str) -> dict[str, Any]:
        return {**self._mapping(values), "digest": "0" * 40, "type": "pci"}

    async def _update(self, values: dict[str, Any], user: str) -> None:
        found = self._mapping(values)
        for key in str(values.pop("delete", "")).split(","):
            found.pop(key, None)
        found.update(values)

    async def _remove(self, values: dict[str, Any], user: str) -> None:
        self.mappings.pop(self._mapping(values)["id"])

    async def _hardware(self, values: dict[str, Any], user: str) -> list[dict[str, Any]]:
        self.queries.append(values)
        return DEVICES

    async def _resize(self, values: dict[str, Any], user: str) -> Any:
        vm = self.vm(int(values["vmid"]))

        async def body() -> None:
            vm.config[values["disk"]] = re.sub(r"size=\w+", f"size={values['size']}", vm.config[values["disk"]])

        return await self.task(vm.node, "resize", vm.vmid, user, body)

    def _mapping(self, values: dict[str, Any]) -> dict[str, Any]:
        if values["id"] not in self.mappings:
            raise PveError(500, f"mapping '{values['id']}' not found")
        return self.mappings[values["id"]]


@contextlib.asynccontextmanager
async def fake_proxmox(folder: Path) -> AsyncIterator[tuple[FakeProxmox, str]]:
    """The API, and the path of the certificate to trust it by."""
    certificate, key, _ = make_cert(str(folder), hosts=("127.0.0.1",))
    api = FakeProxmox()
    await api.start(certificate, key)
    try:
        yield api, certificate
    finally:
        await api.stop()
