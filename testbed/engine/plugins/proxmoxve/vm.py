from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from testbed.engine.plugins._diff import changes
from testbed.engine.plugins._resource import PartialError, ProviderError, Resource
from testbed.engine.plugins._wire import UNKNOWN, reveal_props
from testbed.engine.plugins.proxmoxve import devices, vm_form
from testbed.engine.plugins.proxmoxve.connection import ApiError
from testbed.engine.plugins.proxmoxve.naming import autonamed

if TYPE_CHECKING:
    from testbed.engine.plugins._diff import Change
    from testbed.engine.plugins._resource import Job
    from testbed.engine.plugins._schema import Failure
    from testbed.engine.plugins._wire import Props
    from testbed.engine.plugins.proxmoxve.connection import Connection

_RESIZE_LIMIT_S = 300
_GRACE_S = 30
_COMPUTED = ("ipv4Addresses", "ipv6Addresses", "networkInterfaceNames", "macAddresses")


class VmLegacy(Resource):
    """`VmLegacy`: a QEMU guest with devices passed through by mapping; no clone, no cloud-init, no guest agent."""

    token: ClassVar[str] = "proxmoxve:index/vmLegacy:VmLegacy"  # noqa: S105 - a type token
    # The provider decides on these in code; the schema does not tell.
    replacing: ClassVar[frozenset[str]] = frozenset({"vmId", "nodeName", "efiDisk"})

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def complete(self, job: Job, olds: Props, inputs: Props, seed: bytes) -> Props:
        """A name made of the resource's, if none is given."""
        return autonamed(job, olds, inputs, seed)

    def faults(self, inputs: Props) -> list[Failure]:
        """Refuse what could only be ignored, and what is known to fail later."""
        return list(vm_form.failures(reveal_props(inputs)))

    def diff(self, olds: Props, news: Props) -> dict[str, Change]:
        """The changes, what is not given standing at its default."""
        old, new = reveal_props(olds), reveal_props(news)
        return changes({**vm_form.normal(old, old), **_knobs(old)}, {**vm_form.normal(new, old), **_knobs(new)})

    def preview(self, olds: Props | None, inputs: Props) -> Props:
        """The VM as it will be; addresses are known only afterwards."""
        computed = dict.fromkeys(_COMPUTED, UNKNOWN)
        vm = vm_form.normal(inputs, olds or {"vmId": UNKNOWN, "bootOrders": UNKNOWN})
        return _outputs(vm, inputs) | computed

    async def create(self, job: Job, inputs: Props) -> tuple[str, Props]:  # noqa: ARG002
        """Make the VM and start it, if it is to run; one that does not start stays in the state, as failed."""
        api = self._connection.api
        vm = vm_form.normal(inputs, {})
        vm["vmId"] = vm["vmId"] or int(await api.get("/cluster/nextid"))
        form = vm_form.keys(vm)
        self._check_root(form)
        path = f"/nodes/{vm['nodeName']}/qemu"
        upid = await api.post(path, {"vmid": vm["vmId"], **form, **vm_form.new_drives(vm)})
        await api.finish(upid, _seconds(inputs, "timeoutCreate"))
        identifier = str(vm["vmId"])
        try:
            if vm["started"]:
                await self._power(vm, "start", inputs, "timeoutStartVm")
        except ProviderError as error:
            raise PartialError(str(error), identifier, await self._read_back(vm, inputs)) from error
        return identifier, await self._read_back(vm, inputs)

    async def read(self, job: Job, identifier: str, state: Props, inputs: Props) -> tuple[Props, Props] | None:  # noqa: ARG002
        """The VM as it is, on whichever node it is; None if it is gone."""
        guests: list[dict[str, Any]] = await self._connection.api.get("/cluster/resources", type="vm")
        found = (guest["node"] for guest in guests if guest["type"] == "qemu" and str(guest["vmid"]) == identifier)
        node = next(found, None)
        if node is None:
            return None
        known = state | {"vmId": int(identifier), "nodeName": node}
        outputs = await self._read_back(known, state)
        drifted = {name: outputs.get(name) for name in vm_form.CARRIED if outputs.get(name) != state.get(name)}
        refreshed = inputs | drifted
        return outputs, {name: value for name, value in refreshed.items() if value is not None}

    async def update(self, job: Job, identifier: str, olds: Props, news: Props) -> Props:  # noqa: ARG002
        """Change the configuration, then the power state; a running VM is rebooted if the change needs it."""
        api, path = self._connection.api, f"/nodes/{olds['nodeName']}/qemu/{identifier}"
        old, new = vm_form.normal(olds, olds), vm_form.normal(news, olds)
        before, after = vm_form.keys(old), vm_form.keys(new)
        drives, sizes = _drive_changes(await api.get(f"{path}/config"), old, new)
        form: dict[str, Any] = {key: value for key, value in after.items() if before.get(key) != value} | drives
        gone = sorted(before.keys() - after.keys())
        self._check_root(form)
        for disk, size in sizes.items():
            await api.finish(await api.put(f"{path}/resize", {"disk": disk, "size": f"{size}G"}), _RESIZE_LIMIT_S)
        if form or gone:
            await api.put(f"{path}/config", form | ({"delete": ",".join(gone)} if gone else {}))
        running = (await api.get(f"{path}/status/current"))["status"] == "running"
        if new["started"] != running:
            await self._start_or_shut_down(new, news)
        elif running and _knobs(news)["rebootAfterUpdate"] and not {*form, *gone} <= vm_form.LIVE:
            await self._power(new, "reboot", news, "timeoutReboot")
        return await self._read_back(new, news)

    async def delete(self, job: Job, identifier: str, olds: Props) -> None:  # noqa: ARG002
        """Shut the VM down, or stop it if asked to, and remove it with its disks."""
        api, path = self._connection.api, f"/nodes/{olds['nodeName']}/qemu/{identifier}"
        knobs = _knobs(olds)
        try:
            if (await api.get(f"{path}/status/current"))["status"] == "running":
                if knobs["stopOnDestroy"]:
                    await self._power(olds, "stop", olds, "timeoutStopVm")
                else:
                    await self._power(olds, "shutdown", olds, "timeoutShutdownVm")
            # The trailing slash is the real provider's.
            upid = await api.delete(
                f"{path}/",
                **{
                    "purge": int(bool(knobs["purgeOnDestroy"])),
                    "destroy-unreferenced-disks": int(bool(knobs["deleteUnreferencedDisksOnDestroy"])),
                },
            )
            await api.finish(upid, _seconds(olds, "timeoutStopVm"))
        except ApiError as error:
            if not error.is_missing:
                raise

    async def _start_or_shut_down(self, vm: Props, inputs: Props) -> None:
        if vm["started"]:
            await self._power(vm, "start", inputs, "timeoutStartVm")
        else:
            await self._power(vm, "shutdown", inputs, "timeoutShutdownVm")

    async def _power(self, vm: Props, action: str, inputs: Props, limit: str) -> None:
        seconds = _seconds(inputs, limit)
        form = {"forceStop": 1, "timeout": seconds} if action == "shutdown" else {}
        form |= {"timeout": seconds} if action == "reboot" else {}
        path = f"/nodes/{vm['nodeName']}/qemu/{vm['vmId']}/status/{action}"
        upid = await self._connection.api.post(path, form)
        # Proxmox itself gives up after these seconds, or stops the VM by force, which takes a moment more.
        await self._connection.api.finish(upid, seconds + _GRACE_S)

    async def _read_back(self, vm: Props, inputs: Props) -> Props:
        path = f"/nodes/{vm['nodeName']}/qemu/{vm['vmId']}"
        config = await self._connection.api.get(f"{path}/config")
        status = await self._connection.api.get(f"{path}/status/current")
        return _outputs(vm_form.read(config, running=status["status"] == "running", known=vm), inputs)

    def _check_root(self, form: dict[str, Any]) -> None:
        """Refuse in Proxmox's words what it lets only root@pam itself set; not every stand-in of its API does."""
        found = sorted(vm_form.ROOT_ONLY & form.keys())
        if found and not self._connection.settings.is_root_login:
            raise ApiError(500, f"only root can set '{found[0]}' config")


