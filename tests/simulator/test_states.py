"""The shipped states, a reboot, and what a state file must be."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from testbed.simulator import load_state
from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import run, wait_until
from testbed.simulator.state import STATES
from tests.simulator.host import (
    DEVICES,
    FIRST,
    NODE_0,
    NODE_1,
    driver_of,
    free,
    marked,
    marker_of,
    minors_inside,
    output,
    to_vfio,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from testbed.simulator import Simulator

NAMES = sorted(path.stem for path in STATES.glob("*.yaml"))


def read(simulator: Simulator, address: str, attribute: str) -> str:
    """A device's attribute."""
    return (simulator.root / DEVICES / address / attribute).read_text().strip()


@pytest.mark.parametrize("name", NAMES)
def test_every_state_boots_whole(simulate: Callable[[str], Simulator], name: str) -> None:
    """In every shipped state the container runs, its service was started, and every GPU has a driver."""
    host = simulate(name)
    assert output(host, "pct status 129") == "status: running\n"
    assert output(host, "pct exec 129 -- systemctl is-active sglang-qwen") == "active\n"
    gpus = [a for a, f in host.functions().items() if f.is_gpu]
    assert gpus
    assert {driver_of(host, a) for a in gpus} <= {"nvidia", "vfio-pci"}
    assert not host.events(EventKind.FAULT)


def test_kpro6_is_as_it_was_found(simulator: Simulator) -> None:
    """Eight GPUs on nvidia, four a NUMA node, under a translated IOMMU with SEV-SNP; VM 200 without GPUs."""
    assert [driver_of(simulator, a) for a in NODE_0 + NODE_1] == ["nvidia"] * 8
    assert [read(simulator, a, "numa_node") for a in NODE_0 + NODE_1] == ["0"] * 4 + ["1"] * 4
    group = simulator.root / DEVICES / FIRST / "iommu_group"
    assert (group.resolve().name, (group / "type").read_text()) == ("93", "DMA-FQ\n")
    assert (simulator.root / "sys/module/kvm_amd/parameters/sev_snp").read_text() == "Y\n"
    assert "hostpci" not in (simulator.root / "etc/pve/qemu-server/200.conf").read_text()
    conf = (simulator.root / "etc/pve/lxc/129.conf").read_text()
    assert conf.startswith("#")
    assert "\n[before-cuda13]\n" in conf
    assert conf.count("lxc.mount.entry: /dev/nvidia") == 8 + 5 + 1


def test_passthrough_iommu_has_identity_groups(simulate: Callable[[str], Simulator]) -> None:
    """With iommu=pt the groups' type is identity and SNP is off."""
    host = simulate("kpro6-iommu-pt")
    assert (host.root / DEVICES / FIRST / "iommu_group/type").read_text() == "identity\n"
    assert (host.root / "sys/module/kvm_amd/parameters/sev_snp").read_text() == "N\n"
    assert "iommu=pt" in (host.root / "proc/cmdline").read_text()


def test_split_state_is_split(simulate: Callable[[str], Simulator]) -> None:
    """4 + 4: four nodes in the container, four devices persisted on vfio-pci and held by VM 200."""
    host = simulate("kpro6-split")
    assert minors_inside(host) == [f"nvidia{n}" for n in range(4)]
    assert [driver_of(host, a) for a in NODE_1] == ["vfio-pci"] * 4
    assert host.events(EventKind.VM_START)[0].detail["devices"] == ",".join(NODE_1)
    assert output(host, "driverctl list-persisted").splitlines() == [f"{a} vfio-pci" for a in NODE_1]


def test_other_shapes(simulate: Callable[[str], Simulator]) -> None:
    """Sixteen GPUs, cards with an audio function, a shared group, and an unknown NUMA node."""
    assert len(output(simulate("sixteen"), "pct exec 129 -- nvidia-smi -L").splitlines()) == 16
    two = simulate("two-functions")
    assert [driver_of(two, f"0000:81:00.{n}") for n in (0, 1)] == ["nvidia", "snd_hda_intel"]
    assert read(two, "0000:81:00.1", "class") == "0x040300"
    shared = simulate("shared-group").root / "sys/kernel/iommu_groups/82/devices"
    assert sorted(p.name for p in shared.iterdir()) == ["0000:80:01.0", NODE_1[0], NODE_1[1]]
    assert read(simulate("numa-unknown"), FIRST, "numa_node") == "-1"


def test_reboot_replays_overrides_and_renumbers(simulator: Simulator) -> None:
    """After a reboot persisted devices are on vfio-pci, the rest have minors in order, and guests with onboot run."""
    free(simulator)
    to_vfio(simulator, NODE_0[0], FIRST)
    output(simulator, f"driverctl --nosave set-override {NODE_1[1]} vfio-pci")
    boot_id = (simulator.root / "proc/sys/kernel/random/boot_id").read_text()
    simulator.reboot()
    assert (simulator.root / "proc/sys/kernel/random/boot_id").read_text() != boot_id
    drivers = {a: driver_of(simulator, a) for a in NODE_0 + NODE_1}
    assert [a for a, driver in drivers.items() if driver == "vfio-pci"] == [NODE_0[0], FIRST]
    information = simulator.root / "proc/driver/nvidia/gpus" / NODE_0[1] / "information"
    assert "Device Minor: \t 0\n" in information.read_text()
    assert minors_inside(simulator) == [f"nvidia{n}" for n in range(6)]
    assert output(simulator, "qm status 200") == "status: stopped\n"
    wait_until(lambda: "invalid device ordinal" in output(simulator, "pct exec 129 -- journalctl -u sglang-qwen -n 99"))


