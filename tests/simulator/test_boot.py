"""What a boot does by itself: oneshot units before guests, and device numbers that may move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import run, wait_until
from testbed.simulator.unitfile import seconds
from tests.simulator.host import command_line, marked, marker_of, output

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.simulator import Simulator

SEEN = """
import os, subprocess, sys
print(os.getcwd(), os.getsid(0) == os.getpid(), repr(sys.stdin.read()), os.environ["COLOUR"])
sys.stderr.write(subprocess.run(["pct", "status", "129"], stdout=subprocess.PIPE).stdout.decode())
"""
STEP = """
import sys
word = sys.argv[1] if sys.argv[1:] else "start"
open("./var/log/order", "a").write(word + " ")
raise SystemExit(word == "bad")
"""
PYTHON = "/usr/bin/python3 ./usr/local/lib/steps.py"
NOTE = "open('./var/log/order', 'a').write('{} ')"
SERVICE = "pct exec 129 -- systemctl is-active sglang-qwen"


def install(simulator: Simulator, name: str, script: str, *, unit: str = "", service: str = "") -> None:
    """Put a oneshot unit that runs a Python script on the host, and enable it."""
    (simulator.root / f"usr/local/lib/{name}.py").write_text(script)
    (simulator.root / f"etc/systemd/system/{name}.service").write_text(
        f"[Unit]\n{unit}\n[Service]\nType=oneshot\nExecStart=/usr/bin/python3 ./usr/local/lib/{name}.py\n{service}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    output(simulator, f"systemctl daemon-reload; systemctl enable {name}")


def result(simulator: Simulator, name: str) -> str:
    """How a unit stands: its states, result and exit status."""
    values = output(simulator, f"systemctl show {name} -p ActiveState,SubState,Result,ExecMainStatus --value")
    return " ".join(values.split())


def test_oneshot_unit_runs_before_guests(simulator: Simulator) -> None:
    """An enabled unit's Python runs at boot in the root folder as a session of its own, and guests wait for its end."""
    install(simulator, "early", SEEN, service="Environment=COLOUR=red")
    simulator.reboot()
    lines = output(simulator, "journalctl -u early -o cat -n 20").splitlines()
    assert f"{simulator.root} True '' red" in lines
    assert "status: stopped" in lines
    assert result(simulator, "early") == "inactive dead success 0"
    kinds = (EventKind.HOST_BOOT, EventKind.SERVICE_START, EventKind.SERVICE_EXIT, EventKind.CONTAINER_START)
    told = [(e.kind, e.subject) for e in simulator.events(*kinds) if e.subject != "nvidia-persistenced.service"]
    start = told.index((EventKind.SERVICE_START, "early.service"))
    assert told[start + 1 : start + 3] == [
        (EventKind.SERVICE_EXIT, "early.service"),
        (EventKind.CONTAINER_START, "129"),
    ]


def test_what_a_unit_writes_at_boot_is_in_the_log(simulator: Simulator) -> None:
    """A container's configuration that a boot's unit changed is an event, and what the container starts with."""
    edit = (
        "p = './etc/pve/lxc/129.conf'; t = open(p).read(); open(p, 'w').write(t.replace('nvidia7 dev', 'none dev', 1))"
    )
    install(simulator, "edit", edit)
    simulator.reboot()
    events = simulator.events(EventKind.HOST_BOOT, EventKind.CONTAINER_CONFIG, EventKind.CONTAINER_START)[-3:]
    assert [e.kind for e in events] == [EventKind.HOST_BOOT, EventKind.CONTAINER_CONFIG, EventKind.CONTAINER_START]
    assert len(str(events[-1].detail["gpus"]).split(",")) == 7


def test_commands_of_a_unit_run_in_order(simulator: Simulator) -> None:
    """What comes before, at and behind the start runs in turn, programs by their shims; one with a `-` may fail."""
    lines = (
        f"ExecStartPost={PYTHON} post",
        f"ExecStartPre=-{PYTHON} bad",
        "ExecStartPre=-/usr/bin/udevadm settle --timeout=60",
        f"ExecStart={PYTHON} second",
        "ExecStartPre=/usr/sbin/pct stop 129",
    )
    install(simulator, "steps", STEP, service="\n".join(lines))
    output(simulator, "systemctl start steps")
    assert (simulator.root / "var/log/order").read_text() == "bad start second post "
    assert output(simulator, "pct status 129") == "status: stopped\n"
    assert result(simulator, "steps") == "inactive dead success 0"
    journal = output(simulator, "journalctl -u steps -n 20 -o cat")
    assert "python3 failed with 1, ignored" in journal
    assert "udevadm" not in journal


