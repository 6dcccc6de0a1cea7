"""The components one by one: what they refuse, and what the story does not show of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pulumi_proxmoxve import Provider

from components.access import HostAccess
from components.confidential_vm import ConfidentialVm, ConfidentialVmArgs
from components.gpu_pool import GpuPool, GpuPoolArgs
from components.hypervisor import HypervisorArgs, build_hypervisor
from components.lxc_gpu_passthrough import LxcGpuPassthrough, LxcGpuPassthroughArgs
from components.pci_mapping import PciMapping, PciMappingArgs
from components.sglang_service import SglangService, SglangServiceArgs
from components.vfio_binding import VfioBinding, VfioBindingArgs
from tests.components.programs import PRIVATE_KEY, TARGET, built, story
from tests.components.recording import Secret, record
from tests.topology import specs
from topology.problem import TopologyError
from topology.spec import WholeVmSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from components.access import HostAccess as Access

WHOLE = WholeVmSpec(
    name="confidential",
    cores=32,
    memory_mib=262144,
    cpu_type="host",
    disk_storage="local-zfs",
    disk_gib=200,
    network_bridge="vmbr0",
    on_boot=True,
)


def access() -> Access:
    """A way to the host."""
    return HostAccess.to(TARGET)


def proxmox() -> Provider:
    """A way to the API."""
    return Provider("proxmox", endpoint="https://192.0.2.6:8006/")


def pool(**changes: Any) -> None:
    """Make a GpuPool."""
    GpuPool("it", GpuPoolArgs(pool=specs.pool(**changes), host=specs.HOST, access=access()))


def binding(**changes: Any) -> None:
    """Make a VfioBinding, both halves."""
    made = VfioBinding("it", VfioBindingArgs(binding=specs.binding(**changes), managed={}, access=access()))
    made.bind([])


def mapping(**changes: Any) -> None:
    """Make a PciMapping."""
    PciMapping("it", PciMappingArgs(mapping=replace(specs.mapping(), **changes), provider=proxmox()))


def container(**changes: Any) -> None:
    """Make an LxcGpuPassthrough."""
    LxcGpuPassthrough("it", LxcGpuPassthroughArgs(container=specs.container(**changes), pool=specs.pool()))


def vm(**changes: Any) -> None:
    """Make a ConfidentialVm."""
    ConfidentialVm("it", ConfidentialVmArgs(vm=specs.vm(**changes), host=specs.HOST, provider=proxmox()))


def service(**changes: Any) -> None:
    """Make an SglangService."""
    made = specs.service(**changes)
    SglangService("it", SglangServiceArgs(service=made, host=specs.HOST, access=access(), copy_revision="adopted"))


@pytest.mark.parametrize("make", [pool, binding, mapping, container, vm, service])
def test_a_sound_spec_makes_a_component(make: Callable[..., None]) -> None:
    """What breaks no rule is built."""
    assert len(record(make).components) == 1


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (pool, {"numa_node": 1}, ("pool serving", "0000:01:00.0 on NUMA node 0", "declares node 1")),
        (pool, {"owners": ("vm/200",)}, ("pool serving", "vm/200", "vfio-pci")),
        (binding, {"driver": "nouveau"}, ("binding of pool serving", "'nouveau'", "nvidia or vfio-pci")),
        (binding, {"others": specs.SERVING[:1]}, ("binding of pool serving", "0000:01:00", "another pool")),
        (mapping, {"entries": specs.mapping().entries * 2}, ("PCI mapping gpu-confidential", "0000:81:00 twice")),
        (container, {"driver": "vfio-pci"}, ("container 129", "vfio-pci", "nvidia")),
        (container, {"devices": specs.SERVING[:3]}, ("container 129", "pool serving", "0000:71:00.0")),
        (vm, {"driver": "nvidia"}, ("VM 200", "nvidia", "vfio-pci")),
        (vm, {"cpu": "EPYC-Genoa"}, ("VM 200", "1024 GiB", "phys-bits")),
        (service, {"tp": 8, "text": specs.unit("--tp 8")}, ("service sglang-qwen", "tp 8 on 4 GPUs")),
        (service, {"text": specs.unit("--tp 8")}, ("unit sglang-qwen.service", "--tp 8", "tp 4")),
        (service, {"effective_environment": {}}, ("service sglang-qwen", "NCCL_P2P_DISABLE")),
    ],
)
def test_a_component_refuses_what_breaks_a_rule(
    make: Callable[..., None], changes: dict[str, Any], said: tuple[str, ...]
) -> None:
    """A broken rule names object, value and fix, also without the policy pack."""
    with pytest.raises(TopologyError) as refused:
        record(lambda: make(**changes))
    text = " ".join(map(str, refused.value.problems))
    assert all(part in text for part in said), text


def test_a_vm_managed_whole_has_an_entry_for_each_gpu() -> None:
    """The VM is made under SEV-SNP, with one hostpci entry of the mapping for each device, on PCI Express."""
    machine = record(lambda: vm(whole=WHOLE)).children["it-machine"]
    assert machine.type == "proxmoxve:index/vmLegacy:VmLegacy"
    assert [entry["device"] for entry in machine.inputs["hostpcis"]] == [f"hostpci{n}" for n in range(4)]
    for entry in machine.inputs["hostpcis"]:
        assert {"mapping": "gpu-confidential", "pcie": True, "rombar": False}.items() <= entry.items()
    assert machine.inputs["amdSev"] == {"type": "snp"}
    assert machine.inputs["cpu"] == {"cores": 32, "type": "host"}
    assert machine.inputs["memory"] == {"dedicated": 262144}
    assert (machine.inputs["nodeName"], machine.inputs["vmId"], machine.inputs["started"]) == ("kpro6", 200, True)
    assert "efiDisk" not in machine.inputs
    assert machine.inputs["disks"]
    assert "::proxmox::" in machine.provider


def test_a_vm_managed_whole_is_started_again_by_the_agent() -> None:
    """The provider does not see that a drain stopped it, so the agent gives it GPUs and power state, after it."""
    recording = record(lambda: vm(whole=WHOLE))
    assert recording.children.keys() == {"it-machine", "it-gpus"}
    assert "it-machine" in recording.before("it-gpus")
    assert recording.children["it-gpus"].inputs["start"] is True


def test_a_vm_without_snp_asks_for_none() -> None:
    """SEV-SNP is set only where the stack file asks for it."""
    machine = record(lambda: vm(whole=WHOLE, sev_snp=False)).children["it-machine"]
    assert "amdSev" not in machine.inputs


def test_an_existing_vm_is_given_its_gpus_and_nothing_else() -> None:
    """Of a VM that somebody else made, only its hostpci entries are managed."""
    [gpus] = record(vm).children.values()
    assert gpus.type == "pulumi-python:dynamic/gpu-topology:VmGpus"
    assert {name: gpus.inputs[name] for name in ("vmid", "mapping", "count", "start", "devices")} == {
        "vmid": 200,
        "mapping": "gpu-confidential",
        "count": 4,
        "start": True,
        "devices": list(specs.CONFIDENTIAL),
    }


def test_a_service_on_the_host_itself_waits_for_all_bindings() -> None:
    """Without a container there is no container's edge; the service still starts after every binding and VM."""
    plan = story()["split"].plan
    [found] = plan.spec.services
    plan = replace(plan, spec=replace(plan.spec, services=(replace(found, container=None),), containers=()))
    recording = built(plan)
    before = recording.before("sglang-qwen-serving")
    assert {"serving-binding-driver", "confidential-binding-driver", "vm-200-gpus", "sglang-qwen-unit"} <= before
    assert recording.children["sglang-qwen-unit"].inputs.get("container") is None


