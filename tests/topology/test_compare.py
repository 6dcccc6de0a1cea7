"""What was found is compared with what is wanted by meaning: units, processes, mappings, VMs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.facts import hosts
from topology.compare import (
    Overlay,
    WantedUnit,
    hostpci,
    hostpci_changes,
    mapped_hostpci_count,
    mapping_changes,
    process_changes,
    same_devices,
    unit_changes,
)
from topology.facts import MappingFacts, ProcessFacts, VmFacts

WANTED = WantedUnit(
    service="s",
    command=("/bin/python", "-m", "sglang.launch_server"),
    flags={"tp": ("4",), "port": ("30000",), "trust-remote-code": (), "mem-fraction-static": ("0.9",)},
    environment={"NCCL_P2P_DISABLE": "1", "HF_HOME": "/models"},
    environment_files=(),
    working_directory="/opt/sglang",
    user="root",
    numa_node=0,
    to_be_enabled=True,
)
UNIT = """\
# written by hand
[Service]
WorkingDirectory=/opt/sglang
TimeoutStartSec=1800
Environment="HF_HOME=/models"   NCCL_P2P_DISABLE=1
ExecStart=-/bin/python -m sglang.launch_server --trust-remote-code \\
   --mem-fraction-static=0.90 --port 30000 \\
   --tensor-parallel-size 4
[Install]
WantedBy=multi-user.target
"""
SPLIT = hosts.facts("kpro6", "split")
(MAPPING,) = hosts.plan(hosts.split(), SPLIT).spec.mappings


def said(text: str, wanted: WantedUnit = WANTED, overlay: Overlay | None = None) -> list[str]:
    """The changes of a unit as text."""
    return [str(change) for change in unit_changes(text, wanted, overlay or Overlay())]


def test_another_spelling_of_the_same_is_no_change() -> None:
    """Order, aliases, quoting, comments, prefixes and directives nobody speaks of make no difference."""
    assert said(UNIT) == []


def test_a_unit_that_nobody_starts_at_boot_needs_no_install_section() -> None:
    """Where the service is not to be enabled, [Install] is the owner's business; any of its directives enables."""
    plain = UNIT.partition("[Install]")[0]
    assert said(plain, replace(WANTED, to_be_enabled=False)) == []
    assert said(f"{plain}[Install]\nAlias=ai.service\n") == []


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ("--tensor-parallel-size 4", "--tp-size=8", "service s: tp 8 -> 4"),
        ("--port 30000", "", "service s: --port absent -> 30000"),
        ("--port 30000", "--port 30000 --dtype half", "service s: --dtype half -> absent"),
        (" --trust-remote-code", " ", "service s: --trust-remote-code absent -> set"),
        ("--port 30000", "--port 30000 --api-key hunter2", "service s: --api-key *** -> absent"),
        ("NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE=0", "service s: environment NCCL_P2P_DISABLE 0 -> 1"),
        ("NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE=1 HF_TOKEN=x", "service s: environment HF_TOKEN *** -> absent"),
        (
            "/bin/python ",
            "/usr/bin/python ",
            "service s: command /usr/bin/python -m sglang.launch_server -> /bin/python -m sglang.launch_server",
        ),
        ("WorkingDirectory=/opt/sglang", "User=ai", "service s: WorkingDirectory absent -> /opt/sglang"),
        ("WorkingDirectory=/opt/sglang", "WorkingDirectory=/opt/sglang\nUser=ai", "service s: User ai -> root"),
        ("TimeoutStartSec=1800", "NUMAMask=1", "service s: NUMA node 1 -> 0"),
        ("WantedBy=multi-user.target", "", "service s: [Install] absent -> WantedBy=multi-user.target"),
        ("TimeoutStartSec=1800", "EnvironmentFile=-/etc/x", "service s: environment files /etc/x -> none"),
        (
            "ExecStart=-/bin",
            "ExecStart=/bin/true\nExecStart=/bin",
            "service s: ExecStart 2 commands -> /bin/python -m sglang.launch_server",
        ),
    ],
)
def test_each_difference_is_named(before: str, after: str, change: str) -> None:
    """A change says what it was and what it will be, without a secret's value."""
    assert before in UNIT
    assert change in said(UNIT.replace(before, after))


def test_what_the_configuration_leaves_open_may_be_anything() -> None:
    """Without a user and a folder in the configuration, those found are as wanted."""
    wanted = replace(WANTED, user=None, working_directory=None)
    assert said(UNIT.replace("TimeoutStartSec", "User=ai\nTimeoutStartSec"), wanted) == []


def test_the_effective_environment_counts_wherever_it_comes_from() -> None:
    """A drop-in, an environment file or nccl.conf can satisfy a variable, and an override of one is a change."""
    bare = UNIT.replace("NCCL_P2P_DISABLE=1", "")
    assert said(bare, overlay=Overlay(drop_ins={"/x.conf": "[Service]\nEnvironment=NCCL_P2P_DISABLE=1\n"})) == []
    assert said(bare, overlay=Overlay(nccl_conf={"NCCL_P2P_DISABLE": "1"})) == []
    assert said(UNIT, overlay=Overlay(drop_ins={"/x.conf": "[Service]\nEnvironment=NCCL_P2P_DISABLE=0\n"})) == [
        "service s: environment NCCL_P2P_DISABLE 0 -> 1",
    ]
    assert said(UNIT, overlay=Overlay(drop_ins={"/x.conf": "[Service]\nEnvironment=FOREIGN=1\n"})) == []


