"""nvidia-smi, on the host and in containers: it lists what its caller can open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.simulator.commands.call import Answer, Call, options
from testbed.simulator.drivers import gpu_uuid

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.simulator.sysfs import Function

NO_DRIVER, NO_DEVICE = 9, 6
UNITS = {"memory.total": "MiB", "memory.used": "MiB", "memory.free": "MiB", "utilization.gpu": "%", "power.draw": "W"}


async def nvidia_smi(call: Call) -> Answer:
    """Run nvidia-smi; it waits while an unbind hangs, as every client of the driver does."""
    kernel = call.machine.kernel
    await kernel.changed.until(lambda: not kernel.wedged())
    if kernel.nvidia is None:
        text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
        return Answer(text, code=NO_DRIVER)
    gpus = call.machine.visible(call.container)
    if not gpus:
        return Answer("No devices were found\n", code=NO_DEVICE)
    version = kernel.nvidia.versions.version
    if call.args in (("-L",), ("--list-gpus",)):
        rows = (f"GPU {n}: {g.model.name} (UUID: {gpu_uuid(g.address)})\n" for n, g in enumerate(gpus))
        return Answer("".join(rows))
    _, given = options(call.args, flags=("-q",), valued=("--query-gpu", "--format", "-i", "--id", "-d"))
    if "--query-gpu" in given:
        return _query(call, gpus, given, version)
    if "-q" in given:
        rows = (f"GPU {_bus_id(g)}\n    Product Name                          : {g.model.name}\n"
                f"    Minor Number                          : {g.minor}\n" for g in gpus)  # fmt: skip
        return Answer(
            f"Driver Version                            : {version}\n"
            f"Attached GPUs                             : {len(gpus)}\n" + "".join(rows)
        )
    if call.args:
        raise call.limit()
    return Answer(f"NVIDIA-SMI {version}   Driver Version: {version}   CUDA Version: 13.0\n")


def _query(call: Call, gpus: list[Function], given: dict[str, list[str]], version: str) -> Answer:
    form = (given.get("--format") or [""])[0].split(",")
    names = [name.strip() for name in given["--query-gpu"][0].split(",")]
    fields = _fields(version)
    if "csv" not in form or not set(form) <= {"csv", "noheader", "nounits"} or "-q" in given:
        raise call.limit()
    unknown = next((name for name in names if name not in fields), None)
    if unknown:
        return Answer(f'Field "{unknown}" is not a valid field to query.\n', code=2)
    chosen = given.get("-i", []) + given.get("--id", [])
    lines = []
    if "noheader" not in form:
        lines.append(", ".join(f"{n} [{UNITS[n]}]" if n in UNITS else n for n in names))
    for number, gpu in enumerate(gpus):
        if chosen and not {str(number), gpu.address, _bus_id(gpu), gpu_uuid(gpu.address)} & set(chosen[0].split(",")):
            continue
        values = [fields[name](number, gpu) for name in names]
        units = [f" {UNITS[n]}" if n in UNITS and "nounits" not in form else "" for n in names]
        lines.append(", ".join(value + unit for value, unit in zip(values, units, strict=True)))
    return Answer("".join(f"{line}\n" for line in lines))


def _fields(version: str) -> dict[str, Callable[[int, Function], str]]:
    return {
        "index": lambda n, _: str(n),
        "count": lambda n, _: str(n + 1),
        "name": lambda _, g: g.model.name,
        "gpu_name": lambda _, g: g.model.name,
        "uuid": lambda _, g: gpu_uuid(g.address),
        "gpu_uuid": lambda _, g: gpu_uuid(g.address),
        "pci.bus_id": lambda _, g: _bus_id(g),
        "gpu_bus_id": lambda _, g: _bus_id(g),
        "driver_version": lambda _, __: version,
        "memory.total": lambda _, g: str(g.model.memory_mib),
        "memory.used": lambda _, g: str(g.load[2]),
        "memory.free": lambda _, g: str(g.model.memory_mib - g.load[2]),
        "utilization.gpu": lambda _, g: str(g.load[0]),
        "power.draw": lambda _, g: f"{g.load[1]:.2f}",
        "temperature.gpu": lambda _, __: "34",
        "persistence_mode": lambda _, __: "Enabled",
        "compute_mode": lambda _, __: "Default",
        "mig.mode.current": lambda _, __: "Disabled",
        "pcie.link.gen.current": lambda _, __: "5",
        "pcie.link.width.current": lambda _, __: "16",
    }


def _bus_id(gpu: Function) -> str:
    # nvidia-smi prints the domain with eight digits and everything in upper case.
    return f"0000{gpu.address.upper()}"
