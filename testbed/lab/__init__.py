"""A hypervisor on a real kernel: a QEMU machine with kpro6's shape, built from Debian's packages."""

from testbed.lab.lab import Lab
from testbed.lab.shape import SERVER, WORKSTATION, Iommu, Shape

__all__ = ["SERVER", "WORKSTATION", "Iommu", "Lab", "Shape"]
