"""What somebody changed on the host by hand shows in a plain preview, and a plain `up` repairs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.checks import CONFIDENTIAL, UNIT
from testbed.stage import split

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.conftest import Stage

pytestmark = [pytest.mark.engine, pytest.mark.simulator]


def _unpersist(stage: Stage) -> None:
    (stage.simulator.root / "etc/driverctl.d" / f"pci-{CONFIDENTIAL[1]}").unlink()


def _stop_service(stage: Stage) -> None:
    stage.host.shell("pct", "exec", "129", "--", "systemctl", "stop", UNIT)


def _edit_unit(stage: Stage) -> None:
    path = stage.simulator.root / f"var/lib/lxc/129/rootfs/etc/systemd/system/{UNIT}"
    path.write_text(path.read_text().replace("--tp 4", "--tp 2"))


def _edit_copy(stage: Stage) -> None:
    (stage.workspace.folder / "units" / UNIT).write_text("# somebody's experiment\n")


def _disable_boot_unit(stage: Stage) -> None:
    stage.host.shell("systemctl", "disable", "gpu-topology-boot.service")


def _unplug_vm(stage: Stage) -> None:
    stage.host.shell("qm", "stop", "200")
    stage.host.shell("qm", "set", "200", "--delete", "hostpci3")


DRIFT: dict[str, tuple[Callable[[Stage], None], str]] = {
    "a persisted driver is gone": (_unpersist, CONFIDENTIAL[1]),
    "the service was stopped": (_stop_service, "sglang-qwen"),
    "the unit was edited": (_edit_unit, "tp 2 -> 4"),
    "the canonical copy was edited": (_edit_copy, "units/sglang-qwen.service"),
    "the boot unit was disabled": (_disable_boot_unit, "agent and boot unit missing or different -> installed"),
    "a GPU was taken from the VM": (_unplug_vm, "vm 200"),
}


def test_drift_shows_in_a_plain_preview_and_a_plain_up_repairs_it(stage: Stage) -> None:
    """Preview without a refresh exits 7 and names all that differs; `up` ends as wanted, with nothing left to do."""
    stage.workspace.edit(split)
    stage.up()
    for make, _ in DRIFT.values():
        make(stage)
    preview = stage.workspace.preview("--expect-no-changes")
    assert preview.status == 7, preview.output
    unsaid = [drift for drift, (_, said) in DRIFT.items() if said not in preview.text]
    assert not unsaid, preview.output
    stage.up()
    assert not stage.wrong(split=True)
    assert stage.workspace.preview("--expect-no-changes").status == 0


def test_a_refresh_sees_drift_as_well(stage: Stage) -> None:
    """`preview --refresh` shows what was observed instead of what was applied, for a binding and a mapping."""
    stage.workspace.edit(split)
    stage.up()
    _unpersist(stage)
    mapping = stage.simulator.root / "etc/pve/mapping/pci.cfg"
    mapping.write_text(mapping.read_text().replace("iommugroup=93", "iommugroup=94"))
    preview = stage.workspace.preview("--refresh", "--diff", "--expect-no-changes")
    assert preview.status == 7, preview.output
    assert "after a boot the default driver" in preview.text, preview.output
    assert "94" in preview.text, preview.output
    stage.up("--refresh")
    assert not stage.wrong(split=True)
