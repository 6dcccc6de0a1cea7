"""Parsing at the agent's edge: addresses, requests, hostpci entries, mappings, units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from host.agent import vm_config
from host.agent.facts_devices import properties, vfio_ids
from host.agent.facts_services import assignments
from host.agent.guests import parse_list
from host.agent.pci import Address, parse_address
from host.agent.processes import allowed
from host.agent.request import Request, Service
from host.agent.result import BadRequestError
from host.agent.root import Root
from host.agent.service import tp_of, unit_tp

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.conftest import Files


@pytest.mark.parametrize("text", ["81:00.0", "0000:81:00.0", " 0000:81:00.0 "])
def test_addresses_have_one_form(text: str) -> None:
    """With and without domain, an address is the same."""
    assert parse_address(text) == "0000:81:00.0"


@pytest.mark.parametrize("text", ["", "81:00", "81:00.9", "4860", "0000:81:20.0", "gpu0"])
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    """The message shows the value and the form."""
    with pytest.raises(BadRequestError, match=r'write it as "81:00\.0"'):
        parse_address(text)


@pytest.mark.parametrize(
    ("fields", "read", "message"),
    [
        ({}, lambda r: r.text("pool"), "field pool is None: it must be a string"),
        ({"vmid": "129"}, lambda r: r.number("vmid"), "field vmid is '129': it must be a whole number"),
        ({"vmid": True}, lambda r: r.number("vmid"), "whole number"),
        ({"start": 1}, lambda r: r.flag("start", default=False), "true or false"),
        ({"devices": "x"}, lambda r: r.addresses("devices"), "field devices is 'x': it must be a list"),
        ({"devices": [4860]}, lambda r: r.addresses("devices"), r"devices\[0\] is 4860: a PCI address is a string"),
        ({"managed": {"services": [{}]}}, lambda r: r.managed(), r"managed\.services\[0\]\.unit is None"),
        (
            {"environment": {"A": 1}},
            lambda r: r.environment("environment"),
            r"environment\.A is 1: it must be a string",
        ),
        ({"timeouts": {"a": "x"}}, lambda r: r.seconds("a", 1), r"timeouts\.a is 'x': it must be a number"),
    ],
)
def test_a_bad_field_is_named(fields: Any, read: Any, message: str) -> None:
    """A request that doesn't fit says which field, which value, and what it must be."""
    with pytest.raises(BadRequestError, match=message):
        read(Request.of(fields))


def test_a_request_that_is_no_object_is_refused() -> None:
    """The request is one JSON object."""
    with pytest.raises(BadRequestError, match="must be a JSON object"):
        Request.of([1])


def test_limits_are_read_at_the_top_or_among_timeouts() -> None:
    """Both places work, and the default holds where there is none."""
    assert Request.of({"a": 1}).seconds("a", 9) == 1
    assert Request.of({"timeouts": {"a": 2.5}}).seconds("a", 9) == 2.5
    assert Request.of({}).seconds("a", 9) == 9


def test_a_service_without_a_name_has_its_unit_s() -> None:
    """The name is for people."""
    assert Request.of({"unit": "x.service", "container": None}).service() == Service("x.service", "x.service", None)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("mapping=a,pcie=1,rombar=0", "pcie=1,rombar=0,mapping=a", True),
        ("mapping=a,pcie=0", "mapping=a", True),
        ("mapping=a,rombar=1", "mapping=a,rombar=0", False),
        ("81:00", "host=81:00", True),
        ("mapping=a", "mapping=b", False),
    ],
)
def test_hostpci_entries_are_compared_by_meaning(one: str, other: str, same: bool) -> None:
    """Order and Proxmox's defaults make no difference."""
    assert vm_config.same_meaning(one, other) is same


def test_hostpci_entries_of_snapshots_and_pending_changes_do_not_count() -> None:
    """Only what the VM has now."""
    text = "hostpci10: 81:00\nhostpci2: mapping=a\n\n[PENDING]\nhostpci0: x\n[snap]\nhostpci1: y\n"
    assert vm_config.hostpci(text) == {"hostpci2": "mapping=a", "hostpci10": "81:00"}


