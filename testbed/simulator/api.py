"""Proxmox's API over TLS: fakepve, made to share guests, devices and mappings with the simulated host."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from aiohttp import web
from fakepve import FakePve, PveError, TaskError  # type: ignore[import-untyped]
from fakepve.certs import make_cert  # type: ignore[import-untyped]

from testbed.simulator.apiguests import GuestFiles
from testbed.simulator.apimappings import MappingRoutes
from testbed.simulator.pveconf import GuestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from testbed.simulator.machine import HostMachine

LOOPBACK = "127.0.0.1"
TOKEN_ID = "root@pam!gpu-topology"  # noqa: S105  the token's name
PREFIXES = ("/api2/json", "/api2/extjs")
HARDWARE = "/nodes/{node}/hardware/pci"

Values = dict[str, Any]


class ProxmoxApi:
    """The API's server; its certificate and token are in a folder, and are used again where they are there."""

    def __init__(self, machine: HostMachine) -> None:
        self._pve = _Pve(machine)
        self._secret = ""

    @property
    def token(self) -> str:
        """The API token that clients log in with."""
        return f"{TOKEN_ID}={self._secret}"

    @property
    def url(self) -> str:
        """Where it listens."""
        return str(self._pve.url)

    async def start(self, keys: Path, port: int) -> None:
        """Listen; port 0 takes a free one."""
        if not (keys / "api.crt").is_file():
            make_cert(str(keys), "api", hosts=(LOOPBACK,))
        kept = keys / "api_token"
        if not kept.is_file():
            kept.touch(mode=0o600)
            kept.write_text(f"{TOKEN_ID}={secrets.token_hex(16)}")
        self._secret = kept.read_text().partition("=")[2]
        self._pve.apitokens[TOKEN_ID] = self._secret
        self._pve.port = port
        await self._pve.start(str(keys / "api.crt"), str(keys / "api.key"))

    async def stop(self) -> None:
        """Listen no more."""
        await self._pve.stop()


class _Pve(MappingRoutes, FakePve):  # type: ignore[misc]  # fakepve has no type hints
    """fakepve with this host's node, guests, devices and mappings."""

    def __init__(self, machine: HostMachine) -> None:
        super().__init__(host=LOOPBACK, port=0)
        self.machine = machine
        self.nodes = {machine.state.hostname: {"online": True}}
        self.version = machine.state.pve_version
        self.release_version = self.version.rsplit(".", 1)[0]
        self._files = GuestFiles(self, machine)

    def _build_app(self) -> web.Application:
        app: web.Application = super()._build_app()
        app.middlewares.append(self._coupled)
        # bpg deletes a VM by its path with a slash at the end, which Proxmox takes.
        destroy = self._stateful_handler("/nodes/{node}/qemu/{vmid}", self._qm_destroy)
        for prefix in PREFIXES:
            app.router.add_delete(prefix + "/nodes/{node}/qemu/{vmid}/", destroy)
        return app

    @web.middleware
    async def _coupled(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Take what is on the host before a request, and bring to the host what the request changed."""
        self._files.pull()
        try:
            return await handler(request)
        finally:
            self._files.push()
            self.machine.watch.look()

    def _routes_hardware(self) -> list[tuple[str, str, Callable[[Values, str], Awaitable[object]]]]:
        return [("GET", HARDWARE, self._hardware)]

    async def _hardware(self, values: Values, user: str) -> object:
        del user
        hidden = tuple(str(values.get("pci-class-blacklist", "05;06;0b")).split(";"))
        return [
            {
                "id": f.address,
                "class": f"0x{f.ids.pci_class}",
                "vendor": f"0x{f.ids.vendor}",
                "device": f"0x{f.ids.device}",
                "device_name": f.model.name,
                "subsystem_vendor": f"0x{f.ids.subsystem_vendor}",
                "subsystem_device": f"0x{f.ids.subsystem_device}",
                "iommugroup": f.group,
            }
            for f in self.machine.kernel.functions.values()
            if not f.ids.pci_class.startswith(hidden)
        ]

    # ------------------------------------------------------------ power states

    async def task(
        self, node: str, ttype: str, tid: object, user: str, body: Callable[[], Awaitable[object]], **options: Any
    ) -> object:
        """Start a task, which ends with an error while that fault is on."""
        message = self.machine.faults.api_task

        async def fail() -> None:
            raise TaskError(message)

        return await super().task(node, ttype, tid, user, fail if message else body, **options)

    async def _do_start(self, vm: Any, user: str, p: Values) -> object:
        del p
        return await self.task(vm.node, "qmstart", vm.vmid, user, lambda: self._act(vm, "start"), vm=vm)

    async def _do_stop(self, vm: Any, user: str, p: Values) -> object:
        del p
        return await self.task(vm.node, "qmstop", vm.vmid, user, lambda: self._act(vm, "stop"), vm=vm)

    async def _do_shutdown(self, vm: Any, user: str, p: Values) -> object:
        del p
        self._need_running(vm)
        return await self.task(vm.node, "qmshutdown", vm.vmid, user, lambda: self._act(vm, "stop"), vm=vm)

    async def _do_reboot(self, vm: Any, user: str, p: Values) -> object:
        del p
        self._need_running(vm)
        return await self.task(vm.node, "qmreboot", vm.vmid, user, lambda: self._act(vm, "stop", "start"), vm=vm)

    async def _act(self, vm: Any, *actions: str) -> None:
        vms = self.machine.vms
        self._files.push()
        try:
            for action in actions:
                if action == "start":
                    await vms.start(vm.vmid)
                elif vms.need(vm.vmid).running:
                    vms.stop(vm.vmid)
        except GuestError as error:
            raise TaskError(str(error)) from error
        finally:
            self._files.pull()

    async def _do_reset(self, vm: Any, user: str, p: Values) -> object:
        del user, p
        raise PveError(501, f"simulator: VM {vm.vmid} can be started, stopped and rebooted only")

    _do_suspend = _do_resume = _do_reset