@pytest.mark.parametrize(
    ("line", "ran", "told"),
    [
        (f"ExecStartPre={PYTHON} bad", "bad ", "exit-code 1"),
        (f"ExecStartPost={PYTHON} bad", "start bad ", "exit-code 1"),
        ("ExecStartPre=/usr/bin/udevadm trigger", "", "exit-code 2"),
        ("ExecStartPre=-/usr/bin/coffee", "", "exit-code 203"),
    ],
)
def test_failed_command_is_the_units_failure(simulator: Simulator, line: str, ran: str, told: str) -> None:
    """A command that fails ends the start there; one that the simulated host cannot run lets none run, `-` or not."""
    install(simulator, "steps", STEP, service=line)
    assert run(simulator, "touch ./var/log/order; systemctl start steps").code == 1
    assert (simulator.root / "var/log/order").read_text() == ran
    assert result(simulator, "steps") == f"failed failed {told}"


def test_commands_beside_a_service_are_refused(simulator: Simulator) -> None:
    """A service that is no oneshot unit of the host does not start without the command that comes before it."""
    text = "[Service]\nExecStart=/usr/bin/nv-hostengine\nExecStartPre=/usr/bin/udevadm settle\n"
    (simulator.root / "etc/systemd/system/engine.service").write_text(text)
    assert "2 commands" in run(simulator, "systemctl start engine").stderr


def test_units_boot_in_the_order_they_ask_for(simulator: Simulator) -> None:
    """After= and Before= decide, whatever the names; a unit of a cycle is left out, and the others run."""
    install(simulator, "a", NOTE.format("a"), unit="After=none.service b.service nvidia-persistenced.service")
    install(simulator, "b", NOTE.format("b"))
    install(simulator, "c", NOTE.format("c"), unit="Before=pve-guests.service\nBefore=b.service")
    simulator.reboot()
    assert (simulator.root / "var/log/order").read_text() == "c b a "
    install(simulator, "c", NOTE.format("c"), unit="Before=b.service\nAfter=a.service")
    simulator.reboot()
    ran = (simulator.root / "var/log/order").read_text().split()[3:]
    assert len(ran) == 2
    (left,) = {"a", "b", "c"} - set(ran)
    assert "ordering cycle" in output(simulator, f"journalctl -u {left} -n 50")


def test_failed_unit_keeps_nothing_from_starting(simulator: Simulator) -> None:
    """A unit that fails is failed with its exit status; later units and guests start, and it may be started again."""
    install(simulator, "bad", "print('no luck'); raise SystemExit(3)")
    install(simulator, "good", NOTE.format("good"), unit="After=bad.service")
    simulator.reboot()
    assert result(simulator, "bad") == "failed failed exit-code 3"
    assert output(simulator, "systemctl is-failed bad") == "failed\n"
    assert "no luck" in output(simulator, "journalctl -u bad -n 5 -o cat")
    assert (simulator.root / "var/log/order").read_text() == "good "
    assert output(simulator, "pct status 129") == "status: running\n"
    assert run(simulator, "systemctl start bad").code == 1
    (simulator.root / "usr/local/lib/bad.py").write_text(NOTE.format("bad"))
    output(simulator, "systemctl start bad")
    assert result(simulator, "bad") == "inactive dead success 0"
    assert (simulator.root / "var/log/order").read_text() == "good bad "


@pytest.mark.parametrize("condition", ["/var/lib/thing", "!/var/lib/thing"])
def test_condition_decides_whether_a_unit_runs(simulator: Simulator, condition: str) -> None:
    """Without what ConditionPathExists= names, or with it after a `!`, the start is no error and runs nothing."""
    install(simulator, "maybe", NOTE.format("ran"), unit=f"ConditionPathExists={condition}")
    note, thing = simulator.root / "var/log/order", simulator.root / "var/lib/thing"
    output(simulator, "systemctl start maybe")
    assert note.exists() is condition.startswith("!")
    note.unlink(missing_ok=True)
    thing.touch()
    output(simulator, "systemctl start maybe")
    assert note.exists() is not condition.startswith("!")
    skipped = f"ConditionPathExists={condition}"
    assert skipped in output(simulator, "journalctl -u maybe -o cat -n 20")
    assert result(simulator, "maybe") == "inactive dead success 0"


