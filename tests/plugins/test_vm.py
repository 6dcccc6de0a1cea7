from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
import pytest
from pulumi.runtime.proto import provider_pb2, status_pb2

from testbed.engine.plugins._wire import UNKNOWN, decode, encode
from testbed.engine.plugins.proxmoxve.plugin import ProxmoxPlugin
from tests.plugins.driver import Driver, OperationError, driving
from tests.plugins.fake_proxmox import NODE, PASSWORD, TOKEN, FakeProxmox, fake_proxmox

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INPUTS: dict[str, Any] = {
    "name": "confidential",
    "nodeName": NODE,
    "vmId": 200,
    "bios": "ovmf",
    "machine": "q35",
    "cpu": {"type": "host", "cores": 64, "numa": True},
    "memory": {"dedicated": 65536, "hugepages": "1024"},
    "numas": [{"device": "numa0", "cpus": "0-63", "hostnodes": "1", "memory": 65536, "policy": "bind"}],
    "disks": [{"interface": "scsi0", "datastoreId": "local-lvm", "size": 16, "iothread": True}],
    "efiDisk": {"datastoreId": "local-lvm", "type": "4m"},
    "networkDevices": [{"bridge": "vmbr0", "vlanId": 7}],
    "hostpcis": [{"device": f"hostpci{index}", "mapping": "gpu", "pcie": True} for index in range(4)],
    "operatingSystem": {"type": "l26"},
    "tags": ["gpu", "confidential"],
    "description": "managed",
    "stopOnDestroy": True,
}


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Runs a scenario with a configured plugin and an API."""

    def run(scenario: Any, **credentials: str) -> None:
        async def main() -> None:
            plugin = driving(ProxmoxPlugin(None), "proxmoxve:index/vmLegacy:VmLegacy")
            async with fake_proxmox(tmp_path) as (api, _), plugin as driver:
                config = {"endpoint": api.url, "insecure": "true"}
                await driver.configure({**config, **(credentials or {"apiToken": TOKEN})})
                await scenario(driver, api)

        asyncio.run(main())

    return run


async def _made(driver: Driver, **changes: Any) -> tuple[Any, Any]:
    inputs = (await driver.check({**INPUTS, **changes})).inputs
    _, state = await driver.create(inputs)
    return inputs, state


def test_create_makes_and_starts_the_vm(play: Any) -> None:
    """Everything carried is in the VM's configuration, and the VM runs."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        _, state = await _made(driver)
        vm = api.vm(200)
        assert vm.status == "running"
        config = {key: str(value) for key, value in vm.config.items()}
        assert (
            config.items()
            >= {
                "name": "confidential",
                "bios": "ovmf",
                "machine": "q35",
                "cores": "64",
                "cpu": "cputype=host",
                "numa": "1",
                "numa0": "cpus=0-63,hostnodes=1,memory=65536,policy=bind",
                "memory": "65536",
                "balloon": "0",
                "hugepages": "1024",
                "scsi0": "local-lvm:vm-200-disk-1,iothread=1,size=16G",
                "onboot": "1",
                "ostype": "l26",
                "tags": "confidential;gpu",
                "description": "managed",
                "hostpci3": "mapping=gpu,pcie=1,rombar=0,x-vga=0",
            }.items()
        )
        assert config["efidisk0"].startswith("local-lvm:vm-200-disk-0,efitype=4m")
        assert config["net0"].endswith(",bridge=vmbr0,tag=7")
        assert state["macAddresses"] == [config["net0"].split("=")[1].split(",")[0]]

    play(scenario)


def test_a_second_up_and_a_refresh_change_nothing(play: Any) -> None:
    """What is read back is as wanted, with nothing left for the next preview."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver)
        assert not (await driver.diff(state, inputs)).diffs
        assert await driver.read("200", state, inputs) == ("200", state, inputs)

    play(scenario)


def test_an_omitted_rombar_is_sent_as_zero(play: Any) -> None:
    """The real provider's fault: Proxmox's default is 1, and leaving rombar out does not give it."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        hostpcis = [{"device": "hostpci0", "mapping": "gpu", "rombar": True}, {"device": "hostpci1", "mapping": "gpu"}]
        await _made(driver, hostpcis=hostpcis)
        assert [api.vm(200).config[f"hostpci{index}"].split(",")[2] for index in (0, 1)] == ["rombar=1", "rombar=0"]

    play(scenario)


def test_fewer_devices_leave_the_vm_and_it_is_rebooted(play: Any) -> None:
    """Shrinking hostpcis removes the dropped ones, and a running VM is rebooted to make it true."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver)
        wanted = {**inputs, "hostpcis": inputs["hostpcis"][:2]}
        changed = await driver.diff(state, wanted)
        assert (changed.diffs, changed.replaces) == (["hostpcis"], [])
        state = await driver.update("200", state, wanted)
        assert sorted(key for key in api.vm(200).config if key.startswith("hostpci")) == ["hostpci0", "hostpci1"]
        assert any(path.endswith("/status/reboot") for _, path, _ in api.requests)
        assert not (await driver.diff(state, wanted)).diffs

    play(scenario)


def test_without_rebooting_a_change_stays_pending(play: Any) -> None:
    """With rebootAfterUpdate off, a running VM keeps its devices until somebody restarts it."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver, rebootAfterUpdate=False)
        await driver.update("200", state, {**inputs, "memory": {"dedicated": 1024}})
        assert str(api.vm(200).pending["memory"]) == "1024"
        assert not any(path.endswith("/status/reboot") for _, path, _ in api.requests)

    play(scenario)


