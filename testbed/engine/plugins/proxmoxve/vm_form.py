"""A VM as the program describes it, as Proxmox stores it, and what the two have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from testbed.engine.plugins._schema import Failure
from testbed.engine.plugins._wire import is_unknown
from testbed.engine.plugins.proxmoxve import devices, fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from testbed.engine.plugins._wire import Props, Value

# Inputs that say how to operate, with their defaults (seconds, where they are times); the API never sees them.
KNOBS: Props = {
    "deleteUnreferencedDisksOnDestroy": True,
    "purgeOnDestroy": True,
    "rebootAfterUpdate": True,
    "stopOnDestroy": False,
    "timeoutCreate": 1800,
    "timeoutReboot": 1800,
    "timeoutShutdownVm": 1800,
    "timeoutStartVm": 1800,
    "timeoutStopVm": 300,
}

# What is carried to the API; for objects and lists of objects, which of their properties.
CARRIED: dict[str, frozenset[str] | None] = {
    **dict.fromkeys(["vmId", "nodeName", "started", "tags", "bootOrders", *fields.TOP, *KNOBS]),
    "amdSev": None,
    "cpu": frozenset({"type", "flags", *fields.BLOCKS["cpu"]}),
    "disks": frozenset({"interface", "fileFormat", *devices.DISK}),
    "efiDisk": None,
    "hostpcis": frozenset({"device", "mapping", *devices.HOSTPCI}),
    "memory": frozenset(fields.BLOCKS["memory"]),
    "networkDevices": frozenset({"macAddress", *devices.NETWORK}),
    "numas": None,
    "operatingSystem": None,
}
MAX_HOSTPCI = 16

# Keys that only root@pam itself may set (qemu-server, check_vm_modify_config_perm); a token of root is refused.
ROOT_ONLY = frozenset({"affinity", "amd-sev", "args"})
# Keys that a running VM takes at once; for any other, the provider reboots it.
LIVE = frozenset({"name", "description", "onboot", "tags", "protection"})


def failures(inputs: Props) -> Iterator[Failure]:
    """What this stand-in would have to ignore, and what is known to fail later."""
    for name, value in inputs.items():
        yield from _not_carried(name, value)
    if not inputs.get("disks"):
        yield Failure("disks", "give at least one: without, the real provider fails or shows a change on every preview")
    hostpcis = devices.items(inputs.get("hostpcis"))
    if len(hostpcis) > MAX_HOSTPCI:
        yield Failure("hostpcis", f"must be at most {MAX_HOSTPCI}, not {len(hostpcis)}")
    for index, device in enumerate(hostpcis):
        if not is_unknown(device["device"]) and device["device"] != f"hostpci{index}":
            reason = f"must be 'hostpci{index}', since the provider numbers them by position"
            yield Failure(f"hostpcis[{index}].device", reason)
        if not device.get("mapping"):
            yield Failure(f"hostpcis[{index}].mapping", "must be given: this stand-in passes devices by mapping only")


def _not_carried(name: str, value: Value) -> Iterator[Failure]:
    if name not in CARRIED:
        yield Failure(name, f"this stand-in doesn't carry {name}")
        return
    allowed = CARRIED[name]
    if allowed is None:
        return
    for at, part in [(name, value)] if isinstance(value, dict) else _indexed(name, value):
        for inner in part if isinstance(part, dict) else ():
            if inner not in allowed and not inner.startswith("__"):
                yield Failure(f"{at}.{inner}", f"this stand-in doesn't carry {inner} of {name}")


def _indexed(name: str, value: Value) -> list[tuple[str, Value]]:
    return [(f"{name}[{index}]", item) for index, item in enumerate(value)] if isinstance(value, list) else []


def normal(props: Props, known: Props) -> Props:
    """The VM with every value given: the inputs or state, the defaults, and from `known` what Proxmox chose."""
    found: Props = {name: _or(props.get(name), field.default) for name, field in fields.TOP.items()}
    for name, block in fields.BLOCKS.items():
        more: Props = {"type": "qemu64", "flags": []} if name == "cpu" else {}
        found[name] = _merged(props.get(name), fields.defaults(block) | more)
    for name, default in (("amdSev", devices.AMD_SEV), ("efiDisk", devices.EFI_DISK)):
        found[name] = None if props.get(name) is None else _merged(props.get(name), default)
    found["hostpcis"] = devices.with_defaults(props.get("hostpcis"), devices.HOSTPCI)
    found["numas"] = devices.with_defaults(props.get("numas"), {})
    found["disks"] = _chosen(devices.with_defaults(props.get("disks"), devices.DISK), known.get("disks"), "interface")
    nets = devices.with_defaults(props.get("networkDevices"), devices.NETWORK)
    found["networkDevices"] = _chosen(nets, known.get("networkDevices"), None)
    tags = _or(props.get("tags"), [])
    found["tags"] = _strings(sorted(str(tag).strip() for tag in tags)) if isinstance(tags, list) else tags
    found["started"] = _or(props.get("started"), default=True)
    for name in ("vmId", "nodeName", "bootOrders"):
        found[name] = _or(props.get(name), known.get(name))
    if isinstance(found["efiDisk"], dict) and isinstance(known.get("efiDisk"), dict):
        found["efiDisk"] = _keep(found["efiDisk"], known["efiDisk"])
    return found


# Values of a device that the program may leave to Proxmox.
_COMPUTED = ("fileFormat", "macAddress", "pathInDatastore")


def _keep(device: Props, before: Value) -> Props:
    old = before if isinstance(before, dict) else {}
    return device | {name: old[name] for name in _COMPUTED if name in old and not device.get(name)}


def _chosen(found: Value, known: Value, key: str | None) -> Value:
    """The devices with what Proxmox chose for them, matched by a property or by position."""
    if not isinstance(found, list):
        return found
    before: dict[object, Value] = {item[key] if key else index: item for index, item in enumerate(devices.items(known))}
    items = enumerate(devices.items(found))
    return [_keep(item, before.get(item[key] if key else index)) for index, item in items]


def _or(value: Value, default: Value) -> Value:
    return default if value is None else value


def _merged(value: Value, default: Props) -> Value:
    if is_unknown(value):
        return value
    given = value if isinstance(value, dict) else {}
    return default | {name: item for name, item in given.items() if item is not None}


def keys(vm: Props) -> dict[str, str]:
    """The configuration keys of a normal VM, its disks aside."""
    found = fields.write(fields.TOP, vm)
    for name, block in fields.BLOCKS.items():
        found |= fields.write(block, _object(vm, name))
    found["cpu"] = devices.cpu_model(_object(vm, "cpu"))
    if vm["tags"]:
        found["tags"] = ";".join(map(str, vm["tags"] if isinstance(vm["tags"], list) else []))
    if vm.get("bootOrders"):
        found["boot"] = "order=" + ";".join(map(str, vm["bootOrders"] if isinstance(vm["bootOrders"], list) else []))
    if vm["amdSev"] is not None:
        found["amd-sev"] = devices.amd_sev(_object(vm, "amdSev"))
    for prefix, name, write in (
        ("hostpci", "hostpcis", devices.hostpci),
        ("net", "networkDevices", devices.network),
        ("numa", "numas", devices.numa),
    ):
        found |= {f"{prefix}{index}": write(item) for index, item in enumerate(devices.items(vm[name]))}
    return found


def new_drives(vm: Props) -> dict[str, str]:
    """The keys of the disks that a new VM gets."""
    found = {str(item["interface"]): devices.new_disk(item) for item in devices.items(vm["disks"])}
    return found | ({} if vm["efiDisk"] is None else {"efidisk0": devices.efi_disk(_object(vm, "efiDisk"))})


def _object(vm: Props, name: str) -> Props:
    found = vm[name]
    return found if isinstance(found, dict) else {}


def read(config: Mapping[str, Any], *, running: bool, known: Props) -> Props:
    """The normal VM that a configuration describes; `known` has the order of the disks and what only the state has."""
    vm = fields.read(fields.TOP, config)
    for name, block in fields.BLOCKS.items():
        vm[name] = fields.read(block, config)
    vm["cpu"] = _object(vm, "cpu") | devices.read_cpu_model(str(config.get("cpu", "")))
    vm["amdSev"] = devices.read_amd_sev(config["amd-sev"]) if "amd-sev" in config else None
    vm["efiDisk"] = devices.read_efi_disk(config["efidisk0"]) if "efidisk0" in config else None
    vm["hostpcis"] = devices.numbered("hostpci", config, devices.read_hostpci)
    vm["networkDevices"] = devices.numbered("net", config, devices.read_network)
    vm["numas"] = devices.numbered("numa", config, devices.read_numa)
    vm["disks"] = _disks(config, known)
    vm["tags"] = _strings(sorted(str(config.get("tags", "")).split(";")))
    vm["bootOrders"] = _strings(str(config.get("boot", "")).removeprefix("order=").split(";"))
    vm["started"] = running
    return normal(vm, known)


def _strings(texts: list[str]) -> list[Value]:
    return [text for text in texts if text]


def _disks(config: Mapping[str, Any], known: Props) -> list[Value]:
    order = [item["interface"] for item in devices.items(known.get("disks"))]
    found = [key for key in config if devices.DISK_KEY.fullmatch(key) and "media=cdrom" not in str(config[key])]
    found.sort(key=lambda key: (order.index(key) if key in order else len(order), key))
    return [devices.read_disk(key, str(config[key])) for key in found]
