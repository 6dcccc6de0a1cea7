from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from testbed.engine.plugins._diff import Change, changes
from testbed.engine.plugins._resource import Resource
from testbed.engine.plugins._schema import Failure
from testbed.engine.plugins._wire import is_unknown, reveal_props
from testbed.engine.plugins.proxmoxve.connection import ApiError
from testbed.engine.plugins.proxmoxve.naming import autonamed
from testbed.engine.plugins.proxmoxve.propstring import flag, join, split

if TYPE_CHECKING:
    from testbed.engine.plugins._resource import Job
    from testbed.engine.plugins._wire import Props, Value
    from testbed.engine.plugins.proxmoxve.connection import Connection

_PATH = "/cluster/mapping/pci"
_DEVICE_ID = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{4}")
_ADDRESS = r"[a-f0-9]{4,}:[a-f0-9]{2}:[a-f0-9]{2}(\.[a-f0-9])?"
_ADDRESSES = re.compile(rf"{_ADDRESS}(;{_ADDRESS})*")

# Property of a map entry: its key in the API's property string.
_KEYS = {
    "comment": "description",
    "id": "id",
    "iommuGroup": "iommugroup",
    "node": "node",
    "path": "path",
    "subsystemId": "subsystem-id",
}


class PciMapping(Resource):
    """`hardware.mapping.Pci`: a name for PCI devices, which guests refer to."""

    token: ClassVar[str] = "proxmoxve:hardware/mapping/pci:Pci"  # noqa: S105 - a type token

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def complete(self, job: Job, olds: Props, inputs: Props, seed: bytes) -> Props:
        """A name made of the resource's, if none is given."""
        return autonamed(job, olds, {"mediatedDevices": False, **inputs}, seed)

    def faults(self, inputs: Props) -> list[Failure]:
        """Device ids and addresses that the real provider would refuse."""
        bare = reveal_props(inputs)
        found = [] if bare["maps"] else [Failure("maps", "must have at least one entry")]
        for index, entry in enumerate(_entries(bare)):
            for name, pattern, example in (
                ("id", _DEVICE_ID, "10de:2bb5"),
                ("subsystemId", _DEVICE_ID, "10de:204b"),
                ("path", _ADDRESSES, "0000:81:00.0"),
            ):
                value = entry.get(name)
                if isinstance(value, str) and not is_unknown(value) and not pattern.fullmatch(value):
                    found.append(Failure(f"maps[{index}].{name}", f"must look like {example}, not '{value}'"))
        return found

    def diff(self, olds: Props, news: Props) -> dict[str, Change]:
        """The changes, entries compared as a set; another name is a change in place, which then fails."""
        old, new = _normal(reveal_props(olds)), _normal(reveal_props(news))
        found = changes({**old, "maps": None}, {**new, "maps": None})
        return found if old["maps"] == new["maps"] else {**found, "maps": Change.UPDATE}

    def preview(self, olds: Props | None, inputs: Props) -> Props:  # noqa: ARG002 - nothing is computed
        """The inputs."""
        return inputs

    async def create(self, job: Job, inputs: Props) -> tuple[str, Props]:  # noqa: ARG002
        """Make the mapping and read it back."""
        name = str(inputs["name"])
        await self._connection.api.post(
            _PATH, {"id": name, "mdev": int(bool(inputs["mediatedDevices"])), **_form(inputs)}
        )
        return name, _outputs(name, await self._connection.api.get(f"{_PATH}/{name}"))

    async def read(self, job: Job, identifier: str, state: Props, inputs: Props) -> tuple[Props, Props] | None:  # noqa: ARG002
        """The mapping as it is; None if somebody removed it."""
        try:
            outputs = _outputs(identifier, await self._connection.api.get(f"{_PATH}/{identifier}"))
        except ApiError as error:
            if error.is_missing:
                return None
            raise
        return outputs, dict(outputs)

    async def update(self, job: Job, identifier: str, olds: Props, news: Props) -> Props:  # noqa: ARG002
        """Change the mapping of the new name, as the real provider does: a renamed one is not found."""
        name = str(news["name"])
        gone = ["description"] if olds.get("comment") and not news.get("comment") else []
        form = _form(news) | ({"mdev": 1} if news.get("mediatedDevices") else {})
        gone += [] if "mdev" in form else ["mdev"]
        await self._connection.api.put(f"{_PATH}/{name}", form | ({"delete": ",".join(gone)} if gone else {}))
        return _outputs(name, await self._connection.api.get(f"{_PATH}/{name}"))

    async def delete(self, job: Job, identifier: str, olds: Props) -> None:  # noqa: ARG002
        """Remove the mapping; one that is gone already is a warning."""
        try:
            await self._connection.api.delete(f"{_PATH}/{identifier}")
        except ApiError as error:
            if not error.is_missing:
                raise
            await job.warn(f"PCI hardware mapping '{identifier}' does not exist any more")


def _entries(props: Props) -> list[Props]:
    maps = props.get("maps")
    return [entry for entry in maps if isinstance(entry, dict)] if isinstance(maps, list) else []


def _normal(props: Props) -> Props:
    """The mapping without absent values, its entries in one order."""
    entries: list[Value] = [_present(entry) for entry in sorted(_entries(props), key=_place)]
    return {
        "name": props.get("name"),
        "comment": props.get("comment") or None,
        "mediatedDevices": bool(props.get("mediatedDevices")),
        "maps": entries,
    }


def _present(entry: Props) -> Props:
    return {name: value for name, value in entry.items() if value is not None}


def _place(entry: Props) -> tuple[str, str]:
    return str(entry.get("node")), str(entry.get("path"))


def _form(inputs: Props) -> dict[str, Any]:
    entries = [join(None, {_KEYS[key]: entry.get(key) for key in sorted(_KEYS)}) for entry in _entries(inputs)]
    comment = inputs.get("comment")
    return {"map": entries} | ({"description": comment} if comment else {})


def _outputs(name: str, data: dict[str, Any]) -> Props:
    maps: list[Value] = [_entry(text) for text in data["map"]]
    outputs: Props = {"name": name, "maps": maps, "mediatedDevices": flag(data.get("mdev"))}
    return outputs | ({"comment": data["description"]} if data.get("description") else {})


def _entry(text: str) -> Props:
    found = split(text)
    entry: Props = {name: found[key] for name, key in _KEYS.items() if key in found}
    return entry | ({"iommuGroup": int(found["iommugroup"])} if "iommugroup" in found else {})


async def read_mapping(connection: Connection, args: Props) -> Props:
    """The function `hardware.mapping.getPci`: an existing mapping by name; absent values are empty."""
    name = str(args["name"])
    outputs = _outputs(name, await connection.api.get(f"{_PATH}/{name}"))
    blank: Props = {"comment": "", "iommuGroup": 0, "subsystemId": ""}
    return {"comment": "", "id": name, **outputs, "maps": [blank | entry for entry in _entries(outputs)]}
