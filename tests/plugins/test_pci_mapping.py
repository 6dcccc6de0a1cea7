from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from testbed.engine.plugins._wire import UNKNOWN
from testbed.engine.plugins.proxmoxve.plugin import ProxmoxPlugin
from tests.plugins.driver import Driver, OperationError, driving
from tests.plugins.fake_proxmox import NODE, TOKEN, FakeProxmox, fake_proxmox

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST = {"id": "10de:2bb5", "node": NODE, "path": "0000:81:00.0", "iommuGroup": 40, "subsystemId": "10de:204b"}
SECOND = {"id": "10de:2bb5", "node": NODE, "path": "0000:c1:00.0", "iommuGroup": 41}
INPUTS = {"name": "gpu", "comment": "four cards", "maps": [FIRST, SECOND]}


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Any], None]:
    """Runs a scenario with a configured plugin and an API."""

    def run(scenario: Any) -> None:
        async def main() -> None:
            plugin = driving(ProxmoxPlugin(None), "proxmoxve:hardware/mapping/pci:Pci")
            async with fake_proxmox(tmp_path) as (api, _), plugin as driver:
                await driver.configure({"endpoint": api.url, "insecure": "true", "apiToken": TOKEN})
                await scenario(driver, api)

        asyncio.run(main())

    return run


def test_create_makes_the_mapping_and_a_second_up_changes_nothing(play: Any) -> None:
    """The mapping is stored as Proxmox writes it, and what is read back is as wanted."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs = (await driver.check(INPUTS)).inputs
        identifier, state = await driver.create(inputs)
        assert identifier == "gpu"
        assert api.mappings["gpu"]["map"][1] == "id=10de:2bb5,iommugroup=41,node=pve1,path=0000:c1:00.0"
        assert api.mappings["gpu"]["description"] == "four cards"
        assert state == {**INPUTS, "mediatedDevices": False}
        assert not (await driver.diff(state, inputs)).diffs
        assert await driver.read(identifier, state, inputs) == (identifier, state, inputs)

    play(scenario)


def test_the_order_of_the_entries_does_not_matter(play: Any) -> None:
    """Entries are a set, as in the real provider."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        state = {**INPUTS, "mediatedDevices": False}
        assert not (await driver.diff(state, {**state, "maps": [SECOND, FIRST]})).diffs
        assert (await driver.diff(state, {**state, "maps": [FIRST]})).diffs == ["maps"]

    play(scenario)


def test_update_changes_in_place(play: Any) -> None:
    """Entries and the comment can change, and go."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs = (await driver.check(INPUTS)).inputs
        identifier, state = await driver.create(inputs)
        wanted = (await driver.check({"name": "gpu", "maps": [FIRST]})).inputs
        changed = await driver.diff(state, wanted)
        assert (sorted(changed.diffs), changed.replaces) == (["comment", "maps"], [])
        state = await driver.update(identifier, state, wanted)
        assert len(api.mappings["gpu"]["map"]) == 1
        assert "description" not in api.mappings["gpu"]
        assert not (await driver.diff(state, wanted)).diffs

    play(scenario)


def test_drift_is_read_and_shown(play: Any) -> None:
    """What somebody changed on the host is in the refreshed state, and the next preview wants it back."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs = (await driver.check(INPUTS)).inputs
        identifier, state = await driver.create(inputs)
        api.mappings["gpu"]["map"] = ["id=10de:2bb5,node=pve1,path=0000:02:00.0"]
        _, state, _ = await driver.read(identifier, state, inputs)
        assert state["maps"] == [{"id": "10de:2bb5", "node": NODE, "path": "0000:02:00.0"}]
        assert (await driver.diff(state, inputs)).diffs == ["maps"]

    play(scenario)


def test_a_mapping_that_is_gone_reads_as_gone(play: Any) -> None:
    """Removed out of band, the mapping leaves the state and is made again; deleting it is no error."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs = (await driver.check(INPUTS)).inputs
        identifier, state = await driver.create(inputs)
        api.mappings.clear()
        assert (await driver.read(identifier, state, inputs))[0] == ""
        await driver.delete(identifier, state)
        assert "does not exist any more" in driver.logged("warning")[0]
        await driver.create(inputs)
        await driver.delete(identifier, state)
        assert api.mappings == {}

    play(scenario)


def test_renaming_is_an_update_that_fails(play: Any) -> None:
    """A new name is not a replacement to the provider: it changes a mapping that is not there."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        identifier, state = await driver.create((await driver.check(INPUTS)).inputs)
        renamed = (await driver.check({**INPUTS, "name": "gpus"})).inputs
        changed = await driver.diff(state, renamed)
        assert (changed.diffs, changed.replaces) == (["name"], [])
        with pytest.raises(OperationError, match="mapping 'gpus' not found"):
            await driver.update(identifier, state, renamed)
        assert list(api.mappings) == ["gpu"]

    play(scenario)


def test_a_name_is_made_up_once_and_kept(play: Any) -> None:
    """Without a name, the resource's gets a suffix, which later checks keep."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        inputs = (await driver.check({"maps": [FIRST]})).inputs
        name = str(inputs["name"])
        assert name.startswith("thing-")
        assert (await driver.check({"maps": [FIRST]}, olds={"name": "kept"})).inputs["name"] == "kept"

    play(scenario)


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ({"id": "10DE-2BB5"}, "maps[0].id"),
        ({"path": "81:00.0"}, "maps[0].path"),
        ({"subsystemId": "x"}, "maps[0].subsystemId"),
        ({"node": None}, "maps[0].node"),
        ({"nod": "pve1"}, "maps[0].nod"),
        ({"iommuGroup": "40"}, "maps[0].iommuGroup"),
    ],
)
def test_a_wrong_entry_is_named(play: Any, change: dict[str, Any], at: str) -> None:
    """Ids, addresses and types are checked before anything is asked of the API."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        checked = await driver.check({"name": "gpu", "maps": [{**FIRST, **change}]})
        assert list(checked.failures) == [at]

    play(scenario)


def test_entries_that_are_not_known_yet_pass_the_check(play: Any) -> None:
    """A preview may have unknown values anywhere."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        checked = await driver.check({"name": UNKNOWN, "maps": [{**FIRST, "path": UNKNOWN}]})
        assert checked.failures == {}
        assert (await driver.create(checked.inputs, preview=True))[1]["name"] == UNKNOWN
        assert (await driver.check({"name": "gpu", "maps": []})).failures == {"maps": "must have at least one entry"}

    play(scenario)


def test_an_existing_mapping_can_be_looked_up(play: Any) -> None:
    """The function returns it with empty values where Proxmox has none, and fails for one that is missing."""

    async def scenario(driver: Driver, api: FakeProxmox) -> None:
        await driver.create((await driver.check({"name": "gpu", "maps": [SECOND]})).inputs)
        found = await driver.invoke("proxmoxve:hardware/mapping/getPci:getPci", {"name": "gpu"})
        assert found["maps"] == [{**SECOND, "comment": "", "subsystemId": ""}]
        assert (found["comment"], found["mediatedDevices"]) == ("", False)
        with pytest.raises(OperationError, match="mapping 'other' not found"):
            await driver.invoke("proxmoxve:hardware/mapping/getPci:getPci", {"name": "other"})

    play(scenario)
