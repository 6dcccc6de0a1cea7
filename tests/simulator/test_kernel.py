"""The kernel's driver model, by writes to sysfs from the host's python3."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import connection, run, wait_until
from tests.simulator.host import DEVICES, DRIVERS, FIRST, NEXT, NODE_0, driver_of, free, output, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.simulator import Simulator

READ = "import signal, sys; signal.alarm(3); print(open(sys.argv[1]).read())"


def test_override_reads_null_until_it_is_set(simulator: Simulator) -> None:
    """`driver_override` reads "(null)", then what was written, and "(null)" again after a newline alone."""
    attribute = simulator.root / DEVICES / FIRST / "driver_override"
    assert attribute.read_text() == "(null)\n"
    assert write(simulator, (f"{DEVICES}/{FIRST}/driver_override", "vfio-pci\n")) == ["ok"]
    assert attribute.read_text() == "vfio-pci\n"
    assert write(simulator, (f"{DEVICES}/{FIRST}/driver_override", "\n")) == ["ok"]
    assert attribute.read_text() == "(null)\n"


def test_device_changes_hands_by_override(simulator: Simulator) -> None:
    """Override, unbind and probe move one GPU to vfio-pci: node, minor and /proc entry go, the group's node comes."""
    free(simulator)
    output(simulator, "modprobe vfio-pci")
    minor = simulator.root / "dev/nvidia4"
    assert minor.exists()
    answers = write(
        simulator,
        (f"{DEVICES}/{FIRST}/driver_override", "vfio-pci"),
        (f"{DEVICES}/{FIRST}/driver/unbind", FIRST),
        ("sys/bus/pci/drivers_probe", FIRST),
    )
    assert answers == ["ok", "ok", "ok"]
    assert driver_of(simulator, FIRST) == "vfio-pci"
    assert not minor.exists()
    assert not (simulator.root / "proc/driver/nvidia/gpus" / FIRST).exists()
    assert (simulator.root / "dev/vfio/93").exists()
    kinds = [e.kind for e in simulator.events(EventKind.OVERRIDE, EventKind.UNBIND, EventKind.BIND)][-3:]
    assert kinds == [EventKind.OVERRIDE, EventKind.UNBIND, EventKind.BIND]


def test_bind_answers_the_kernels_errnos(simulator: Simulator) -> None:
    """Binding a bound device is EBUSY, a mismatch or an unknown device ENODEV, as is unbinding from another driver."""
    output(simulator, "modprobe vfio-pci")
    answers = write(
        simulator,
        (f"{DRIVERS}/nvidia/bind", FIRST),
        (f"{DRIVERS}/vfio-pci/bind", FIRST),
        (f"{DRIVERS}/nvidia/bind", "0000:42:00.0"),
        (f"{DRIVERS}/vfio-pci/unbind", FIRST),
        ("sys/bus/pci/drivers_probe", "0000:42:00.0"),
        (f"{DRIVERS}/vfio-pci/new_id", "10de"),
    )
    assert answers == ["EBUSY", "ENODEV", "ENODEV", "ENODEV", "ENODEV", "EINVAL"]


def test_driver_folder_appears_with_the_module(simulator: Simulator) -> None:
    """vfio-pci is no driver before its module is loaded, and an unknown module is an error."""
    assert not (simulator.root / DRIVERS / "vfio-pci").exists()
    output(simulator, "modprobe vfio-pci")
    assert (simulator.root / DRIVERS / "vfio-pci/bind").is_file()
    assert run(simulator, "modprobe nouveau").code == 1


def test_new_id_takes_every_free_card_of_the_kind(simulator: Simulator) -> None:
    """An id given to vfio-pci claims all identical cards that have no driver, and none that has one."""
    free(simulator)
    output(simulator, "modprobe vfio-pci")
    write(simulator, (f"{DRIVERS}/nvidia/unbind", FIRST), (f"{DRIVERS}/nvidia/unbind", NEXT))
    assert write(simulator, *[(f"{DRIVERS}/vfio-pci/new_id", "10de 2bb5")] * 2) == ["ok", "EEXIST"]
    assert [driver_of(simulator, a) for a in (FIRST, NEXT)] == ["vfio-pci", "vfio-pci"]
    assert driver_of(simulator, NODE_0[0]) == "nvidia"


def test_unbind_in_use_waits_for_the_last_holder(simulator: Simulator) -> None:
    """An unbind of a GPU in use blocks, reads of driver_override block with it, and it ends with the last close."""
    stop = "pct exec 129 -- systemctl stop sglang-qwen; systemctl stop nvidia-persistenced"
    path = f"./{DEVICES}/{FIRST}/driver_override"

    async def race() -> None:
        async with connection(simulator) as client:
            script = (
                f"import os; os.write(os.open('./{DRIVERS}/nvidia/unbind', os.O_WRONLY), b'{FIRST}'); print('done')"
            )
            writer = await client.create_process(f'python3 -c "{script}"')
            await asyncio.to_thread(wait_until, (simulator.root / path).is_fifo)
            assert driver_of(simulator, FIRST) == "nvidia"
            reader = await client.create_process(f"python3 -c '{READ}' {path}")
            await client.run(stop, check=True)
            assert await writer.stdout.read() == "done\n"
            assert (await reader.wait()).stdout == "(null)\n\n"

    asyncio.run(race())
    assert driver_of(simulator, FIRST) is None
    assert (simulator.root / path).is_file()