def test_a_plan_with_a_vm_needs_the_api(tmp_path: Path) -> None:
    """Built without a provider, a plan that the rules should have refused ends as a defect that says so."""
    plan = story()["split"].plan

    def program() -> None:
        build_hypervisor(HypervisorArgs(plan=plan, access=access(), provider=None, bundle_folder=tmp_path, api_keys={}))

    with pytest.raises(RuntimeError, match=r"made without topology\.proxmox"):
        record(program)


def test_without_a_key_the_ssh_agent_is_used() -> None:
    """A connection without a private key has none at all: an empty one would fail instead of asking the agent."""

    def program() -> None:
        without = HostAccess.to(replace(TARGET, private_key=None, proxy=None))
        GpuPool("it", GpuPoolArgs(pool=specs.pool(), host=specs.HOST, access=without))

    connection = record(program).children["it-verified"].inputs["connection"]
    assert isinstance(connection, Secret)
    assert isinstance(connection.value, dict)
    assert not {"privateKey", "proxy"} & connection.value.keys()
    assert PRIVATE_KEY not in repr(connection)


@pytest.mark.parametrize(("root", "path"), [("/", "/usr"), (".", "./usr"), ("/srv/host/", "/srv/host/usr")])
def test_the_agent_is_below_the_hosts_root_folder(root: str, path: str) -> None:
    """Where the host's root folder is another, the agent is installed and called there."""

    def program() -> None:
        there = HostAccess.to(replace(TARGET, root=root))
        GpuPool("it", GpuPoolArgs(pool=specs.pool(), host=specs.HOST, access=there))

    command = record(program).children["it-verified"].inputs["create"]
    assert f"python3 {path}/local/lib/gpu-topology-agent.pyz --root {root} " in command
