"""The plan of kpro6: adoption, the split, the merge, and what drifts in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.facts import hosts
from topology.facts import Facts
from topology.load import load_topology
from topology.plan import Plan, make_plan
from topology.problem import TopologyError

if TYPE_CHECKING:
    from collections.abc import Callable

NODE_1 = {"0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0"}


def revisions(plan: Plan) -> dict[str, str]:
    """Every revision of a plan by its name in the ledger."""
    spec = plan.spec
    return {
        **{f"drain:{b.pool}": b.drain_revision for b in spec.bindings},
        **{f"binding:{b.pool}": b.revision for b in spec.bindings},
        **{f"container:{c.vmid}": c.revision for c in spec.containers},
        **{f"vm:{v.vmid}": v.revision for v in spec.vms},
        **{f"unit:{s.name}": s.unit_revision for s in spec.services},
        **{f"service:{s.name}": s.revision for s in spec.services},
    }


def fresh(plan: Plan) -> set[str]:
    """What the plan does, by its name in the ledger: everything whose revision the ledger does not have."""
    known = plan.facts.ledger.revisions
    return {name for name, revision in revisions(plan).items() if revision != known.get(name, "adopted")}


def after_split() -> hosts.Raw:
    """The facts of kpro6 after this program split it."""
    found = hosts.raw_facts("kpro6", "found")
    return hosts.applied(hosts.plan(hosts.split(), Facts.model_validate(found)), found)


def drifted(change: Callable[[hosts.Raw], None]) -> Plan:
    """Plan the split again after something changed on the host."""
    raw = after_split()
    change(raw)
    return hosts.plan(hosts.split(), Facts.model_validate(raw))


def test_kpro6_as_found_is_adopted_untouched() -> None:
    """With all eight GPUs in one pool nothing changes, and the hand-written unit stays byte for byte."""
    facts = hosts.facts("kpro6", "found")
    plan = hosts.plan(hosts.whole(), facts)
    assert plan.changes == ()
    assert set(revisions(plan).values()) == {"adopted"}
    service = facts.service("sglang-qwen")
    assert service is not None
    assert plan.spec.services[0].text == service.text
    assert plan.spec.services[0].tp == 8
    assert plan.copy_revisions == {"sglang-qwen": "adopted"}


def test_kpro6_split_by_hand_is_adopted_untouched() -> None:
    """The four-and-four that its owner made by hand is as wanted, mapping, VM and unit included."""
    plan = hosts.plan(hosts.split(), hosts.facts("kpro6", "split"))
    assert plan.changes == ()
    assert fresh(plan) == set()


def test_the_split_does_what_follows_from_it_and_nothing_else() -> None:
    """The devices that leave are drained and bound, their guests and the service follow, the serving pool stays."""
    plan = hosts.plan(hosts.split(), hosts.facts("kpro6", "found"))
    assert fresh(plan) == {
        "drain:confidential",
        "binding:confidential",
        "container:129",
        "vm:200",
        "unit:sglang-qwen",
        "service:sglang-qwen",
    }
    said = [str(change) for change in plan.changes]
    assert "service sglang-qwen: tp 8 -> 4" in said
    assert {f"{address}: driver nvidia -> vfio-pci" for address in NODE_1} <= set(said)
    assert "vm 200: GPUs 0 -> 4 through mapping gpu-confidential" in said


def test_the_mapping_is_made_from_sysfs() -> None:
    """Ids, subsystem ids and IOMMU groups of the mapping are those of the devices as found."""
    facts = hosts.facts("kpro6", "found")
    (mapping,) = hosts.plan(hosts.split(), facts).spec.mappings
    groups = {str(d.address): d.iommu_group for d in facts.devices}
    assert [(e.path, e.iommu_group) for e in mapping.entries] == [(a, groups[a]) for a in sorted(NODE_1)]
    assert {(e.id, e.subsystem_id) for e in mapping.entries} == {("10de:2bb5", "10de:204e")}


def test_after_the_split_nothing_is_left_to_do() -> None:
    """Planned again, the split changes nothing and every revision is the one that was applied."""
    raw = after_split()
    again = hosts.plan(hosts.split(), Facts.model_validate(raw))
    assert again.changes == ()
    assert revisions(again).items() <= raw["ledger"]["revisions"].items()


def test_the_merge_takes_the_devices_back() -> None:
    """Merging drains and binds the grown pool, and says that the VM's share is handed back."""
    plan = hosts.plan(hosts.whole(), Facts.model_validate(after_split()))
    assert fresh(plan) == {
        "drain:serving",
        "binding:serving",
        "container:129",
        "unit:sglang-qwen",
        "service:sglang-qwen",
    }
    assert plan.spec.services[0].tp == 8
    said = [str(change) for change in plan.changes]
    assert "vm 200: managed by this stack -> handed back as found" in said
    assert "service sglang-qwen: NUMA node 0 -> absent" in said