def test_a_variable_in_a_flag_stands_for_its_value() -> None:
    """A key from an environment file is named in the command on both sides, its value known to neither."""
    wanted = replace(
        WANTED,
        flags={**WANTED.flags, "api-key": ("${SGLANG_KEY}",)},
        environment_files=("/etc/sglang.env",),
    )
    text = UNIT.replace("--port 30000", "--port ${PORT} --api-key ${SGLANG_KEY}")
    text = text.replace("TimeoutStartSec=1800", "EnvironmentFile=/etc/sglang.env")
    assert said(text, wanted, Overlay(files={"/etc/sglang.env": {"PORT": "30000"}})) == []


def test_a_process_is_compared_as_far_as_it_can_be_seen() -> None:
    """Arguments, and variables that the agent reports; a masked secret equals any."""
    wanted = replace(WANTED, flags={**WANTED.flags, "api-key": ("${KEY}",)})
    line = "/bin/python -m sglang.launch_server --tp 8 --port 30000 --trust-remote-code --mem-fraction-static 0.9"
    argv = (*line.split(), "--api-key", "***")
    process = ProcessFacts(argv=argv, environment={"NCCL_P2P_DISABLE": "0"}, started="2026-01-01T00:00:00+00:00")
    assert [str(change) for change in process_changes(process, wanted, Overlay())] == [
        "service s (running): tp 8 -> 4",
        "service s (running): environment NCCL_P2P_DISABLE 0 -> 1",
    ]


def test_behind_a_wrapper_only_the_parallelism_is_compared() -> None:
    """A script may add flags and start another program; the tensor parallelism must be right all the same."""
    argv = ("/usr/bin/python3", "/usr/bin/sglang", "serve", "--tp-size", "8", "--log-level", "warning")
    process = ProcessFacts(argv=argv, environment={"NCCL_P2P_DISABLE": "1"}, started="2026-01-01T00:00:00+00:00")
    assert [str(c) for c in process_changes(process, WANTED, Overlay())] == ["service s (running): tp 8 -> 4"]
    bare = process.model_copy(update={"argv": argv[:3]})
    assert process_changes(bare, WANTED, Overlay()) == ()


def vm(config: str) -> VmFacts:
    """A stopped VM with this configuration."""
    return VmFacts(vmid=200, exists=True, status="stopped", config=config)


ENTRIES = "".join(f"hostpci{n}: mapping=gpu-confidential,pcie=1,rombar=0\n" for n in range(4))


def test_hostpci_entries_are_read_with_their_options() -> None:
    """The short form is `host=`, and snapshots are not read."""
    assert hostpci("hostpci1: 81:00.0,pcie=1\n[old]\nhostpci2: mapping=x\n") == {
        "hostpci1": {"host": "81:00.0", "pcie": "1"},
    }
    assert mapped_hostpci_count(vm(ENTRIES), "gpu-confidential") == 4


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (ENTRIES, []),
        (ENTRIES + "hostpci4: 00:1f.3\n", []),
        (ENTRIES + "hostpci4: 01:00.0,pcie=1\n", ["vm 200: other GPU entries 01:00.0 -> none"]),
        (ENTRIES + "hostpci4: 0000:01:00\n", ["vm 200: other GPU entries 0000:01:00 -> none"]),
        (ENTRIES.replace(",pcie=1", ""), ["vm 200: hostpci options others -> pcie=1,rombar=0"]),
        ("", ["vm 200: GPUs 0 -> 4 through mapping gpu-confidential"]),
    ],
)
def test_a_vm_has_one_entry_per_device_and_no_other_gpu(config: str, changes: list[str]) -> None:
    """Entries of devices that are no GPUs are nobody's business."""
    assert [str(change) for change in hostpci_changes(vm(config), MAPPING, SPLIT)] == changes


def test_a_mapping_says_what_sysfs_says() -> None:
    """A missing mapping, other devices and a moved IOMMU group are changes; another node's entries are not ours."""
    (found,) = SPLIT.mappings
    assert mapping_changes(found, MAPPING) == ()
    assert str(mapping_changes(None, MAPPING)[0]) == (
        "mapping gpu-confidential: devices absent -> 81:00 91:00 e1:00 f1:00"
    )
    moved = replace_entry(found, 0, iommu_group=5)
    assert [str(c) for c in mapping_changes(moved, MAPPING)] == [
        "mapping gpu-confidential: 81:00 10de:2bb5/10de:204e/group 5 -> 10de:2bb5/10de:204e/group 93",
    ]
    elsewhere = replace_entry(found, 0, node="kpro7")
    assert str(mapping_changes(elsewhere, MAPPING)[0]).endswith("91:00 e1:00 f1:00 -> 81:00 91:00 e1:00 f1:00")
    assert same_devices(moved, MAPPING)
    assert not same_devices(elsewhere, MAPPING)


def replace_entry(mapping: MappingFacts, index: int, **fields: object) -> MappingFacts:
    """The mapping with one entry changed."""
    entries = list(mapping.entries)
    entries[index] = entries[index].model_copy(update=fields)
    return mapping.model_copy(update={"entries": tuple(entries)})
