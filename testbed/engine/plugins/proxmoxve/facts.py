"""The provider's functions that read facts of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from testbed.engine.plugins.proxmoxve.propstring import flag

if TYPE_CHECKING:
    from testbed.engine.plugins._wire import Props
    from testbed.engine.plugins.proxmoxve.connection import Connection


async def get_version(connection: Connection, _: Props) -> Props:
    """`getVersion`: the release of Proxmox VE."""
    data = await connection.api.get("/version")
    return {"id": "version", "release": data["release"], "repositoryId": data["repoid"], "version": data["version"]}


async def get_nodes(connection: Connection, _: Props) -> Props:
    """`getNodesLegacy`: the nodes, one list per property, in the order of their names."""
    nodes: list[dict[str, Any]] = sorted(await connection.api.get("/nodes"), key=lambda node: str(node["node"]))
    return {
        "id": "nodes",
        "names": [node["node"] for node in nodes],
        "onlines": [node.get("status") == "online" for node in nodes],
        "cpuCounts": [node.get("maxcpu", 0) for node in nodes],
        "cpuUtilizations": [node.get("cpu", 0) for node in nodes],
        "memoryAvailables": [node.get("maxmem", 0) for node in nodes],
        "memoryUseds": [node.get("mem", 0) for node in nodes],
        "sslFingerprints": [node.get("ssl_fingerprint", "") for node in nodes],
        "supportLevels": [node.get("level", "") for node in nodes],
        "uptimes": [node.get("uptime", 0) for node in nodes],
    }


async def get_node(connection: Connection, args: Props) -> Props:
    """`getNodeLegacy`: one node's processors, memory (bytes) and uptime (seconds)."""
    name = args["nodeName"]
    data = await connection.api.get(f"/nodes/{name}/status")
    cpu, memory = data["cpuinfo"], data["memory"]
    return {
        "id": name,
        "nodeName": name,
        "cpuCores": cpu["cores"],
        "cpuCount": cpu["cpus"],
        "cpuModel": cpu["model"],
        "cpuSockets": cpu["sockets"],
        "cpuUtilization": data.get("cpu", 0),
        "memoryAvailable": memory["free"],
        "memoryTotal": memory["total"],
        "memoryUsed": memory["used"],
        "uptime": data.get("uptime", 0),
    }


async def get_pci(connection: Connection, args: Props) -> Props:
    """`hardware.getPci`: a node's PCI devices; filters match from the start, case and 0x aside."""
    blacklist = args.get("pciClassBlacklists")
    query = {} if blacklist is None else {"pci-class-blacklist": ";".join(map(str, _items(blacklist)))}
    found = await connection.api.get(f"/nodes/{args['nodeName']}/hardware/pci", **query)
    filters = args.get("filters")
    wanted = filters if isinstance(filters, dict) else {}
    devices = [_device(data) for data in found if _matches(data, wanted)]
    return {**args, "id": args["nodeName"], "devices": list(devices)}


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _matches(data: dict[str, Any], filters: Props) -> bool:
    keys = {"id": "id", "class": "class", "vendorId": "vendor", "deviceId": "device"}
    return all(_hex(data[key]).startswith(_hex(filters[name])) for name, key in keys.items() if filters.get(name))


def _hex(value: object) -> str:
    return str(value).lower().removeprefix("0x")


def _device(data: dict[str, Any]) -> Props:
    return {
        "id": data["id"],
        "class": data["class"],
        "vendor": data["vendor"],
        "vendorName": data.get("vendor_name", ""),
        "device": data["device"],
        "deviceName": data.get("device_name", ""),
        "iommuGroup": data["iommugroup"],
        "mdev": flag(data.get("mdev")),
        "subsystemVendor": data.get("subsystem_vendor", ""),
        "subsystemVendorName": data.get("subsystem_vendor_name", ""),
        "subsystemDevice": data.get("subsystem_device", ""),
        "subsystemDeviceName": data.get("subsystem_device_name", ""),
    }
