"""The lab's machines: booted once, brought back to a snapshot before each test, and only one at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from testbed.lab import SERVER, WORKSTATION, Lab
from tests.lab.operations import Operations, split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.lab import Shape

# `make test` has neither the packages nor the minutes for an emulated machine; `make test-lab` sets the variable.
collect_ignore_glob = [] if os.environ.get("GPU_TOPOLOGY_LAB") == "1" else ["test_*.py"]
TIMES = pytest.StashKey[dict[str, float]]()
SPLIT = "split"


class Machines:
    """At most one running machine: each takes both of the cores that CI has, and a gigabyte."""

    def __init__(self, times: dict[str, float]) -> None:
        self._times = times
        self._current: Lab | None = None

    def get(self, shape: Shape) -> Lab:
        """A machine of this shape in its first state."""
        if self._current is not None and self._current.shape == shape:
            self._current.reset()
            return self._current
        self.stop()
        self._current = Lab(shape).start()
        self._times.update({f"{name}, {shape.name}": seconds for name, seconds in self._current.times.items()})
        return self._current

    def stop(self) -> None:
        """Switch off what runs."""
        if self._current is not None:
            self._current.stop()
            self._current = None


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker, and keep a place for times."""
    config.addinivalue_line("markers", "lab: runs on the lab's emulated machine, a real kernel")
    config.stash[TIMES] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell how long building and booting took, beside the number of tests."""
    for name, seconds in config.stash[TIMES].items():
        terminalreporter.write_line(f"lab: {name}: {seconds:.1f} s")


@pytest.fixture(scope="session")
def machines(pytestconfig: pytest.Config) -> Iterator[Machines]:
    """The machines, switched off at the end."""
    found = Machines(pytestconfig.stash[TIMES])
    yield found
    found.stop()


@pytest.fixture
def lab(machines: Machines) -> Lab:
    """kpro6 with Server Edition cards and a translating IOMMU, as it was found."""
    return machines.get(SERVER)


@pytest.fixture
def workstation(machines: Machines) -> Lab:
    """A host with two-function cards, an IOMMU that passes through, and minors that run against the addresses."""
    return machines.get(WORKSTATION)


@pytest.fixture
def halves(lab: Lab) -> Lab:
    """kpro6 after the split, four cards each for the container and the VM; split once, then restored."""
    if lab.has(SPLIT):
        lab.reset(SPLIT)
    else:
        with Operations(lab) as operations:
            split(operations)
        lab.save(SPLIT)
    return lab


@pytest.fixture
def operations(lab: Lab) -> Iterator[Operations]:
    """The agent's operations on kpro6 as it was found."""
    with Operations(lab) as client:
        yield client
