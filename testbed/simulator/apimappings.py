"""The API's PCI mappings, kept in /etc/pve/mapping/pci.cfg of the simulated host."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from fakepve import PveError  # type: ignore[import-untyped]

from testbed.simulator.pveconf import GuestError, Mapping, format_mappings, join_properties, properties
from testbed.simulator.vms import MAPPINGS, check_device

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from testbed.simulator.machine import HostMachine

PCI = "/cluster/mapping/pci"
OPTIONS = ("description", "live-migration-capable", "mdev")

Values = dict[str, Any]


class MappingRoutes:
    """Mixin of the API: create, read, change and delete PCI mappings."""

    machine: HostMachine

    def _routes_mapping(self) -> list[tuple[str, str, Callable[[Values, str], Awaitable[object]]]]:
        one = PCI + "/{id}"
        return [
            ("GET", PCI, self._mapping_list),
            ("POST", PCI, self._mapping_create),
            ("GET", one, self._mapping_get),
            ("PUT", one, self._mapping_change),
            ("DELETE", one, self._mapping_delete),
        ]

    async def _mapping_list(self, values: Values, user: str) -> object:
        del user
        vms = self.machine.vms
        checked = values.get("check-node")
        found = []
        for name, mapping in vms.mappings().items():
            item: dict[str, object] = {"id": name, "map": _entries(mapping), **mapping.options}
            if checked:
                item["checks"] = self._checks(mapping)
            found.append(item)
        return found

    async def _mapping_get(self, values: Values, user: str) -> object:
        del user
        mapping = self.machine.vms.mappings().get(values["id"])
        if mapping is None:
            raise PveError(500, f"mapping '{values['id']}' not found")
        return {"map": _entries(mapping), **mapping.options, "digest": self._digest()}

    async def _mapping_create(self, values: Values, user: str) -> object:
        del user
        mappings = self.machine.vms.mappings()
        name = values["id"]
        if name in mappings:
            raise PveError(500, f"pci ID '{name}' already defined")
        options = {key: str(values[key]) for key in OPTIONS if values.get(key) is not None}
        self._write(mappings | {name: Mapping(name, _parse(values["map"]), options)})
        return None

    async def _mapping_change(self, values: Values, user: str) -> object:
        del user
        mappings = self.machine.vms.mappings()
        name = values["id"]
        if name not in mappings:
            raise PveError(500, f"no such resource '{name}'")
        if values.get("digest") not in (None, self._digest()):
            raise PveError(500, "detected modified configuration - file changed by other user? Try again.")
        gone = set(str(values.get("delete") or "").replace(";", ",").split(","))
        old = mappings[name]
        options = {k: v for k, v in old.options.items() if k not in gone}
        options |= {key: str(values[key]) for key in OPTIONS if values.get(key) is not None}
        entries = _parse(values["map"]) if values.get("map") is not None else old.entries
        self._write(mappings | {name: Mapping(name, entries, options)})
        return None

    async def _mapping_delete(self, values: Values, user: str) -> object:
        del user
        mappings = self.machine.vms.mappings()
        mappings.pop(values["id"], None)
        self._write(mappings)
        return None

    def _write(self, mappings: dict[str, Mapping]) -> None:
        if self.machine.faults.api_task:
            raise PveError(500, self.machine.faults.api_task)
        try:
            self.machine.tree.save(MAPPINGS, format_mappings(mappings))
        except OSError as error:
            raise PveError(500, f"write to {MAPPINGS} failed: {error.strerror}") from error

    def _digest(self) -> str:
        text = self.machine.tree.read(MAPPINGS) or ""
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def _checks(self, mapping: Mapping) -> list[dict[str, str]]:
        problems = []
        for entry in mapping.entries:
            try:
                check_device(mapping.name, entry, self.machine.kernel.functions)
            except GuestError as error:
                problems.append({"severity": "error", "message": str(error)})
        return problems


def _entries(mapping: Mapping) -> list[str]:
    return [join_properties(entry) for entry in mapping.entries]


def _parse(entries: object) -> tuple[dict[str, str], ...]:
    texts = entries if isinstance(entries, list) else [entries]
    return tuple(properties(str(text)) for text in texts)
