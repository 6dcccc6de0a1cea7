"""Stand-in for a VM's process: it opens the VFIO groups of its devices as QEMU does, and holds them until SIGTERM."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import sys
from pathlib import Path

from .proxmox import fail, option

# include/uapi/linux/vfio.h: _IO(';', 100 + n)
VFIO_SET_IOMMU = 0x3B66
VFIO_GROUP_GET_STATUS = 0x3B67
VFIO_GROUP_SET_CONTAINER = 0x3B68
VFIO_GROUP_GET_DEVICE_FD = 0x3B6A
TYPE1_IOMMU = 1
VIABLE = 1


def main() -> None:
    """Hold the devices, then leave the terminal."""
    arguments = sys.argv[1:]
    devices = [word.partition("host=")[2] for word in arguments if word.startswith("vfio-pci,host=")]
    if devices:
        _hold(devices)
    if os.fork():
        os._exit(0)
    os.setsid()
    Path(option(arguments, "pidfile", "")).write_text(str(os.getpid()))
    null = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    signal.sigwait({signal.SIGTERM})


def _hold(devices: list[str]) -> None:
    container = os.open("/dev/vfio/vfio", os.O_RDWR)
    chosen = False
    for device in devices:
        group = Path(f"/sys/bus/pci/devices/{device}/iommu_group").resolve().name
        try:
            held = os.open(f"/dev/vfio/{group}", os.O_RDWR)
        except OSError as error:
            fail(f"vfio {device}: failed to open /dev/vfio/{group}: {error.strerror}", 1)
        status = bytearray(struct.pack("II", 8, 0))
        fcntl.ioctl(held, VFIO_GROUP_GET_STATUS, status)
        if not struct.unpack("II", status)[1] & VIABLE:
            fail(
                f"vfio {device}: group {group} is not viable\nPlease ensure all devices within the iommu_group are "
                "bound to their vfio bus driver.",
                1,
            )
        fcntl.ioctl(held, VFIO_GROUP_SET_CONTAINER, struct.pack("i", container))
        if not chosen:
            fcntl.ioctl(container, VFIO_SET_IOMMU, TYPE1_IOMMU)
            chosen = True
        fcntl.ioctl(held, VFIO_GROUP_GET_DEVICE_FD, bytearray(device.encode() + b"\0"))
