"""What the components are made of: names, parents, options and outputs, which are all part of their contract."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from tests.components.programs import Act, built, performed, performed_again, story
from tests.components.recording import Recording, Secret, has_unknown
from tests.facts import hosts
from topology.facts import Facts
from topology.managed import managed_revision

CHILDREN = {
    ("AgentInstall", "agent"): {
        "agent-file": "command:remote:CopyToRemote",
        "agent-register": "command:remote:Command",
    },
    ("GpuPool", "serving"): {"serving-verified": "command:remote:Command"},
    ("GpuPool", "confidential"): {"confidential-verified": "command:remote:Command"},
    ("VfioBinding", "serving-binding"): {
        "serving-binding-drain": "command:remote:Command",
        "serving-binding-driver": "pulumi-python:dynamic/gpu-topology:DriverBinding",
    },
    ("VfioBinding", "confidential-binding"): {
        "confidential-binding-drain": "command:remote:Command",
        "confidential-binding-driver": "pulumi-python:dynamic/gpu-topology:DriverBinding",
    },
    ("PciMapping", "gpu-confidential"): {"gpu-confidential-mapping": "proxmoxve:hardware/mapping/pci:Pci"},
    ("LxcGpuPassthrough", "lxc-129"): {"lxc-129-gpus": "pulumi-python:dynamic/gpu-topology:ContainerGpus"},
    ("ConfidentialVm", "vm-200"): {"vm-200-gpus": "pulumi-python:dynamic/gpu-topology:VmGpus"},
    ("SglangService", "sglang-qwen"): {
        "sglang-qwen-unit": "pulumi-python:dynamic/gpu-topology:UnitFile",
        "sglang-qwen-serving": "command:remote:Command",
        "sglang-qwen-verified": "command:remote:Command",
        "sglang-qwen-copy": "pulumi-python:dynamic/gpu-topology:CanonicalUnit",
    },
}


@pytest.fixture
def act() -> Act:
    """kpro6 as it is split."""
    return story()["split"]


@pytest.fixture
def recording() -> Recording:
    """What the split registers."""
    return performed("split")


def wired(value: object) -> Any:
    """A spec as the engine has it: lists for tuples."""
    return json.loads(json.dumps(value))


def test_types_and_names_are_a_contract(recording: Recording) -> None:
    """Types and names stand in every stack's state: a rename would take the service down, so none comes unnoticed."""
    found = {
        (component.type.removeprefix("gpu-topology:index:"), component.name): {
            child.name: child.type for child in recording.children.values() if child.parent == component.urn
        }
        for component in recording.components
    }
    assert found == CHILDREN


def test_every_child_is_inside_its_component(recording: Recording) -> None:
    """Nothing that acts on the host hangs on the stack itself, so protecting or deleting a component reaches it."""
    components = {component.urn for component in recording.components}
    assert recording.children
    assert {child.parent for child in recording.children.values()} == components


def test_a_component_registers_its_outputs_once(recording: Recording) -> None:
    """Twice is an error of the engine, and a component without is shown as unfinished."""
    registered = sorted(urn for urn, _ in recording.outputs)
    assert registered == sorted(component.urn for component in recording.components)


def test_outputs_say_devices_and_what_follows_from_them(recording: Recording) -> None:
    """The state records each pool's devices and driver, and each service's devices and tensor parallelism."""
    outputs = {urn.split("index:")[1]: values for urn, values in recording.outputs}
    serving = list(hosts.split().pools["serving"].devices)
    assert outputs["GpuPool::serving"] == {"devices": [str(device) for device in serving], "driver": "nvidia"}
    assert outputs["SglangService::sglang-qwen"]["tp"] == len(serving)
    assert outputs["VfioBinding::confidential-binding"]["driver"] == "vfio-pci"


@pytest.mark.parametrize("preview", [True, False])
def test_inputs_of_components_are_the_specs_and_known(act: Act, preview: bool) -> None:
    """Policies judge the plan's own values, plain and known at a preview too: an unknown one would switch them off."""
    recording, spec = built(act.plan, preview=preview), act.plan.spec
    host = asdict(spec.host)
    wanted = {
        **{("GpuPool", p.name): {"pool": asdict(p), "host": host} for p in spec.pools},
        **{("VfioBinding", f"{b.pool}-binding"): {"binding": asdict(b)} for b in spec.bindings},
        **{("PciMapping", m.name): {"mapping": asdict(m)} for m in spec.mappings},
        **{("LxcGpuPassthrough", f"lxc-{c.vmid}"): {"container": asdict(c)} for c in spec.containers},
        **{("ConfidentialVm", f"vm-{v.vmid}"): {"vm": asdict(v), "host": host} for v in spec.vms},
        **{("SglangService", s.name): {"service": asdict(s), "host": host} for s in spec.services},
        ("AgentInstall", "agent"): {},
    }
    for (kind, name), specs in wanted.items():
        inputs = recording.component(kind, name).inputs
        assert not has_unknown(inputs)
        assert inputs == wired(specs)
    assert len(recording.components) == len(wanted)


def test_whatever_has_a_delete_is_deleted_before_it_is_replaced(recording: Recording) -> None:
    """Deleting the old service after the new one started would stop what has just been started."""
    deleting = {name: child for name, child in recording.children.items() if child.inputs.get("delete")}
    assert {name: child.inputs["delete"].split()[-1] for name, child in deleting.items()} == {
        "agent-register": "uninstall",
        "sglang-qwen-serving": "stop",
    }
    assert all(child.delete_before_replace for child in deleting.values())