def test_an_attempt_that_failed_is_tried_again() -> None:
    """Everything is as before but the ledger's sequence, so every action has another revision than the last time."""
    raw = hosts.raw_facts("kpro6", "found")
    first = hosts.plan(hosts.split(), Facts.model_validate(raw))
    raw["ledger"]["sequence"] = 1
    second = hosts.plan(hosts.split(), Facts.model_validate(raw))
    assert fresh(first) == fresh(second)
    assert all(revisions(first)[name] != revisions(second)[name] for name in fresh(first))


def test_a_host_that_was_rolled_back_is_worked_on_again() -> None:
    """Its ledger and all that is seen are as before the first run; only the boot tells that the state is of another."""
    raw = hosts.raw_facts("kpro6", "found")
    first = hosts.plan(hosts.split(), Facts.model_validate(raw))
    raw["host"]["boot_id"] = "5f0c2a7e-0000-4000-8000-000000000000"
    again = hosts.plan(hosts.split(), Facts.model_validate(raw))
    assert all(revisions(first)[name] != revisions(again)[name] for name in fresh(first))


def test_a_service_left_drained_is_started_again() -> None:
    """A run that died after its drain leaves the service in the ledger; only the service is acted on."""

    def stopped(raw: hosts.Raw) -> None:
        raw["ledger"]["drained"] = [{"kind": "service", "container": 129, "unit": "sglang-qwen.service"}]

    assert fresh(drifted(stopped)) == {"service:sglang-qwen"}


def test_a_vm_that_a_run_left_drained_is_started() -> None:
    """Where its power state is left alone, a VM that a drain stopped is acted on, one that a person stopped is not."""
    raw_topology, raw = hosts.raw_split(), after_split()
    raw_topology["vms"]["200"]["start"] = False
    next(vm for vm in raw["vms"] if vm["vmid"] == 200)["status"] = "stopped"
    topology = load_topology(raw_topology)
    assert not fresh(hosts.plan(topology, Facts.model_validate(raw)))
    raw["ledger"]["drained"] = [{"kind": "vm", "vmid": 200}]
    assert fresh(hosts.plan(topology, Facts.model_validate(raw))) == {"vm:200"}


def test_a_stopped_service_is_started() -> None:
    """A service that somebody stopped is drift, and its unit is not."""

    def stopped(raw: hosts.Raw) -> None:
        raw["services"][0] |= {"active": "inactive", "process": None, "main_pid": None}

    assert fresh(drifted(stopped)) == {"service:sglang-qwen"}


def test_a_process_older_than_its_unit_is_restarted() -> None:
    """A unit edited to the wanted flags without a restart leaves a process that still has the old ones."""

    def old(raw: hosts.Raw) -> None:
        argv = raw["services"][0]["process"]["argv"]
        argv[argv.index("--tp") + 1] = "8"

    plan = drifted(old)
    assert fresh(plan) == {"service:sglang-qwen"}
    assert [str(change) for change in plan.changes] == ["service sglang-qwen (running): tp 8 -> 4"]


def test_a_unit_edited_by_hand_is_written_and_started_again() -> None:
    """A flag that was changed on the host is named, and unit and service are acted on."""

    def edited(raw: hosts.Raw) -> None:
        service = raw["services"][0]
        service["text"] = service["text"].replace("--context-length 262144", "--context-length 131072")

    plan = drifted(edited)
    assert fresh(plan) == {"unit:sglang-qwen", "service:sglang-qwen"}
    assert "service sglang-qwen: --context-length 131072 -> 262144" in [str(c) for c in plan.changes]


def test_a_disabled_unit_is_enabled_without_a_new_text_or_a_restart() -> None:
    """Whether a unit starts at boot is part of being as wanted; what runs is left alone."""

    def disabled(raw: hosts.Raw) -> None:
        raw["services"][0]["enabled"] = False

    plan = drifted(disabled)
    assert fresh(plan) == {"unit:sglang-qwen"}
    assert plan.spec.services[0].text == drifted(lambda _: None).spec.services[0].text