def test_reboot_ends_a_hanging_unbind_and_every_command(simulator: Simulator) -> None:
    """A reboot is the way out of an unbind that never returns; commands that ignored the hang-up are gone too."""
    free(simulator)
    simulator.faults.unbind_hang(FIRST)
    script = f"import os; os.write(os.open('./sys/bus/pci/drivers/nvidia/unbind', os.O_WRONLY), b'{FIRST}')"
    run(simulator, f'(trap "" HUP TERM; exec sleep 600) >&- 2>&- & timeout 0.3 python3 -c "{script}" >/dev/null 2>&1')
    before = set(marked(marker_of(simulator)))
    simulator.reboot()
    assert not before & set(marked(marker_of(simulator)))
    assert driver_of(simulator, FIRST) == "nvidia"
    assert read(simulator, FIRST, "driver_override") == "(null)"
    simulator.faults.clear()
    assert len(output(simulator, "nvidia-smi -L").splitlines()) == 8


def test_power_off_needs_no_configuration(simulator: Simulator) -> None:
    """A running container whose configuration was deleted ends with a reboot all the same, and does not come back."""
    (simulator.root / "etc/pve/lxc/129.conf").unlink()
    simulator.reboot()
    stopped, booted = simulator.events(EventKind.CONTAINER_STOP, EventKind.HOST_BOOT)[-2:]
    assert (stopped.subject, booted.kind) == ("129", EventKind.HOST_BOOT)
    assert "does not exist" in run(simulator, "pct status 129").stderr


def test_reboot_honours_vfio_ids(simulator: Simulator) -> None:
    """With ids= for vfio-pci, all cards of the kind are on it after a reboot: it cannot tell them apart."""
    (simulator.root / "etc/modprobe.d/vfio.conf").write_text("options vfio-pci ids=10de:2bb5\n")
    simulator.reboot()
    assert [driver_of(simulator, a) for a in NODE_0 + NODE_1] == ["vfio-pci"] * 8


def test_persisted_without_reboot_changes_nothing(simulator: Simulator) -> None:
    """An entry below /etc/driverctl.d alone leaves the device where it is, and is an event."""
    (simulator.root / "etc/driverctl.d" / f"pci-{FIRST}").write_text("vfio-pci\n")
    assert driver_of(simulator, FIRST) == "nvidia"
    event = simulator.events(EventKind.PERSIST)[0]
    assert (event.subject, event.detail) == (FIRST, {"driver": "vfio-pci"})


def test_driverctl_unbinds_even_without_probe(simulator: Simulator) -> None:
    """`--noprobe` leaves a bound device without driver, as the real script does; unset-override brings it home."""
    free(simulator)
    output(simulator, f"modprobe vfio-pci; driverctl --noprobe set-override {FIRST} vfio-pci")
    assert driver_of(simulator, FIRST) is None
    assert output(simulator, "driverctl list-overrides") == f"{FIRST} vfio-pci\n"
    output(simulator, f"driverctl unset-override {FIRST}")
    assert driver_of(simulator, FIRST) == "nvidia"
    assert not list((simulator.root / "etc/driverctl.d").iterdir())


def test_dead_card_reads_ones(simulate: Callable[[Path], Simulator], tmp_path: Path) -> None:
    """A card that fell off the bus keeps its folder, reads ffffffff, and no driver takes it."""
    (tmp_path / "kpro6.yaml").write_text((STATES / "kpro6.yaml").read_text())
    path = tmp_path / "dead.yaml"
    path.write_text('extends: kpro6\ncards:\n  "0000:81:00": {alive: false}\n')
    host = simulate(path)
    assert (host.root / DEVICES / FIRST / "config").read_bytes()[:4] == b"\xff" * 4
    assert driver_of(host, FIRST) is None


def test_unknown_state_names_the_known_ones() -> None:
    """A state that is not there is refused with the list of those that are."""
    with pytest.raises(ValueError, match="no simulator state 'kpro7': give one of kpro6, "):
        load_state("kpro7")


def test_unknown_key_in_a_state_is_refused(tmp_path: Path) -> None:
    """A misspelt key in a state file is an error, not ignored."""
    (tmp_path / "kpro6.yaml").write_text((STATES / "kpro6.yaml").read_text())
    (tmp_path / "bad.yaml").write_text("extends: kpro6\nkernel: {iomu: translated}\n")
    with pytest.raises(ValidationError, match="iomu"):
        load_state(tmp_path / "bad.yaml")


def test_state_files_are_run_by_the_command(tmp_path: Path) -> None:
    """The command refuses an unknown state without a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "testbed.simulator", "--state", "kpro7", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "kpro6-split" in done.stderr