def test_an_action_never_undoes_itself_by_a_delete(recording: Recording) -> None:
    """Drains and verifications have no delete: their replacement, which a trigger causes, changes nothing else."""
    commands = {name for name, child in recording.children.items() if child.type == "command:remote:Command"}
    plain = {name for name in commands if "delete" not in recording.children[name].inputs}
    assert plain == commands - {"agent-register", "sglang-qwen-serving"}


def test_a_mapping_cannot_be_renamed_in_place(recording: Recording) -> None:
    """Proxmox has no rename, so another name is another mapping, and the old one goes first."""
    mapping = recording.children["gpu-confidential-mapping"]
    assert mapping.replace_on_changes == ("name",)
    assert mapping.delete_before_replace
    assert "::proxmox::" in mapping.provider


def test_a_mapping_that_the_host_has_is_imported(recording: Recording) -> None:
    """Creating what is there already would fail; a mapping that is not there is created, and then is ours to delete."""
    made, again = (one.children["gpu-confidential-mapping"] for one in (recording, performed_again("split")))
    assert (made.import_id, again.import_id) == ("", "gpu-confidential")
    assert (made.retained, again.retained) == (False, False)


@pytest.mark.parametrize("comment", ["written by hand", None])
def test_a_found_mapping_keeps_its_comment(comment: str | None) -> None:
    """A comment that a person wrote on a mapping is no difference, nor is none: it is imported, and kept, as it is."""
    raw = hosts.applied(story()["split"].plan, hosts.raw_facts("kpro6", "found"))
    raw["mappings"][0]["description"] = comment
    plan = hosts.plan(hosts.split(), Facts.model_validate(raw))
    mapping = built(plan).children["gpu-confidential-mapping"]
    assert mapping.inputs.get("comment") == comment
    assert mapping.import_id == "gpu-confidential"
    assert mapping.retained


def test_the_mapping_says_what_sysfs_says(act: Act, recording: Recording) -> None:
    """Ids and IOMMU groups of a mapping are the live host's, device by device."""
    devices = {str(device.address): device for device in act.plan.facts.devices}
    maps = recording.children["gpu-confidential-mapping"].inputs["maps"]
    assert len(maps) == len(hosts.split().pools["confidential"].devices)
    for entry in maps:
        device = devices[entry["path"]]
        seen = (device.pci_id, device.subsystem_id, device.iommu_group)
        assert (entry["id"], entry["subsystemId"], entry["iommuGroup"]) == seen
        assert entry["node"] == "kpro6"


def test_the_copy_is_the_deployed_text(act: Act, recording: Recording) -> None:
    """The workstation's copy has exactly the unit's text, at the path that the stack file names."""
    copy, unit = recording.children["sglang-qwen-copy"].inputs, recording.children["sglang-qwen-unit"].inputs
    assert copy["text"] == unit["text"] == act.plan.spec.services[0].text
    assert copy["path"] == hosts.split().services["sglang-qwen"].canonical_unit
    assert copy["revision"] == act.plan.copy_revisions["sglang-qwen"]


def test_commands_run_the_installed_agent(recording: Recording) -> None:
    """Each action is one operation of the agent on the pinned host; its request comes on standard input, as JSON."""
    operations = {}
    for name, child in recording.children.items():
        if child.type == "command:remote:Command":
            *command, operations[name] = child.inputs["create"].split()
            assert command == [
                *("python3", "/usr/local/lib/gpu-topology-agent.pyz"),
                *("--root", "/", "--format", "text"),
            ]
            assert isinstance(json.loads(child.inputs["stdin"]), dict)
            assert child.inputs["addPreviousOutputInEnv"] is False
            assert "update" not in child.inputs
    assert operations == {
        "agent-register": "register",
        "serving-verified": "check-pool",
        "confidential-verified": "check-pool",
        "serving-binding-drain": "drain",
        "confidential-binding-drain": "drain",
        "sglang-qwen-serving": "serve",
        "sglang-qwen-verified": "verify",
    }
    copied = recording.children["agent-file"].inputs["remotePath"]
    assert copied == "/usr/local/lib/gpu-topology-agent.pyz"


def test_every_connection_pins_its_host_keys(recording: Recording) -> None:
    """pulumi_command checks no host key that it isn't given: host and bastion have theirs in every connection."""
    connections = [child.inputs["connection"] for child in recording.children.values() if "connection" in child.inputs]
    assert len(connections) == 8
    for connection in connections:
        assert isinstance(connection, Secret)
        value: Any = connection.value
        assert value["hostKey"]
        assert value["proxy"]["hostKey"]
        # The plugin's own limits are ten more dials, and none on a host that takes a connection and says nothing.
        assert (value["dialErrorLimit"], value["perDialTimeout"]) == (3, 5)


def test_what_may_be_stopped_is_known_on_both_sides(act: Act, recording: Recording) -> None:
    """The agent learns what this program manages before the first drain, so a first `up` may split at once."""
    managed = {
        "services": [{"name": "sglang-qwen", "unit": "sglang-qwen.service", "container": 129}],
        "vms": [200],
        "containers": [129],
    }
    registered = json.loads(recording.children["agent-register"].inputs["stdin"])
    assert registered == {
        "managed": managed,
        "revision": managed_revision(act.plan.spec, act.plan.facts),
        "file_revision": "adopted",
    }
    assert recording.children["serving-binding-driver"].inputs["managed"] == managed