def _knobs(props: Props) -> Props:
    return {name: default if props.get(name) is None else props[name] for name, default in vm_form.KNOBS.items()}


def _seconds(props: Props, name: str) -> int:
    value = _knobs(props)[name]
    return int(value) if isinstance(value, (int, float)) else 0


def _outputs(vm: Props, inputs: Props) -> Props:
    """The outputs of a normal VM; without a guest agent the guest's addresses stay empty."""
    nets = devices.items(vm["networkDevices"])
    computed: Props = {
        "hotplug": "network,disk,usb",
        "ipv4Addresses": [],
        "ipv6Addresses": [],
        "networkInterfaceNames": [],
        "macAddresses": [net.get("macAddress") for net in nets],
        "vga": {},
    }
    given = {name: inputs[name] for name in vm_form.KNOBS if inputs.get(name) is not None}
    return {name: value for name, value in (vm | computed | given).items() if value is not None}


def _drive_changes(config: dict[str, Any], old: Props, new: Props) -> tuple[dict[str, str], dict[str, int]]:
    """The disk keys to set, and the disks to grow (GiB)."""
    before = {str(item["interface"]): item for item in devices.items(old["disks"])}
    after = {str(item["interface"]): item for item in devices.items(new["disks"])}
    for interface in before.keys() - after.keys():
        raise ProviderError(
            f'deletion of disks not supported. Please delete disk by hand. Old interface was "{interface}"'
        )
    form, sizes = {}, {}
    for interface, disk in after.items():
        current = before.get(interface)
        if current is None:
            form[interface] = devices.new_disk(disk)
            continue
        if current["datastoreId"] != disk["datastoreId"]:
            raise ProviderError(f"this stand-in doesn't move disks: {interface} is on {current['datastoreId']}")
        size, wanted = _number(current["size"]), _number(disk["size"])
        if wanted < size:
            raise ProviderError(f"disk {interface} cannot shrink from {size} to {wanted} GiB")
        if wanted > size:
            sizes[interface] = wanted
        if {**current, "size": None} != {**disk, "size": None}:
            volume, size_text = _volume(str(config[interface]))
            form[interface] = devices.disk(disk, volume, f"{wanted}G" if wanted > size else size_text)
    return form, sizes


def _volume(text: str) -> tuple[str, str | None]:
    parts = text.split(",")
    return parts[0], next((part.removeprefix("size=") for part in parts if part.startswith("size=")), None)


def _number(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) else 0
