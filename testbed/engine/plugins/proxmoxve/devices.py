"""The devices of a VM, each one key whose value is a property string: as inputs, as keys, and back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from testbed.engine.plugins._wire import is_unknown
from testbed.engine.plugins.proxmoxve.propstring import flag, join, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from testbed.engine.plugins._wire import Props, Value

DISK_KEY = re.compile(r"(ide|sata|scsi|virtio)\d+")
_NET_MODELS = ("virtio", "e1000", "e1000e", "rtl8139", "vmxnet3")
_GIB = {"K": 1 / 1024**2, "M": 1 / 1024, "G": 1, "T": 1024}

# An omitted rombar is sent as 0, although Proxmox's own default is 1: a fault of the real provider.
HOSTPCI: Props = {"pcie": False, "rombar": False, "xvga": False}
NETWORK: Props = {"bridge": "vmbr0", "disconnected": False, "firewall": False, "model": "virtio"}
NETWORK |= {"mtu": 0, "queues": 0, "rateLimit": 0, "vlanId": 0}
DISK: Props = {"aio": "io_uring", "backup": True, "cache": "none", "datastoreId": "local-lvm", "discard": "ignore"}
DISK |= {"iothread": False, "replicate": True, "size": 8, "ssd": False}
EFI_DISK: Props = {"datastoreId": "local-lvm", "preEnrolledKeys": False, "type": "2m"}
AMD_SEV: Props = {"allowSmt": True, "kernelHashes": False, "noDebug": False, "noKeySharing": False, "type": "std"}

_SEV_KEYS = {
    "allowSmt": "allow-smt",
    "kernelHashes": "kernel-hashes",
    "noDebug": "no-debug",
    "noKeySharing": "no-key-sharing",
}


def items(value: Value) -> list[Props]:
    """The objects of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def with_defaults(value: Value, default: Props) -> Value:
    """A list of objects, each with what it lacks; an unknown list stays unknown."""
    return value if is_unknown(value) else [default | _present(item) for item in items(value)]


def _present(item: Props) -> Props:
    return {name: value for name, value in item.items() if value is not None}


def _given(value: Value, default: Value) -> Value:
    """The value, None if it is the default and need not be written."""
    return None if value == default else value


def hostpci(device: Props) -> str:
    """A passed-through device, by its mapping's name; by its address only if it was found so."""
    options = {"pcie": device["pcie"], "rombar": device["rombar"], "x-vga": device["xvga"]}
    return join(None, {"mapping": device.get("mapping"), "host": device.get("id"), **options})


def read_hostpci(key: str, text: str) -> Props:
    """The device of a `hostpciN` key."""
    found = split(text, "host")
    device: Props = {
        "device": key,
        "pcie": flag(found.get("pcie")),
        "rombar": flag(found.get("rombar"), default=True),
        "xvga": flag(found.get("x-vga")),
    }
    return device | {
        name: found[option] for name, option in {"mapping": "mapping", "id": "host"}.items() if option in found
    }


def network(device: Props) -> str:
    """A network device; without an address of its own, Proxmox chooses one."""
    return join(
        None,
        {
            "model": device["model"],
            "macaddr": device.get("macAddress") or None,
            "bridge": device["bridge"],
            "firewall": _given(device["firewall"], default=False),
            "link_down": _given(device["disconnected"], default=False),
            "mtu": device["mtu"] or None,
            "queues": device["queues"] or None,
            "rate": device["rateLimit"] or None,
            "tag": device["vlanId"] or None,
        },
    )


def read_network(_: str, text: str) -> Props:
    """The device of a `netN` key."""
    found = split(text)
    model = next((name for name in found if name in _NET_MODELS), found.get("model", "virtio"))
    return {
        "model": model,
        "macAddress": found.get(model) or found.get("macaddr", ""),
        "bridge": found.get("bridge", ""),
        "firewall": flag(found.get("firewall")),
        "disconnected": flag(found.get("link_down")),
        "mtu": int(found.get("mtu", 0)),
        "queues": int(found.get("queues", 0)),
        "rateLimit": float(found.get("rate", 0)),
        "vlanId": int(found.get("tag", 0)),
    }


def numa(node: Props) -> str:
    """A NUMA node of the guest."""
    names = {"cpus": "cpus", "hostnodes": "hostnodes", "memory": "memory", "policy": "policy"}
    return join(None, {key: node.get(name) for name, key in names.items()})