def test_a_change_that_a_running_vm_takes_needs_no_reboot(play: Any) -> None:
    """Tags, the description and the like are changed live."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver)
        await driver.update("200", state, {**inputs, "tags": ["gpu"], "description": "still managed", "onBoot": False})
        assert (api.vm(200).config["tags"], api.vm(200).config["description"]) == ("gpu", "still managed")
        assert "onboot" not in api.vm(200).config
        assert not any(path.endswith("/status/reboot") for _, path, _ in api.requests)

    play(scenario)


def test_started_follows_the_program(play: Any) -> None:
    """A VM is shut down and started as `started` says."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver, started=False)
        assert api.vm(200).status == "stopped"
        state = await driver.update("200", state, {**inputs, "started": True})
        assert api.vm(200).status == "running"
        await driver.update("200", state, {**inputs, "started": False})
        assert api.vm(200).status == "stopped"

    play(scenario)


def test_a_stopped_vm_and_a_foreign_device_are_drift(play: Any) -> None:
    """Refresh finds what somebody did, and the next preview wants it undone."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver)
        api.vm(200).status = "stopped"
        api.vm(200).config["hostpci1"] = "host=0000:c1:00.0"
        _, state, refreshed = await driver.read("200", state, inputs)
        assert state["started"] is False
        assert refreshed["started"] is False
        assert sorted((await driver.diff(state, inputs)).diffs) == ["hostpcis", "started"]
        state = await driver.update("200", state, inputs)
        assert api.vm(200).status == "running"
        assert api.vm(200).config["hostpci1"] == "mapping=gpu,pcie=1,rombar=0,x-vga=0"

    play(scenario)


def test_a_vm_that_is_gone_reads_as_gone_and_deletes_quietly(play: Any) -> None:
    """Removed out of band, the VM leaves the state."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver)
        api.vms.clear()
        assert (await driver.read("200", state, inputs))[0] == ""
        await driver.delete("200", state)

    play(scenario)


def test_delete_stops_and_removes_the_vm_with_its_disks(play: Any) -> None:
    """A running VM is stopped first; purge and unreferenced disks are asked for by default."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        _, state = await _made(driver)
        await driver.delete("200", state)
        assert api.vms == []
        assert api.queries == [{"node": NODE, "vmid": "200", "purge": "1", "destroy-unreferenced-disks": "1"}]
        assert any(path.endswith("/status/stop") for _, path, _ in api.requests)

    play(scenario)


def test_disks_grow_and_change_but_never_shrink_or_go(play: Any) -> None:
    """A larger size resizes, another option is written, and what would lose data is refused."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver)
        disk = inputs["disks"][0]
        wanted = {**inputs, "disks": [{**disk, "size": 32, "ssd": True}]}
        state = await driver.update("200", state, wanted)
        assert api.vm(200).config["scsi0"] == "local-lvm:vm-200-disk-1,iothread=1,size=32G,ssd=1"
        assert not (await driver.diff(state, wanted)).diffs
        for disks, reason in (
            ([{**disk, "size": 8}], "cannot shrink"),
            ([{**disk, "interface": "scsi1"}], "deletion of disks not supported"),
            ([{**disk, "datastoreId": "other", "size": 32}], "doesn't move disks"),
        ):
            with pytest.raises(OperationError, match=reason):
                await driver.update("200", state, {**wanted, "disks": disks})

    play(scenario)


def test_another_disk_is_asked_for(play: Any) -> None:
    """A disk that is new in the program is allocated by Proxmox's own notation."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver, started=False)
        disks = [*inputs["disks"], {"interface": "scsi1", "datastoreId": "local-lvm", "size": 4, "ssd": True}]
        await driver.update("200", state, {**inputs, "disks": disks})
        # fakepve keeps what it was asked for; Proxmox would put the new volume there.
        assert api.vm(200).config["scsi1"] == "local-lvm:4,ssd=1"

    play(scenario)


@pytest.mark.parametrize(
    ("change", "replaced"),
    [
        ({"amdSev": {"type": "snp"}}, ["amdSev"]),
        ({"efiDisk": {"datastoreId": "local-lvm", "type": "2m"}}, ["efiDisk"]),
        ({"vmId": 201}, ["vmId"]),
        ({"nodeName": "pve2"}, ["nodeName"]),
        ({"cpu": {"type": "host", "cores": 8, "numa": True}}, []),
        ({"name": "other"}, []),
        ({"timeoutStartVm": 60}, []),
    ],
)
def test_what_replaces_the_vm(play: Any, change: dict[str, Any], replaced: list[str]) -> None:
    """Encryption, EFI disk, id and node replace it; anything else changes it."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver)
        changed = await driver.diff(state, {**inputs, **change})
        assert changed.diffs == [next(iter(change))]
        assert changed.replaces == replaced

    play(scenario)