def test_hanging_unbind_wedges_its_readers(simulator: Simulator) -> None:
    """An unbind that never returns makes readers, driverctl and nvidia-smi wait, and says so in the kernel log."""
    free(simulator)
    simulator.faults.unbind_hang(FIRST)
    script = f"import os; os.write(os.open('./{DRIVERS}/nvidia/unbind', os.O_WRONLY), b'{FIRST}')"
    assert run(simulator, f'timeout 0.5 python3 -c "{script}" >/dev/null 2>&1').code == 124
    for command in (f"cat ./{DEVICES}/{FIRST}/driver_override", "driverctl list-devices", "nvidia-smi -L"):
        assert run(simulator, f"timeout 0.3 {command}").code == 124
    assert "non-zero usage count" in output(simulator, "dmesg")
    assert output(simulator, f"cat ./{DEVICES}/{NEXT}/driver_override") == "(null)\n"
    simulator.faults.clear()
    wait_until(lambda: driver_of(simulator, FIRST) is None)
    assert "GPU 6" in output(simulator, "nvidia-smi -L")


@pytest.mark.parametrize(
    ("redirection", "held"), [("", True), ("3>&1 >/dev/null 2>&1", True), (">/dev/null 2>&1 </dev/null", False)]
)
def test_killed_writer_keeps_its_commands_channel(simulator: Simulator, redirection: str, *, held: bool) -> None:
    """A writer that hangs in the kernel keeps the pipes that it has open, though killed, and no others."""
    free(simulator)
    simulator.faults.unbind_hang(FIRST)
    attribute = f"./{DEVICES}/{FIRST}/driver_override"
    unbind = f"import os; os.write(os.open('./{DRIVERS}/nvidia/unbind', os.O_WRONLY), b'{FIRST}')"
    script = (
        f'python3 -c "{unbind}" {redirection} & until [ -p {attribute} ]; do sleep 0.02; done; '
        "kill -KILL $!; wait $!; echo $$ $?"
    )

    async def scenario() -> None:
        async with connection(simulator) as client, connection(simulator) as other:
            command = await client.create_process(script)
            shell, status = (await command.stdout.readline()).split()
            assert status == "137"
            ended = asyncio.create_task(command.wait())
            if held:
                await other.run(f"while kill -0 {shell}; do sleep 0.02; done", check=True)
                await other.run("true", check=True)
                await client.run("true", check=True)
                assert not ended.done()
                await asyncio.to_thread(simulator.faults.clear)
            assert (await ended).exit_status == 0
            assert (simulator.root / attribute).is_fifo() is not held

    asyncio.run(scenario())


def test_probe_that_fails_shows_only_in_the_driver_link(simulator: Simulator) -> None:
    """With a failing probe, bind says EIO, drivers_probe says nothing, and the device has no driver."""
    free(simulator)
    simulator.faults.bind_fail(FIRST)
    answers = write(
        simulator,
        (f"{DRIVERS}/nvidia/unbind", FIRST),
        (f"{DRIVERS}/nvidia/bind", FIRST),
        ("sys/bus/pci/drivers_probe", FIRST),
    )
    assert answers == ["ok", "EIO", "ok"]
    assert driver_of(simulator, FIRST) is None


def test_lowest_free_minor_is_given_again(simulator: Simulator) -> None:
    """A GPU that comes back takes the lowest free minor, which another may have had."""
    free(simulator)
    bind, unbind = f"{DRIVERS}/nvidia/bind", f"{DRIVERS}/nvidia/unbind"
    write(simulator, (unbind, NODE_0[1]), (unbind, FIRST), (bind, FIRST), (bind, NODE_0[1]))
    gpus = simulator.root / "proc/driver/nvidia/gpus"
    assert "Device Minor: \t 1\n" in (gpus / FIRST / "information").read_text()
    assert "Device Minor: \t 4\n" in (gpus / NODE_0[1] / "information").read_text()


def test_removed_device_comes_back_with_a_rescan(simulator: Simulator) -> None:
    """`remove` takes the device off the bus, `rescan` finds it, and its driver takes it again."""
    free(simulator)
    assert write(simulator, (f"{DEVICES}/{FIRST}/remove", "1")) == ["ok"]
    assert not (simulator.root / DEVICES / FIRST).exists()
    assert write(simulator, ("sys/bus/pci/rescan", "1")) == ["ok"]
    assert driver_of(simulator, FIRST) == "nvidia"


def test_reset_is_for_single_function_cards(simulate: Callable[[str], Simulator]) -> None:
    """A Server card can be reset alone; a card with an audio function has the bus reset only, which is refused."""
    assert write(simulate("kpro6"), (f"{DEVICES}/{FIRST}/reset", "1")) == ["ok"]
    assert write(simulate("two-functions"), (f"{DEVICES}/{FIRST}/reset", "1")) == ["ENOTTY"]


def test_plain_open_of_an_attribute_is_refused(simulator: Simulator) -> None:
    """A write through a file object fails loudly, since the simulator could not tell its errno."""
    done = run(simulator, f"python3 -c \"open('./{DRIVERS}/nvidia/unbind', 'w')\"")
    assert "write kernel attributes by os.open and os.write" in done.stderr


def test_isolated_child_with_empty_environment_sees_the_kernel(simulator: Simulator) -> None:
    """Attributes behave for `python3 -I` in an empty environment and for children that it forks."""
    script = (
        "import os\n"
        "if os.fork() == 0:\n"
        f"    fd = os.open('./{DEVICES}/{FIRST}/driver_override', os.O_WRONLY)\n"
        "    os.write(fd, b'none'); os._exit(0)\n"
        "os.wait()"
    )
    output(simulator, f'p=$(command -v python3); env -i $p -I -c "{script}"')
    assert (simulator.root / DEVICES / FIRST / "driver_override").read_text() == "none\n"
