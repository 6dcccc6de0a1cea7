"""Cards of two functions, an IOMMU that passes through, and minors that run against the addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.checks import CONFIDENTIAL, SERVING
from tests.lab.hosts import OnLab
from tests.lab.operations import ALL, Operations
from tests.lab.test_handover import visible

if TYPE_CHECKING:
    from testbed.lab import Lab

pytestmark = pytest.mark.lab

VIABLE = """
import fcntl, os, struct, sys
group = os.open("/dev/vfio/" + sys.argv[1], os.O_RDWR)
status = bytearray(struct.pack("II", 8, 0))
fcntl.ioctl(group, 0x3B67, status)
print(struct.unpack("II", status)[1] & 1)
"""


def _audio(address: str) -> str:
    return address.replace(".0", ".1")


def test_an_audio_function_goes_with_its_gpu_and_comes_back(workstation: Lab) -> None:
    """Both functions are bound to vfio-pci, persisted, and handed back to the drivers they were found on."""
    with Operations(OnLab(workstation)) as operations:
        found = {d["address"]: d["driver"] for d in operations.facts()["devices"]}
        assert {found[_audio(address)] for address in ALL} == {"snd_hda_intel"}
        operations.bind("confidential", CONFIDENTIAL, "vfio-pci", SERVING)
        bound = {d["address"]: (d["driver"], d["persisted"]) for d in operations.facts()["devices"]}
        for address in CONFIDENTIAL:
            assert bound[address] == bound[_audio(address)] == ("vfio-pci", "vfio-pci")
        for address in SERVING:
            assert bound[_audio(address)] == ("snd_hda_intel", None)
        operations.bind("serving", ALL, "nvidia")
        back = {d["address"]: d["driver"] for d in operations.facts()["devices"]}
    assert back == found


def test_a_group_is_viable_only_when_every_function_left_the_host(workstation: Lab) -> None:
    """With the audio function on the host's driver VFIO refuses the group; without it the group may be used."""
    workstation.check("systemctl stop nvidia-persistenced; pct stop 129")
    card = CONFIDENTIAL[0]
    group = workstation.check(f"basename $(readlink /sys/bus/pci/devices/{card}/iommu_group)")
    ask = f"python3 - {group}"
    workstation.check(f"driverctl --nosave set-override {card} vfio-pci")
    assert workstation.check(ask, stdin=VIABLE.encode()) == "0"
    workstation.check(f"driverctl --nosave set-override {_audio(card)} vfio-pci")
    assert workstation.check(ask, stdin=VIABLE.encode()) == "1"


def test_the_iommu_passes_through(workstation: Lab) -> None:
    """`iommu=pt` makes every group's type identity, which is what the facts say."""
    with Operations(OnLab(workstation)) as operations:
        facts = operations.facts()
    assert "iommu=pt" in facts["host"]["cmdline"]
    assert {device["iommu_type"] for device in facts["devices"]} == {"identity"}


@pytest.mark.parametrize("style", ["raw", "dev"])
def test_a_container_gets_its_cards_by_address(workstation: Lab, style: str) -> None:
    """Where minors run against the addresses, the container of node 0 gets the nodes 0, 5, 6 and 7."""
    with Operations(OnLab(workstation)) as operations:
        minors = {d["address"]: d["minor"] for d in operations.facts()["devices"] if d["minor"] is not None}
        assert [minors[address] for address in ALL] == [0, 7, 6, 5, 4, 3, 2, 1]
        assert operations.container(SERVING, style)["minors"] == [0, 5, 6, 7]
    assert visible(OnLab(workstation)) == list(SERVING)