def test_unit_is_ended_at_its_limit(simulator: Simulator) -> None:
    """At TimeoutStartSec= the process and its children are ended, and the unit is failed for that."""
    child = "import subprocess; print('begun', flush=True); subprocess.run(['tail', '-f', '/dev/null'])"
    install(simulator, "slow", child, service="TimeoutStartSec=1")
    marker = marker_of(simulator)
    assert run(simulator, "systemctl start slow").code == 1
    assert result(simulator, "slow").startswith("failed failed timeout")
    assert "timed out" in output(simulator, "journalctl -u slow -o cat -n 9")
    assert not any(b"tail" in command_line(pid) for pid in marked(marker))


@pytest.mark.parametrize("end", ["systemctl stop endless", "power-off"])
def test_unit_that_still_starts_can_be_ended(simulator: Simulator, end: str) -> None:
    """A start job without limit keeps neither `systemctl stop` nor a power-off waiting."""
    after = "ExecStartPost=/usr/bin/python3 -c \"open('./var/log/order', 'w')\""
    install(simulator, "endless", "import time; time.sleep(10000)", service=after)
    run(simulator, "systemctl disable endless; systemctl start endless >/dev/null 2>&1 </dev/null &")
    wait_until(lambda: run(simulator, "systemctl is-active endless").stdout == "activating\n")
    if end == "power-off":
        simulator.reboot()
    else:
        output(simulator, end)
        assert result(simulator, "endless") == "failed failed signal -15"
    assert [e.subject for e in simulator.events(EventKind.SERVICE_EXIT)] == ["endless.service"]
    assert not (simulator.root / "var/log/order").exists()


def test_unit_is_known_as_others_are(simulator: Simulator) -> None:
    """is-enabled follows enable and disable; a unit whose file is deleted is forgotten, and never runs again."""
    install(simulator, "early", NOTE.format("early"))
    assert output(simulator, "systemctl is-enabled early") == "enabled\n"
    output(simulator, "systemctl disable early")
    assert run(simulator, "systemctl is-enabled early").stdout == "disabled\n"
    simulator.reboot()
    output(simulator, "systemctl enable early; rm ./etc/systemd/system/early.service; systemctl daemon-reload")
    assert "LoadState=not-found" in output(simulator, "systemctl show early.service -p LoadState")
    simulator.reboot()
    assert not (simulator.root / "var/log/order").exists()
    assert run(simulator, "systemctl start early").code == 5


def test_time_spans_are_systemds() -> None:
    """Seconds without a unit, sums of units, and two ways to say that there is no limit."""
    assert [seconds(text) for text in ("180", "1min 30s", "3min", "500ms")] == [180, 90, 180, 0.5]
    assert [seconds(text) for text in ("infinity", "0")] == [None, None]


def test_boot_may_give_other_majors(simulator: Simulator) -> None:
    """With uvm's major moved, raw lines for the old one leave nvidia-smi its cards, and CUDA none."""
    simulator.reboot(uvm_major=510, caps_major=235)
    devices = (simulator.root / "proc/devices").read_text()
    assert "510 nvidia-uvm\n" in devices
    assert "235 nvidia-caps\n" in devices
    assert len(output(simulator, "pct exec 129 -- nvidia-smi -L").splitlines()) == 8
    wait_until(lambda: run(simulator, SERVICE).stdout == "failed\n")
    assert "0 visible devices" in output(simulator, "pct exec 129 -- journalctl -u sglang-qwen -n 99")
    ready = len(simulator.events(EventKind.SERVICE_READY))
    simulator.reboot()
    assert "511 nvidia-uvm\n" in (simulator.root / "proc/devices").read_text()
    wait_until(lambda: len(simulator.events(EventKind.SERVICE_READY)) == ready + 1)


def test_device_entries_follow_the_majors(simulate: Callable[[str], Simulator]) -> None:
    """dev[n] entries name nodes, whose numbers are those of the boot that the container starts in."""
    host = simulate("two-functions")
    ready = len(host.events(EventKind.SERVICE_READY))
    host.reboot(uvm_major=510)
    wait_until(lambda: len(host.events(EventKind.SERVICE_READY)) == ready + 1)
