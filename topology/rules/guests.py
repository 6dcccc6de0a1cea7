"""Rules on containers and virtual machines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from topology.rules.catalogue import broken
from topology.rules.pools import each_once, hostpci_count, wrong_driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.problem import Problem
    from topology.spec import ContainerSpec, PoolSpec, VmSpec

_GIB = 1 << 30

NAMED_MODEL_BITS = 40
"""Physical address bits of every named QEMU CPU model unless told otherwise: 1 TiB (target/i386, phys-bits)."""

WINDOW_SHARE = 4
OLD_WINDOW_SHARE = 8
"""OVMF gives a quarter of the address space to 64-bit MMIO, older ones an eighth (tianocore/edk2#12997)."""

_HOST_TYPES = frozenset({"host", "max"})
_CUSTOM = "custom-"
_FIRMWARE_WINDOW = re.compile(r"X-PciMmio64Mb,string=(\d+)")
_ARGS_BITS = re.compile(r"\bphys-bits=(\d+)")
_ARGS_HOST_BITS = re.compile(r"\bhost-phys-bits=(on|true|yes)\b")


def check_container(container: ContainerSpec, pool: PoolSpec | None = None) -> tuple[Problem, ...]:
    """Judge a container, against its pool where that is known."""
    subject = f"container {container.vmid}"
    return (
        *each_once(subject, container.devices),
        *wrong_driver("container-on-nvidia", subject, f"lxc/{container.vmid}", container.driver),
        *(same_devices(subject, container.devices, pool) if pool else ()),
    )


def check_vm(vm: VmSpec) -> tuple[Problem, ...]:
    """Judge a VM: driver, number of devices, address space, and what GPU confidential computing it does not have."""
    subject = f"VM {vm.vmid}"
    return (
        *each_once(subject, vm.devices),
        *wrong_driver("vm-on-vfio", subject, f"vm/{vm.vmid}", vm.driver),
        *hostpci_count(subject, len(vm.devices)),
        *_window(subject, vm),
        *_confidential_computing(subject, vm),
    )


def same_devices(subject: str, devices: tuple[str, ...], pool: PoolSpec) -> Iterator[Problem]:
    """Refuse devices that are not exactly the pool's."""
    if set(devices) != set(pool.addresses):
        yield broken(
            "same-devices",
            subject,
            f"has {', '.join(sorted(devices)) or 'nothing'}, and pool {pool.name} {', '.join(sorted(pool.addresses))}",
            "it is given its pool's GPUs and no others",
            f"change the devices of pool {pool.name} in the stack file and plan again",
        )


def _confidential_computing(subject: str, vm: VmSpec) -> Iterator[Problem]:
    if vm.sev_snp and len(vm.devices) > 1:
        yield broken(
            "gpu-confidential-computing-off",
            subject,
            f"has {len(vm.devices)} GPUs under SEV-SNP",
            "NVIDIA supports GPU confidential computing on this card for one GPU per VM only, so it is off here: the "
            "VM's memory is encrypted, the GPUs' memory and the PCIe traffic are not",
            "accept that and say so in attestation, or give the VM a pool of one GPU",
        )


@dataclass(frozen=True, slots=True)
class _AddressSpace:
    """A guest's physical address bits, None for the host's own or unknown, and a window set by hand in bytes."""

    bits: int | None
    window: int | None


def _window(subject: str, vm: VmSpec) -> Iterator[Problem]:
    needed = 1 << (vm.bar_bytes - 1).bit_length() if vm.bar_bytes > 1 else vm.bar_bytes
    space = _address_space(vm)
    text = f"needs a 64-bit MMIO window of {needed // _GIB} GiB for its GPUs' BARs"
    if space.window is not None and space.window < needed:
        yield broken(
            "mmio-window",
            subject,
            f"{text}, and X-PciMmio64Mb gives {space.window // _GIB} GiB",
            "a BAR that finds no room is left out, and the driver in the guest sees no memory",
            f"set X-PciMmio64Mb to {needed >> 20}, or remove it and use CPU type host",
        )
    if space.bits is None or needed == 0:
        return
    share = 2 if space.window is not None else WINDOW_SHARE
    if needed > (1 << space.bits) // share:
        wanted = needed.bit_length() - 1 + OLD_WINDOW_SHARE.bit_length() - 1
        yield broken(
            "mmio-window",
            subject,
            f"{text}, and CPU {vm.cpu or 'default'!r} has {space.bits} address bits, {1 << space.bits >> 30} GiB",
            "the firmware gives a part of the address space to MMIO, and a named CPU model has 40 bits unless told "
            "otherwise",
            f"set the VM's CPU type to host, or add phys-bits={wanted} or phys-bits=host to it",
        )
    elif space.window is None and needed > (1 << space.bits) // OLD_WINDOW_SHARE:
        yield broken(
            "mmio-window-unsure",
            subject,
            f"{text}, and CPU {vm.cpu or 'default'!r} has {space.bits} address bits",
            "newer OVMF gives a quarter of the address space to MMIO, which is enough; older gives an eighth, which "
            "is not",
            f"set the VM's CPU type to host, or add phys-bits={space.bits + 1} to it",
        )


def _address_space(vm: VmSpec) -> _AddressSpace:
    """Read the VM's `cpu` and `args` as Proxmox's configuration holds them; the later command-line args win."""
    first, *others = vm.cpu.split(",")
    options = dict(option.split("=", 1) for option in [first, *others] if "=" in option)
    model = options.get("cputype", first if "=" not in first else "")
    window = _FIRMWARE_WINDOW.search(vm.args)
    given = options.get("phys-bits", "")
    bits: int | None
    if in_args := _ARGS_BITS.search(_ARGS_HOST_BITS.sub("", vm.args)):
        bits = int(in_args[1])
    elif given == "host" or _ARGS_HOST_BITS.search(vm.args):
        bits = None
    elif given.isdigit():
        bits = int(given)
    else:
        # A custom model keeps its bits in /etc/pve/virtual-guest/cpu-models.conf, which the facts do not have.
        bits = None if model in _HOST_TYPES or model.startswith(_CUSTOM) else NAMED_MODEL_BITS
    return _AddressSpace(bits, int(window[1]) << 20 if window else None)
