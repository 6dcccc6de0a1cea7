from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tests.plugins.fake_proxmox import NODE, TOKEN, FakeProxmox, fake_proxmox
from tests.plugins.ssh_host import PASSWORD, SshHost, ssh_host
from tests.plugins.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

pytestmark = pytest.mark.engine

_T = TypeVar("_T")

COMMANDS = """
import json
import pulumi
from pulumi_command import remote

inputs = json.load(open("inputs.json"))
connection = remote.ConnectionArgs(**inputs["connection"])
first = remote.Command("first", connection=connection, **inputs["first"])
remote.Command("second", connection=connection, create=pulumi.Output.concat("echo got ", first.stdout, " > second"))
remote.CopyToRemote(
    "copy", connection=connection, source=pulumi.StringAsset(inputs["text"]), remote_path="copied",
    opts=pulumi.ResourceOptions(depends_on=[first]),
)
pulumi.export("out", first.stdout)
"""

GUESTS = """
import json
import pulumi
import pulumi_proxmoxve as proxmoxve

inputs = json.load(open("inputs.json"))
replacing = pulumi.ResourceOptions(replace_on_changes=inputs.get("replacing", []), delete_before_replace=True)
gpu = proxmoxve.hardware.mapping.Pci("gpu", name=inputs["name"], maps=inputs["maps"], opts=replacing)
proxmoxve.VmLegacy(
    "vm", node_name="pve1", vm_id=200, name="confidential", stop_on_destroy=True,
    disks=[{"interface": "scsi0", "datastore_id": "local-lvm", "size": 8}],
    hostpcis=[{"device": f"hostpci{n}", "mapping": gpu.name, "pcie": True} for n in range(inputs["count"])],
)
pulumi.export("release", proxmoxve.get_version().release)
displays = proxmoxve.hardware.GetPciFiltersArgs(class_="03")
pulumi.export("devices", len(proxmoxve.hardware.get_pci(node_name="pve1", filters=displays).devices))
"""


