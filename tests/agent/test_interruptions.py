"""Runs that are cut off: by SIGKILL, by a lost connection, by one another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh
import pytest

from tests.agent.conftest import Answer, Hypervisor, until
from tests.agent.requests import NODE_0, NODE_1, UNIT, bind_request, container_request, serve_request, unit_request

if TYPE_CHECKING:
    from collections.abc import Coroutine

pytestmark = pytest.mark.simulator

SPLIT = dict.fromkeys(NODE_0, "nvidia") | dict.fromkeys(NODE_1, "vfio-pci")


def to_vfio(**more: object) -> dict[str, object]:
    """The bind of the split."""
    return bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0, **more)


async def cut_off(run: Coroutine[object, object, Answer]) -> None:
    """Wait for a run that loses its connection: it has no answer."""
    with contextlib.suppress(OSError, asyncssh.Error):
        assert (await run).stdout == ""


def agents(host: Hypervisor) -> list[int]:
    """PIDs of the agent's processes on this simulated host."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            inside = place.name.isdigit() and (place / "cwd").readlink() == host.root
            if inside and b"gpu-topology-agent.pyz" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def kill_agents(host: Hypervisor) -> None:
    """End the agent, and the children that it forked, as an out-of-memory killer does."""
    for pid in agents(host):
        os.kill(pid, signal.SIGKILL)


def overridden(host: Hypervisor, address: str) -> bool:
    """Whether the rebind has reached a card."""
    return address in {event.subject for event in host.simulator.events("override")}  # type: ignore[arg-type]


def test_a_bind_that_was_killed_is_finished_by_the_next_run(kpro6: Hypervisor) -> None:
    """SIGKILL in the middle of a rebind leaves a journal; running again reaches the wanted topology."""
    kpro6.simulator.faults.unbind_hang(NODE_1[1])

    async def scenario() -> None:
        run = asyncio.create_task(kpro6.agent_later("bind", to_vfio(unbind_timeout_s=60)))
        await until(lambda: overridden(kpro6, NODE_1[1]), "the bind does not begin")
        kill_agents(kpro6)
        await run

    asyncio.run(scenario())
    journal = kpro6.ledger()["operation"]
    assert (journal["op"], NODE_1[1] in journal["step"]) == ("bind", True)
    assert kpro6.ledger()["devices"][NODE_1[1]]["found"]["driver"] == "nvidia"
    kpro6.simulator.faults.clear()
    answer = kpro6.agent("bind", to_vfio())
    assert answer.code == 0, answer.stdout
    assert "an earlier bind was cut off" in answer["steps"][0]
    assert kpro6.drivers() == SPLIT
    assert kpro6.ledger()["operation"] is None
    found = kpro6.ledger()["devices"][NODE_1[0]]["found"]
    assert found == {"driver": "nvidia", "override": None, "persisted": None}


def test_a_killed_split_can_be_taken_back(kpro6: Hypervisor) -> None:
    """After a kill the configuration may also be reverted: all eight cards end on nvidia, nobody's card is lost."""
    kpro6.simulator.faults.unbind_hang(NODE_1[2])

    async def scenario() -> None:
        run = asyncio.create_task(kpro6.agent_later("bind", to_vfio(unbind_timeout_s=60)))
        await until(lambda: overridden(kpro6, NODE_1[2]), "the bind does not begin")
        kill_agents(kpro6)
        await run

    asyncio.run(scenario())
    kpro6.simulator.faults.clear()
    kpro6.done("bind", bind_request("serving", NODE_0 + NODE_1, "nvidia"))
    assert set(kpro6.drivers().values()) == {"nvidia"}
    assert {kpro6.device(one)["persisted"] for one in NODE_1} <= {None, "nvidia"}
    assert kpro6.done("serve", serve_request(NODE_0 + NODE_1))["tp"] == 8


def test_a_bind_whose_connection_is_cut_is_finished(kpro6: Hypervisor) -> None:
    """A lost connection stops nobody half-way: the rebind goes on to its end."""

    async def scenario() -> None:
        kpro6.simulator.faults.ssh_cut(after="unbind")  # type: ignore[arg-type]
        await cut_off(kpro6.agent_later("bind", to_vfio()))
        await until(lambda: not agents(kpro6), "the agent does not end")

    asyncio.run(scenario())
    assert kpro6.drivers() == SPLIT
    assert kpro6.ledger()["operation"] is None
    assert not kpro6.done("bind", to_vfio())["changed"]


def test_a_wait_whose_connection_is_cut_leaves_the_service_loading(kpro6: Hypervisor) -> None:
    """Nobody waits any more, so the lock is free again; the service goes on, and the next run does not restart it."""
    kpro6.simulator.faults.slow(8)
    text = kpro6.unit_text() + "# new\n"
    kpro6.done("unit", unit_request(text))
    started = [event.subject for event in kpro6.simulator.events("service.start")].count(UNIT)  # type: ignore[arg-type]

    async def scenario() -> None:
        kpro6.simulator.faults.ssh_cut(after="service.start")  # type: ignore[arg-type]
        await cut_off(kpro6.agent_later("serve", serve_request(NODE_0 + NODE_1)))
        await until(lambda: not agents(kpro6), "the agent does not end")

    asyncio.run(scenario())
    assert kpro6.ledger()["operation"] is None
    result = kpro6.done("serve", serve_request(NODE_0 + NODE_1, deadline_s=60))
    assert not result["restarted"]
    again = [event.subject for event in kpro6.simulator.events("service.start")].count(UNIT)  # type: ignore[arg-type]
    assert again == started + 1


def test_a_container_restart_that_was_killed_is_finished(kpro6: Hypervisor) -> None:
    """Killed between the new lines and the start: the next run starts the container with its cards."""
    kpro6.done("bind", to_vfio())

    async def scenario() -> None:
        run = asyncio.create_task(kpro6.agent_later("container", container_request(NODE_0)))
        await until(lambda: "container.config" in kpro6.kinds(), "the container is not rewritten")
        kill_agents(kpro6)
        await run

    asyncio.run(scenario())
    kpro6.done("container", container_request(NODE_0))
    start = kpro6.simulator.events("container.start")[-1]  # type: ignore[arg-type]
    assert str(start.detail["gpus"]).split(",") == NODE_0
    assert not kpro6.done("container", container_request(NODE_0))["changed"]


def test_one_operation_at_a_time(kpro6: Hypervisor) -> None:
    """A second operation is busy after its wait; one that waits long enough follows the first."""
    kpro6.simulator.faults.unbind_hang(NODE_1[0])

    async def scenario() -> list[Answer]:
        first = asyncio.create_task(kpro6.agent_later("bind", to_vfio(unbind_timeout_s=60)))
        await until(lambda: overridden(kpro6, NODE_1[0]), "the bind does not begin")
        second = await kpro6.agent_later("drain", to_vfio(lock_wait_s=0.3))
        third = asyncio.create_task(kpro6.agent_later("bind", to_vfio(lock_wait_s=60)))
        await asyncio.to_thread(kpro6.simulator.faults.clear)
        return [await first, second, await third]

    first, second, third = asyncio.run(scenario())
    assert (first.code, second.code, third.code) == (0, 6, 0), first.stdout + second.stdout + third.stdout
    assert second["outcome"] == "busy"
    assert (first["changed"], third["changed"]) == (True, False)