@pytest.mark.parametrize("enabled", [True, False])
def test_a_unit_without_install_gets_one_if_nothing_else_enables_it(*, enabled: bool) -> None:
    """One that somebody linked into a target is adopted as found; one that systemd can't enable is written anew."""
    raw = hosts.raw_facts("kpro6", "found")
    service = raw["services"][0]
    service |= {"text": service["text"].partition("[Install]")[0], "enabled": enabled}
    plan = hosts.plan(hosts.whole(), Facts.model_validate(raw))
    assert (plan.changes == ()) is enabled
    assert (plan.spec.services[0].text == service["text"]) is enabled
    assert ("[Install]\nWantedBy=multi-user.target" in plan.spec.services[0].text) is not enabled


def test_a_lost_override_is_persisted_again_without_a_drain() -> None:
    """A device on its driver that the next boot would lose is bound again; nobody is stopped for it."""

    def lost(raw: hosts.Raw) -> None:
        next(d for d in raw["devices"] if d["address"] == "0000:91:00.0")["persisted"] = None

    assert fresh(drifted(lost)) == {"binding:confidential"}


def test_a_device_back_on_the_wrong_driver_is_drained_and_bound() -> None:
    """A device that a boot brought up on nvidia is drift of the pool, and the VM's part is not touched."""

    def back(raw: hosts.Raw) -> None:
        next(d for d in raw["devices"] if d["address"] == "0000:91:00.0")["driver"] = "nvidia"

    assert fresh(drifted(back)) == {"drain:confidential", "binding:confidential"}


def test_renumbered_minors_are_drift_of_the_container() -> None:
    """After a boot the GPUs have other minors, so the container's lines pass others than its own."""

    def renumbered(raw: hosts.Raw) -> None:
        for device in raw["devices"]:
            if device["minor"] is not None:
                device["minor"] = (device["minor"] + 1) % 5

    assert fresh(drifted(renumbered)) == {"container:129", "service:sglang-qwen"}


def test_a_device_that_leaves_to_nobody_is_handed_back() -> None:
    """A device that the ledger has in the pool and the configuration nowhere makes the binding act, and says so."""
    topology = hosts.raw_split()
    topology["pools"]["confidential"]["devices"].remove("f1:00.0")
    plan = hosts.plan(load_topology(topology), Facts.model_validate(after_split()))
    assert {"binding:confidential", "vm:200"} <= fresh(plan)
    assert "0000:f1:00.0: owner pool confidential -> handed back as found" in [str(c) for c in plan.changes]


def test_a_card_taken_out_of_the_machine_is_no_drift() -> None:
    """A device that the ledger knows and the host no longer has cannot be handed back, ever."""
    topology = hosts.raw_split()
    topology["pools"]["confidential"]["devices"].remove("f1:00.0")

    raw = after_split()
    raw["devices"] = [d for d in raw["devices"] if d["address"] != "0000:f1:00.0"]
    plan = hosts.plan(load_topology(topology), Facts.model_validate(raw))
    assert "binding:confidential" not in fresh(plan)


def test_an_audio_function_moves_with_its_gpu() -> None:
    """Every function of a card goes to vfio-pci, and its mapping passes the whole slot."""
    raw = hosts.raw_facts("kpro6", "found")
    gpu = next(d for d in raw["devices"] if d["address"] == "0000:81:00.0")
    raw["devices"].append(
        {
            **gpu,
            "address": "0000:81:00.1",
            "device": "22e8",
            "class": "040300",
            "driver": "snd_hda_intel",
            "minor": None,
        }
    )
    plan = hosts.plan(hosts.split(), Facts.model_validate(raw))
    assert "0000:81:00.1: driver snd_hda_intel -> vfio-pci" in [str(change) for change in plan.changes]
    (mapping,) = plan.spec.mappings
    assert [entry.path for entry in mapping.entries][:2] == ["0000:81:00", "0000:91:00.0"]
    done = Facts.model_validate(hosts.applied(plan, raw))
    assert hosts.plan(hosts.split(), done).changes == ()


def test_a_running_vm_follows_a_mapping_of_as_many_other_devices() -> None:
    """The VM's entries stay the same words, but it holds the devices that it was started with."""

    def moved(raw: hosts.Raw) -> None:
        raw["mappings"][0]["entries"][0]["path"] = "0000:71:00.0"

    assert fresh(drifted(moved)) == {"vm:200"}