def read_numa(key: str, text: str) -> Props:
    """The node of a `numaN` key."""
    found = split(text)
    node: Props = {"device": key, "cpus": found.get("cpus", ""), "memory": int(found.get("memory", 0))}
    return node | {name: found[name] for name in ("hostnodes", "policy") if name in found}


def disk(device: Props, volume: str, size: str | None = None) -> str:
    """A disk on a volume; options that are Proxmox's defaults are not written."""
    return join(
        volume,
        {
            "aio": _given(device["aio"], "io_uring"),
            "backup": _given(device["backup"], default=True),
            "cache": _given(device["cache"], "none"),
            "discard": _given(device["discard"], "ignore"),
            "iothread": _given(device["iothread"], default=False),
            "replicate": _given(device["replicate"], default=True),
            "size": size,
            "ssd": _given(device["ssd"], default=False),
        },
    )


def new_disk(device: Props) -> str:
    """A disk to be made: `datastore:GiB` asks for a new volume."""
    written = disk(device, f"{device['datastoreId']}:{device['size']}")
    return f"{written},format={device['fileFormat']}" if device.get("fileFormat") else written


def read_disk(key: str, text: str) -> Props:
    """The disk of a key such as `scsi0`; its size in GiB."""
    found = split(text, "volume")
    datastore, _, path = found["volume"].partition(":")
    return {
        "interface": key,
        "datastoreId": datastore,
        "pathInDatastore": path,
        "size": gib(found.get("size", "0G")),
        "aio": found.get("aio", "io_uring"),
        "backup": flag(found.get("backup"), default=True),
        "cache": found.get("cache", "none"),
        "discard": found.get("discard", "ignore"),
        "iothread": flag(found.get("iothread")),
        "replicate": flag(found.get("replicate"), default=True),
        "ssd": flag(found.get("ssd")),
    }


def gib(size: str) -> int:
    """A size such as 512M or 8G in whole GiB, rounded down."""
    return int(float(size[:-1]) * _GIB[size[-1]]) if size[-1] in _GIB else int(int(size) / 1024**3)


def efi_disk(device: Props) -> str:
    """The disk of the EFI variables, to be made; Proxmox ignores the size it is asked for."""
    options = {
        "efitype": device["type"],
        "format": device.get("fileFormat"),
        "pre-enrolled-keys": device["preEnrolledKeys"],
    }
    return join(f"{device['datastoreId']}:1", options)


def read_efi_disk(text: str) -> Props:
    """The disk of the `efidisk0` key."""
    found = split(text, "volume")
    return {
        "datastoreId": found["volume"].partition(":")[0],
        "type": found.get("efitype", "2m"),
        "preEnrolledKeys": flag(found.get("pre-enrolled-keys")),
    }


def amd_sev(device: Props) -> str:
    """The memory encryption of the guest."""
    written = {key: _given(device[name], AMD_SEV[name]) for name, key in _SEV_KEYS.items()}
    return join(None, {"type": device["type"], **written})


def read_amd_sev(text: str) -> Props:
    """The value of the `amd-sev` key."""
    found = split(text, "type")
    flags: Props = {name: flag(found.get(key), default=AMD_SEV[name] is True) for name, key in _SEV_KEYS.items()}
    return {"type": found.get("type", "std"), **flags}


def cpu_model(cpu: Props) -> str:
    """The CPU model with its flags."""
    flags = cpu["flags"]
    return join(
        None,
        {"cputype": cpu["type"], "flags": ";".join(map(str, flags)) if isinstance(flags, list) and flags else None},
    )


def read_cpu_model(text: str) -> Props:
    """The value of the `cpu` key."""
    found = split(text, "cputype")
    return {
        "type": found.get("cputype", "kvm64"),
        "flags": [name for name in found.get("flags", "").split(";") if name],
    }


def numbered(prefix: str, config: Mapping[str, Any], read: Callable[[str, str], Props]) -> list[Value]:
    """The devices of all keys with this prefix and a number, in the order of the numbers."""
    return [read(key, str(config[key])) for _, key in sorted(_numbers(prefix, config))]


def _numbers(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for key in config:
        number = key.removeprefix(prefix)
        if key.startswith(prefix) and number.isdecimal():
            yield int(number), key
