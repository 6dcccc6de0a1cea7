"""What a refresh sees on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from host.resources.binding import DriverBindingProvider
from host.resources.canonical import CanonicalUnitProvider
from host.resources.container import ContainerGpusProvider
from host.resources.unit import UnitFileProvider
from host.resources.vm import VmGpusProvider
from tests.components.programs import STORY, performed, story
from tests.facts import hosts
from tests.resources.conftest import CONFIDENTIAL, SERVING, FakeHost, binding, container, kept, unit, vm, wired

if TYPE_CHECKING:
    from pathlib import Path

    from host.resources.agent_resource import AgentResourceProvider

PROVIDERS: dict[str, type[AgentResourceProvider]] = {
    "DriverBinding": DriverBindingProvider,
    "ContainerGpus": ContainerGpusProvider,
    "VmGpus": VmGpusProvider,
    "UnitFile": UnitFileProvider,
}


def _device(host: FakeHost, address: str, **changes: object) -> None:
    device: dict[str, Any] = next(d for d in host.raw["devices"] if d["address"] == address)
    device.update(changes)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, "vfio-pci"),
        ({"driver": "nvidia"}, "nvidia"),
        ({"driver": None}, "no driver"),
        ({"persisted": None}, "vfio-pci, after a boot the default driver"),
        ({"persisted": "nvidia"}, "vfio-pci, after a boot nvidia"),
        ({"driver": "nvidia", "persisted": None}, "nvidia, after a boot the default driver"),
    ],
)
def test_a_binding_reads_both_halves(host: FakeHost, changes: dict[str, object], seen: str) -> None:
    """The live driver is what is observed, with what the next boot would bring where that is another."""
    _device(host, "0000:91:00.0", **changes)
    observed = kept(DriverBindingProvider().read("confidential", binding()))["observed"]
    assert observed == dict.fromkeys(CONFIDENTIAL, "vfio-pci") | {"0000:91:00.0": seen}


@pytest.mark.parametrize(
    ("persisted", "seen"), [(None, "nvidia"), ("nvidia", "nvidia"), ("vfio-pci", "nvidia, after a boot vfio-pci")]
)
def test_a_device_on_nvidia_needs_nothing_persisted(host: FakeHost, persisted: str | None, seen: str) -> None:
    """A GPU comes to nvidia without an override; one to vfio-pci would take it at the next boot."""
    _device(host, "0000:01:00.0", persisted=persisted)
    inputs = binding(pool="serving", devices=SERVING, driver="nvidia")
    assert kept(DriverBindingProvider().read("serving", inputs))["observed"]["0000:01:00.0"] == seen


def test_a_card_that_is_gone_is_drift_of_the_binding(host: FakeHost) -> None:
    """A binding whose card was pulled out still is one: it says so, and is not read as deleted."""
    host.raw["devices"] = [d for d in host.raw["devices"] if d["address"] != "0000:f1:00.0"]
    host.raw["missing"] = ["0000:f1:00.0"]
    read = DriverBindingProvider().read("confidential", binding())
    assert read.id == "confidential"
    assert kept(read)["observed"]["0000:f1:00.0"] == "not on the host"


def test_a_container_reads_the_gpus_it_is_given(host: FakeHost) -> None:
    """A GPU that somebody took out of the container's lines, or put in, is seen by its PCI address."""
    found: dict[str, Any] = host.raw["containers"][0]
    lines = [line for line in found["config"].splitlines() if not line.startswith("lxc.mount.entry: /dev/nvidia0 ")]
    found["config"] = "\n".join(lines)
    assert kept(ContainerGpusProvider().read("lxc/129", container()))["observed"] == SERVING[1:]
    host.raw = hosts.raw_facts("kpro6", "found")
    assert kept(ContainerGpusProvider().read("lxc/129", container()))["observed"] == SERVING + CONFIDENTIAL


@pytest.mark.parametrize(
    ("status", "start", "running"),
    [("running", True, True), ("stopped", True, False), ("running", False, False), ("stopped", False, False)],
)
def test_a_vm_reads_whether_it_runs_where_it_must(host: FakeHost, status: str, start: bool, running: bool) -> None:
    """A VM that is to run and doesn't is drift; one that need not is left to its people."""
    host.raw["vms"][0]["status"] = status
    read = VmGpusProvider().read("vm/200", vm(start=start))
    assert kept(read)["observed"] == {"hostpci": 4, "running": running}
    assert VmGpusProvider().diff("vm/200", kept(read), vm(start=start)).changes is (start and not running)


def test_a_vm_reads_its_entries_of_the_mapping(host: FakeHost) -> None:
    """An entry that was taken away by hand is missing, one of another mapping is not counted."""
    config: str = host.raw["vms"][0]["config"]
    host.raw["vms"][0]["config"] = config.replace("hostpci3: mapping=gpu-confidential", "hostpci3: mapping=network")
    assert kept(VmGpusProvider().read("vm/200", vm()))["observed"]["hostpci"] == 3


def test_a_unit_reads_the_deployed_text(host: FakeHost) -> None:
    """A unit that was edited on the host is observed as it stands."""
    host.raw["services"][0]["text"] = "[Service]\nExecStart=/bin/true\n"
    read = UnitFileProvider().read("sglang-qwen", unit())
    assert kept(read)["observed"] == "[Service]\nExecStart=/bin/true\n"
    assert kept(read)["text"] == unit()["text"]


@pytest.mark.parametrize("kind", ["containers", "vms", "services"])
def test_what_vanished_reads_as_deleted(host: FakeHost, kind: str) -> None:
    """A guest or a unit that is gone leaves the state at a refresh, and the next `up` makes it again."""
    provider, inputs = {
        "containers": (ContainerGpusProvider(), container()),
        "vms": (VmGpusProvider(), vm()),
        "services": (UnitFileProvider(), unit()),
    }[kind]
    for absent in (host.raw[kind][0] | {"exists": False}, None):
        host.raw[kind] = [absent] if absent else []
        read = provider.read("id", inputs)
        assert (read.id, read.outs) == ("", {})


@pytest.mark.parametrize("act", [name for name, _ in STORY])
def test_a_refresh_after_an_up_finds_no_drift(host: FakeHost, act: str, tmp_path: Path) -> None:
    """All resources of the program, created, read back from the host that the `up` left, and compared once more."""
    raw = hosts.raw_facts("kpro6", "found")
    for name, _ in STORY:
        raw = hosts.applied(story()[name].plan, raw)
        if name == act:
            break
    host.raw = raw
    looked = 0
    for child in performed(act).children.values():
        kind = child.type.rsplit(":", maxsplit=1)[-1]
        if child.type.startswith("pulumi-python:") and kind in PROVIDERS:
            provider, inputs = PROVIDERS[kind](), wired(**child.inputs)
            created = provider.create(inputs)
            read = provider.read(created.id, kept(created))
            assert read.outs == created.outs
            assert provider.diff(created.id, kept(read), inputs).changes is False
            looked += 1
    assert looked == len(story()[act].plan.spec.bindings) + len(story()[act].plan.spec.vms) + 2
    copy = performed(act).children["sglang-qwen-copy"].inputs | {"path": str(tmp_path / "copy"), "revision": "adopted"}
    made = CanonicalUnitProvider().create(wired(**copy))
    read = CanonicalUnitProvider().read(made.id, kept(made))
    assert CanonicalUnitProvider().diff(made.id, kept(read), wired(**copy)).changes is False