def test_somebody_elses_mapping_of_the_same_name_is_refused() -> None:
    """One that says otherwise and was there first is named before anything moves; our own that drifted is mended."""
    raw = hosts.raw_facts("kpro6", "split")
    raw["mappings"][0]["entries"][0]["iommu_group"] = 999
    raw["ledger"]["revisions"]["binding:confidential"] = "bound"
    plan = hosts.plan(hosts.split(), Facts.model_validate(raw))
    assert "pulumi up --refresh" in " ".join(map(str, plan.warnings))
    del raw["ledger"]["revisions"]["binding:confidential"]
    with pytest.raises(TopologyError) as caught:
        hosts.plan(hosts.split(), Facts.model_validate(raw))
    (problem,) = caught.value.problems
    assert problem.rule == "mapping-not-ours"
    assert "999" in problem.value


def test_a_drop_in_that_overrules_the_unit_is_refused() -> None:
    """Writing the unit would never make it right, so the drop-in's value is named instead of tried against."""
    raw = hosts.raw_facts("kpro6", "found")
    raw["services"][0]["drop_ins"] = {
        "/etc/systemd/system/sglang-qwen.service.d/a.conf": "[Service]\nWorkingDirectory=/srv\n",
    }
    with pytest.raises(TopologyError) as caught:
        hosts.plan(hosts.whole(), Facts.model_validate(raw))
    (problem,) = caught.value.problems
    assert problem.rule == "unit-overruled"
    assert "WorkingDirectory would be /srv, not /opt/sglang" in str(problem)


def test_a_command_that_only_a_drop_in_sets_is_written_into_the_unit() -> None:
    """A unit must say by itself what runs, since rules and copies look at it alone."""
    raw = hosts.raw_facts("kpro6", "found")
    service = raw["services"][0]
    command = service["text"].partition("ExecStart=")[2].partition("Restart=")[0]
    service["text"] = service["text"].replace("--tp 8", "--tp 2")
    service["drop_ins"] = {"/etc/x/a.conf": f"[Service]\nExecStart=\nExecStart={command}"}
    plan = hosts.plan(hosts.whole(), Facts.model_validate(raw))
    assert "service sglang-qwen: tp 2 -> 8" in [str(change) for change in plan.changes]
    assert "--tp 8" in plan.spec.services[0].text


def test_a_copy_that_differs_is_written_and_the_host_left_alone() -> None:
    """The workstation's copy follows the deployed unit."""
    facts = hosts.facts("kpro6", "found")
    plan = hosts.plan(hosts.whole(), facts, copy_text="[Service]\nExecStart=/bin/true\n")
    assert fresh(plan) == set()
    assert plan.copy_revisions["sglang-qwen"] != "adopted"
    assert [change.object for change in plan.changes] == ["copy .cache/simulator/sglang-qwen.service"]


def test_a_lost_unit_is_restored_from_the_copy() -> None:
    """A copy that means what is wanted is deployed as it stands, comments included."""
    found = hosts.facts("kpro6", "found").service("sglang-qwen")
    assert found is not None
    raw = hosts.raw_facts("kpro6", "found")
    raw["services"][0] |= {"exists": False, "text": None, "path": None, "active": "inactive", "process": None}
    plan = make_plan(
        hosts.whole(),
        Facts.model_validate(raw),
        base=hosts.REPOSITORY,
        read_local=lambda _: found.text,
    )
    assert plan.spec.services[0].text == found.text
    assert fresh(plan) == {"unit:sglang-qwen", "service:sglang-qwen"}


def test_p2p_left_on_under_a_translated_iommu_is_repaired() -> None:
    """What the IOMMU requires of NCCL is part of what a unit must mean, though nobody wrote it down."""
    raw = hosts.raw_facts("kpro6", "found")
    raw["services"][0]["text"] = raw["services"][0]["text"].replace("Environment=NCCL_MIN_NCHANNELS=16\n", "")
    plan = hosts.plan(hosts.whole(), Facts.model_validate(raw))
    assert "service sglang-qwen: environment NCCL_MIN_NCHANNELS absent -> 16" in [str(c) for c in plan.changes]
    assert "Environment=NCCL_MIN_NCHANNELS=16" in plan.spec.services[0].text


def test_every_broken_rule_is_told_at_once() -> None:
    """A plan that breaks rules is no plan, and says all that is wrong."""
    topology = hosts.raw_whole()
    topology["pools"]["serving"]["devices"].remove("f1:00.0")
    with pytest.raises(TopologyError) as caught:
        hosts.plan(load_topology(topology), hosts.facts("kpro6", "found"))
    assert len(caught.value.problems) > 1
    assert "tp-divides-heads" in {problem.rule for problem in caught.value.problems}
