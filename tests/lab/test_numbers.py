"""Device numbers that a boot gives differently: the container starts with its cards all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from host.bundle import AGENT_PATH, agent_bundle
from testbed.checks import CONFIDENTIAL, SERVING
from tests.lab.hosts import MOVED_MAJOR, OnLab, check, wait_served
from tests.lab.operations import MANAGED, Facts, Operations
from tests.lab.test_handover import visible

if TYPE_CHECKING:
    from testbed.lab import Lab
    from tests.lab.hosts import HostUnderTest

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("style", ["raw", "dev"])
def test_a_container_starts_with_its_cards_whatever_their_numbers(host: HostUnderTest, style: str) -> None:
    """Other minors and another uvm major: the boot unit mends the lines before guests start, and the server answers."""
    give_the_upper_cards(host, style)
    host.move_numbers()
    host.reboot()
    facts = assert_right(host, style)
    assert facts["nvidia"]["uvm_major"] == MOVED_MAJOR
    assert host.seen.container_gpus() == ["nvidia0", "nvidia1", "nvidia2", "nvidia3"]
    if isinstance(host, OnLab):
        _assert_done_before_guests(host.lab)


def give_the_upper_cards(host: HostUnderTest, style: str) -> None:
    """Serve on node 1's cards, minors 4 to 7, with the boot unit installed."""
    check(host, f"cat > {host.path(f'/{AGENT_PATH}')}", stdin=agent_bundle())
    with Operations(host) as operations:
        operations.call("register", managed=MANAGED)
        operations.bind("confidential", SERVING, "vfio-pci", CONFIDENTIAL)
        operations.bind("serving", CONFIDENTIAL, "nvidia", SERVING)
        assert operations.container(CONFIDENTIAL, style)["minors"] == [4, 5, 6, 7]
        operations.unit(len(CONFIDENTIAL))
        operations.serve(CONFIDENTIAL)


def assert_right(host: HostUnderTest, style: str) -> Facts:
    """The server answers on the container's own cards, and an operation finds nothing to change."""
    wait_served(host)
    assert visible(host) == list(CONFIDENTIAL)
    with Operations(host) as operations:
        facts = operations.facts()
        minors = {device["address"]: device["minor"] for device in facts["devices"]}
        assert host.seen.container_gpus() == sorted(f"nvidia{minors[address]}" for address in CONFIDENTIAL)
        assert operations.container(CONFIDENTIAL, style)["changed"] is False
    return facts


def _assert_done_before_guests(lab: Lab) -> None:
    ended = lab.check("systemctl show gpu-topology-boot.service -P ExecMainExitTimestampMonotonic")
    guests = lab.check("systemctl show pve-guests.service -P ExecMainStartTimestampMonotonic")
    assert 0 < int(ended) < int(guests)
