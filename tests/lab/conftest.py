"""The host that tests here run on: the simulator, or the lab's machines, one at a time and booted once."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from testbed.lab import SERVER, WORKSTATION, Lab
from testbed.simulator import Simulator
from tests.lab.hosts import OnLab, OnSimulator
from tests.lab.operations import Operations, split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.lab import Shape
    from tests.lab.hosts import HostUnderTest

# `make test` has neither the packages nor the minutes for an emulated machine: there the tests that both hosts can pass
# run on the simulator, and the others are not collected. `make test-lab` sets the variable, and all run on the lab.
ON_LAB = os.environ.get("GPU_TOPOLOGY_LAB") == "1"
LAB_ONLY = ["test_kernel.py", "test_workstation.py"]
collect_ignore_glob = [] if ON_LAB else LAB_ONLY
HOSTS = ["lab" if ON_LAB else "simulator"]
READY, SPLIT = "ready", "split"
TIMES = pytest.StashKey[dict[str, float]]()


class Machines:
    """At most one running machine: each takes both of the cores that CI has."""

    def __init__(self, times: dict[str, float]) -> None:
        self._times = times
        self._current: Lab | None = None

    def get(self, shape: Shape, state: str = READY) -> Lab:
        """A machine of this shape in a saved state, or in its first one where there is none of that name."""
        if self._current is not None and self._current.shape == shape:
            self._current.reset(state if self._current.has(state) else READY)
            return self._current
        self.stop()
        self._current = Lab(shape).__enter__()
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


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[HostUnderTest]:
    """kpro6 as it was found, on either host."""
    if request.param == "lab":
        yield OnLab(request.getfixturevalue("lab"))
    else:
        with Simulator("kpro6") as simulator, closing(OnSimulator(simulator)) as simulated:
            yield simulated


@pytest.fixture(params=HOSTS)
def halves(request: pytest.FixtureRequest, machines: Machines) -> Iterator[HostUnderTest]:
    """kpro6 after the split, four cards each for the container and the VM; the lab is split once, then restored."""
    if request.param == "lab":
        lab = machines.get(SERVER, SPLIT)
        if not lab.has(SPLIT):
            _split(OnLab(lab))
            lab.save(SPLIT)
        yield OnLab(lab)
    else:
        with Simulator("kpro6") as simulator, closing(OnSimulator(simulator)) as simulated:
            _split(simulated)
            yield simulated


def _split(host: HostUnderTest) -> None:
    with Operations(host) as operations:
        split(operations)


@pytest.fixture
def operations(host: HostUnderTest) -> Iterator[Operations]:
    """The agent's operations on kpro6 as it was found."""
    with Operations(host) as client:
        yield client