def test_a_vm_refers_to_devices_by_mapping_slot_or_address(files: Files) -> None:
    """All of Proxmox's ways to name a device are understood."""
    files.put("/etc/pve/mapping/pci.cfg", "gpus\n\tmap id=1:2,node=n,path=0000:81:00.0\n\tmap node=n,path=0000:91:00\n")
    config = "hostpci0: mapping=gpus\nhostpci1: 0000:e1:00,pcie=1\nhostpci2: host=f1:00.0;01:00.0\n"
    devices = [Address(f"0000:{bus}:00.0") for bus in ("01", "81", "91", "e1", "f1", "11")]
    assert vm_config.refers_to(config, devices, Root(files.folder)) == tuple(devices[:5])


def test_mappings_and_descriptions_are_read_as_proxmox_writes_them() -> None:
    """Names, several entries, and a description."""
    entries = "\tmap id=10de:2bb5,node=n,path=0000:81:00.0\n\tmap node=n,path=x\n"
    text = f"a\n\tdescription four cards\n{entries}\nb\n\tmap path=y\n"
    assert [len(entries) for entries in vm_config.mappings(text).values()] == [2, 1]
    assert vm_config.mappings(text)["a"][0] == {"id": "10de:2bb5", "node": "n", "path": "0000:81:00.0"}
    assert vm_config.descriptions(text) == {"a": "four cards"}


def test_guest_lists_are_read_by_their_header() -> None:
    """`pct list` and `qm list` have their columns in another order."""
    assert parse_list("VMID       Status     Lock         Name\n129        running                 x\n") == {
        129: "running"
    }
    assert parse_list("      VMID NAME                 STATUS     MEM(MB)\n       200 running  stopped 1\n") == {
        200: "stopped"
    }
    assert parse_list("") == {}


def test_systemctl_show_may_repeat_a_name() -> None:
    """Several environment files are several lines of one name."""
    text = "EnvironmentFiles=/a (ignore_errors=no)\nEnvironmentFiles=/b (ignore_errors=yes)\nMainPID=3\n"
    assert properties(text) == {"EnvironmentFiles": "/a (ignore_errors=no) /b (ignore_errors=yes)", "MainPID": "3"}


def test_environment_files_are_read_as_systemd_does() -> None:
    """Comments are left out, quotes taken off."""
    assert assignments("# x\n;y=1\nA=1\n B='2 3'\nC=\"4\"\nD=un'closed\nnothing\n") == {
        "A": "1",
        "B": "2 3",
        "C": "4",
        "D": "un'closed",
    }


def test_only_variables_that_decide_how_it_runs_are_told_and_no_secret() -> None:
    """The allow-list is by prefix, minus what looks like a secret."""
    given = {"NCCL_P2P_DISABLE": "1", "SGLANG_API_KEY": "s", "CUDA_TOKEN": "s", "HOME": "/", "TORCH_X": "1"}
    assert allowed(given) == {"NCCL_P2P_DISABLE": "1", "TORCH_X": "1"}


@pytest.mark.parametrize(
    ("words", "tp"),
    [
        (["--tp", "8"], 8),
        (["--tp-size=4"], 4),
        (["--tp", "8", "--tensor-parallel-size", "2"], 2),
        (["--tp", "x"], None),
        (["--tp"], None),
        (["--port", "1"], None),
    ],
)
def test_tensor_parallelism_is_read_from_arguments(words: list[str], tp: int | None) -> None:
    """All of SGLang's names, both forms; the last one counts."""
    assert tp_of(words) == tp


def test_tensor_parallelism_is_read_from_a_unit() -> None:
    """Over continued lines; 1 where none is named, unknown where there is no command."""
    assert unit_tp("[Service]\nExecStart=/x/python -m sglang.launch_server \\\n  --tp 8 \\\n  --port 1\n") == 8
    assert unit_tp("[Service]\nExecStart=/x\n") == 1
    assert unit_tp("[Unit]\n") is None


def test_ids_given_to_vfio_are_found(tmp_path: Path, files: Files) -> None:
    """In modprobe's files and on the kernel command line; nothing else counts."""
    files.put(
        "/etc/modprobe.d/vfio.conf",
        "# options vfio-pci ids=1:1\noptions vfio-pci disable_vga=1 ids=10DE:2bb5,10de:22e8\n",
    )
    files.put("/etc/modprobe.d/x.conf.bak", "options vfio-pci ids=9:9\n")
    files.put("/proc/cmdline", "quiet vfio-pci.ids=8086:1 x\n")
    assert vfio_ids(Root(tmp_path)) == ["10de:2bb5", "10de:22e8", "8086:1"]
