"""Device numbers that a boot gives differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.checks import CONFIDENTIAL, CONTAINER, SERVING
from tests.lab.hosts import OnLab
from tests.lab.operations import Operations
from tests.lab.test_handover import visible

if TYPE_CHECKING:
    from testbed.lab import Lab

pytestmark = pytest.mark.lab


def test_moved_numbers_are_found_and_mended(lab: Lab) -> None:
    """Where a boot gives other minors and another uvm major, the container gets its cards again, by their addresses."""
    host = OnLab(lab)
    with Operations(host) as operations:
        operations.bind("confidential", SERVING, "vfio-pci", CONFIDENTIAL)
        operations.bind("serving", CONFIDENTIAL, "nvidia", SERVING)
        assert operations.container(CONFIDENTIAL)["minors"] == [4, 5, 6, 7]
    # The driver comes late, with its daemon: driverctl has taken four cards away by then, and minors begin at 0.
    lab.check("rm /etc/modules-load.d/nvidia-uvm.conf; echo blacklist nvidia >> /etc/modprobe.d/lab.conf")
    lab.check("sed -i s/major=511/major=510/ /etc/modprobe.d/lab.conf")
    load = "[Service]\nExecStartPre=/sbin/modprobe -a nvidia nvidia-uvm\n"
    lab.write("/etc/systemd/system/nvidia-persistenced.service.d/late.conf", load)
    lab.reboot()
    with Operations(host) as operations:
        cards = {device["address"]: device for device in operations.facts()["devices"]}
        assert [cards[address]["minor"] for address in CONFIDENTIAL] == [0, 1, 2, 3]
        assert operations.container(CONFIDENTIAL)["minors"] == [0, 1, 2, 3]
    assert visible(host) == list(CONFIDENTIAL)
    opened = lab.run(f"pct exec {CONTAINER} -- sh -c ': < /dev/nvidia-uvm'")
    assert opened.status == 0, opened.stderr