@pytest.mark.parametrize(
    ("change", "key"),
    [({"amdSev": {"type": "snp", "noDebug": True}}, "amd-sev"), ({"kvmArguments": "-fw_cfg name=x,string=1"}, "args")],
)
def test_only_root_sets_encryption_and_arguments(play: Any, change: dict[str, Any], key: str) -> None:
    """An API token is refused in Proxmox's words; root@pam's password is not."""

    async def refused(driver: Driver, api: FakeProxmox) -> None:
        with pytest.raises(OperationError, match=f"only root can set '{key}' config"):
            await _made(driver, **change)
        assert api.vms == []

    async def accepted(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver, **change)
        assert api.vm(200).config[key] in {"type=snp,no-debug=1", "-fw_cfg name=x,string=1"}
        assert not (await driver.diff(state, inputs)).diffs

    play(refused)
    play(accepted, username="root@pam", password=PASSWORD)


def test_a_vm_that_does_not_start_stays_in_the_state(play: Any) -> None:
    """The failure tells the engine of the VM that exists all the same, so that the next up does not make another."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        api.fail("POST", "/status/start", 500, "PCI device mapping invalid")
        inputs = (await driver.check(INPUTS)).inputs
        request = provider_pb2.CreateRequest(urn=driver.urn, properties=encode(inputs))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await driver.stub.Create(request)
        assert "PCI device mapping invalid" in caught.value.details()
        details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
        status = status_pb2.Status.FromString(details)
        failed = provider_pb2.ErrorResourceInitFailed()
        assert status.details[0].Unpack(failed)
        assert failed.id == "200"
        assert decode(failed.properties)["started"] is False
        assert "PCI device mapping invalid" in failed.reasons[0]

    play(scenario)


def test_a_failed_task_is_an_error_with_its_ending(play: Any) -> None:
    """A task that ends with anything but OK fails the operation, and says why."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        api.storages["local-lvm"]["active"] = 0
        with pytest.raises(OperationError, match=r"failed to complete with exit code: .*not online"):
            await _made(driver)

    play(scenario)


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ({"clone": {"vmId": 100}}, "clone"),
        ({"agent": {"enabled": True}}, "agent"),
        ({"initialization": {"type": "nocloud"}}, "initialization"),
        ({"cpu": {"cores": 2, "architecture": "aarch64"}}, "cpu.architecture"),
        ({"disks": [{"interface": "scsi0", "fileId": "local:iso/x.img"}]}, "disks[0].fileId"),
        ({"hostpcis": [{"device": "hostpci0", "id": "0000:81:00.0", "mapping": "gpu"}]}, "hostpcis[0].id"),
        ({"hostpcis": [{"device": "hostpci1", "mapping": "gpu"}]}, "hostpcis[0].device"),
        ({"hostpcis": [{"device": "hostpci0"}]}, "hostpcis[0].mapping"),
        ({"disks": []}, "disks"),
        ({"disks": None}, "disks"),
        ({"hostpci": []}, "hostpci"),
        ({"memory": {"dedicated": "64 GiB"}}, "memory.dedicated"),
        ({"onBoot": "yes"}, "onBoot"),
        ({"nodeName": None}, "nodeName"),
        ({"hostpcis": [{"device": f"hostpci{index}", "mapping": "gpu"} for index in range(17)]}, "hostpcis"),
    ],
)
def test_what_is_not_carried_is_refused_by_name(play: Any, change: dict[str, Any], at: str) -> None:
    """Nothing is ignored silently: a setting that would not reach the API fails the check."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        assert list((await driver.check({**INPUTS, **change})).failures) == [at]

    play(scenario)


def test_unknown_values_pass_check_diff_and_preview(play: Any) -> None:
    """A preview works with values that only the deployment will know."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        unknown = {"hostpcis": [{"device": "hostpci0", "mapping": UNKNOWN}], "tags": UNKNOWN, "memory": UNKNOWN}
        checked = await driver.check({**INPUTS, **unknown, "vmId": UNKNOWN})
        assert checked.failures == {}
        _, outputs = await driver.create(checked.inputs, preview=True)
        assert (outputs["vmId"], outputs["memory"], outputs["macAddresses"]) == (UNKNOWN, UNKNOWN, UNKNOWN)
        inputs, state = await _made(driver)
        changed = await driver.diff(state, {**inputs, "memory": UNKNOWN})
        assert changed.diffs == ["memory"]
        assert (await driver.update("200", state, {**inputs, **unknown}, preview=True))["tags"] == UNKNOWN
        assert api.vm(200).config["tags"] == "confidential;gpu"

    play(scenario)


def test_an_id_is_taken_from_the_cluster_if_none_is_given(play: Any) -> None:
    """Without vmId, the next free one is used and kept."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs, state = await _made(driver, vmId=None)
        assert api.vm(state["vmId"]) is not None
        assert not (await driver.diff(state, inputs)).diffs

    play(scenario)