@contextlib.contextmanager
def _served(context: AbstractAsyncContextManager[_T]) -> Iterator[_T]:
    """An asynchronous server, on a loop of its own, beside the blocking test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    async def ended() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        served: _T = call(context.__aenter__())
        try:
            yield served
        finally:
            call(context.__aexit__(None, None, None))
            call(ended())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SshHost]:
    """A host to run commands on."""
    root = tmp_path / "host"
    root.mkdir()
    with _served(ssh_host(root)) as found:
        yield found


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeProxmox]:
    """A Proxmox API."""
    with _served(fake_proxmox(tmp_path)) as (found, _):
        yield found


def _connection(host: SshHost, **changes: Any) -> dict[str, Any]:
    found = {"host": "127.0.0.1", "port": host.port, "user": "root", "password": PASSWORD}
    return {**found, "host_key": host.public_line, "dial_error_limit": 0, **changes}


def test_commands_live_through_preview_up_change_and_destroy(tmp_path: Path, host: SshHost) -> None:
    """The engine previews without running, creates, updates, replaces by triggers alone, and destroys."""
    stack = Stack.make(tmp_path, COMMANDS)
    first: dict[str, Any] = {"create": "echo C >> log; echo one", "delete": "echo D >> log", "triggers": [1]}
    first["add_previous_output_in_env"] = False
    given = {"connection": _connection(host), "text": "content", "first": first}
    stack.give(**given)

    assert "4 to create" in stack.run("preview")
    assert host.attempts == 0

    printed = stack.up()
    assert "one" in printed
    assert (host.read("second"), host.read("copied"), host.read("log")) == ("got one\n", "content", "C\n")
    stack.settled("--refresh")

    first["update"] = "echo U >> log; echo two"
    stack.give(**given)
    assert "2 to update" in stack.run("preview")
    assert "2 updated" in stack.up()
    assert (host.read("second"), host.read("log")) == ("got two\n", "C\nU\n")

    first["triggers"] = [2]
    stack.give(**given)
    assert "1 replaced" in stack.up()
    assert host.read("log") == "C\nU\nC\nD\n"

    state = stack.state()
    assert PASSWORD not in str(state)
    assert state["first"]["outputs"]["stdout"] == "one"
    stack.run("destroy", "--yes", "--skip-preview")
    assert host.read("log") == "C\nU\nC\nD\nD\n"
    assert host.exists("copied")


def test_a_failing_command_is_shown_and_tried_again(tmp_path: Path, host: SshHost) -> None:
    """A failed creation leaves nothing in the state, a failed update the old state; the next up tries again."""
    stack = Stack.make(tmp_path, COMMANDS)
    first: dict[str, Any] = {"create": "test -e ready || { echo not ready; exit 7; }", "logging": "none"}
    given = {"connection": _connection(host), "text": "content", "first": first}
    stack.give(**given)
    printed = stack.up(status=1)
    assert 'Process exited with status 7: running "test -e ready || { echo not ready; exit 7; }":' in printed
    assert "not ready" in printed
    assert "first" not in stack.state()
    host.write("ready")
    stack.up()

    (host.root / "ready").unlink()
    first["stdin"] = "changed"
    stack.give(**given)
    assert "not ready" in stack.up(status=1)
    assert "stdin" not in stack.state()["first"]["inputs"]
    host.write("ready")
    assert "1 updated" in stack.up()


def test_an_interrupted_up_ends_what_runs(tmp_path: Path, host: SshHost) -> None:
    """Ctrl-C ends a command that would run on, and nothing of it is in the state."""
    stack = Stack.make(tmp_path, COMMANDS)
    stack.give(connection=_connection(host), text="content", first={"create": "touch begun; sleep 600"})
    assert "cancelled" in stack.interrupt(lambda: host.exists("begun"))
    assert "first" not in stack.state()


def test_a_mistake_in_the_inputs_is_found_by_the_preview(tmp_path: Path, host: SshHost) -> None:
    """A check failure names the property before anything is run."""
    stack = Stack.make(tmp_path, COMMANDS)
    stack.give(connection=_connection(host, port="22a"), text="content", first={"create": "true", "logging": "all"})
    printed = stack.run("preview", status=1)
    assert "must be one of stdout, stderr, stdoutAndStderr, none, not 'all'" in printed
    assert "must be a number, not a string" in printed


def _variables(api: FakeProxmox) -> dict[str, str]:
    return {"PROXMOX_VE_ENDPOINT": api.url, "PROXMOX_VE_API_TOKEN": TOKEN, "PROXMOX_VE_INSECURE": "true"}


def test_mappings_and_vms_live_through_drift_and_destroy(tmp_path: Path, api: FakeProxmox) -> None:
    """The engine creates, sees no change, repairs what was removed or changed by hand, shrinks, and destroys."""
    stack = Stack.make(tmp_path, GUESTS, **_variables(api))
    maps = [{"id": "10de:2bb5", "node": NODE, "path": f"0000:{bus}:00.0"} for bus in ("81", "c1")]
    stack.give(name="gpu", maps=maps, count=2)
    stack.run("preview")
    assert (api.mappings, api.vms) == ({}, [])

    printed = stack.up()
    assert "3 created" in printed
    assert len(api.mappings["gpu"]["map"]) == 2
    assert api.vm(200).status == "running"
    stack.settled()
    stack.settled("--refresh")

    api.mappings.clear()
    api.vm(200).status = "stopped"
    stack.run("preview", "--refresh", "--expect-no-changes", status=7)
    stack.up("--refresh")
    assert list(api.mappings) == ["gpu"]
    assert api.vm(200).status == "running"

    stack.give(name="gpu", maps=maps, count=1)
    assert "1 updated" in stack.up()
    assert "hostpci1" not in api.vm(200).config
    stack.settled("--refresh")

    stack.give(name="renamed", maps=maps, count=1)
    assert "mapping 'renamed' not found" in stack.up(status=1)
    stack.give(name="renamed", maps=maps, count=1, replacing=["name"])
    stack.up()
    assert list(api.mappings) == ["renamed"]
    assert api.vm(200).config["hostpci0"].startswith("mapping=renamed,")
    stack.run("destroy", "--yes", "--skip-preview")
    assert (api.mappings, api.vms) == ({}, [])
    assert TOKEN not in printed


def test_a_vm_that_does_not_start_is_kept_and_started_by_the_next_up(tmp_path: Path, api: FakeProxmox) -> None:
    """The VM of a failed start is in the state, so that the next up starts it rather than make another."""
    stack = Stack.make(tmp_path, GUESTS, **_variables(api))
    stack.give(name="gpu", maps=[{"id": "10de:2bb5", "node": NODE, "path": "0000:81:00.0"}], count=1)
    api.fail("POST", "/status/start", 500, "no free device in mapping", times=1)
    assert "no free device in mapping" in stack.up(status=1)
    assert stack.state()["vm"]["id"] == "200"
    stack.up()
    assert api.vm(200).status == "running"
    stack.settled("--refresh")
