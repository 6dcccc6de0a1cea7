from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pulumi_policy import EnforcementLevel, ResourceValidationPolicy
from pulumi_policy.proxy import UNKNOWN_ARRAY_VALUE, UNKNOWN_NUMBER_VALUE, UNKNOWN_STRING_VALUE

from policies.pack import INPUTS_KNOWN, STACK_WIDE, policies
from tests.policies.props import judge, judge_stack, proxied, wired
from tests.topology import test_rules_specs
from tests.topology.specs import (
    CONFIDENTIAL,
    HOST,
    SERVING,
    binding,
    container,
    device,
    mapping,
    pool,
    service,
    sized,
    unit,
    vm,
    vm_pool,
)
from topology.problem import Level
from topology.rules import RULES, Scope

SOUND: dict[str, dict[str, Any]] = {
    "GpuPool": {"pool": pool(), "host": HOST},
    "VfioBinding": {"binding": binding()},
    "PciMapping": {"mapping": mapping()},
    "LxcGpuPassthrough": {"container": container()},
    "ConfidentialVm": {"vm": vm(devices=CONFIDENTIAL[:1]), "host": HOST},
    "SglangService": {"service": service(), "host": HOST},
}
BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("GpuPool", {"pool": pool(driver="vfio-pci"), "host": HOST}, "container-on-nvidia", "lxc/129"),
    ("GpuPool", {"pool": pool(owners=("lxc/1", "vm/2")), "host": HOST}, "one-pool-one-owner", "lxc/1, vm/2"),
    (
        "GpuPool",
        {"pool": pool(devices=(device(SERVING[0], numa_node=1),)), "host": HOST},
        "numa-node",
        "on NUMA node 1, and declares node 0",
    ),
    ("VfioBinding", {"binding": binding(others=SERVING[:1])}, "one-device-one-owner", "0000:01:00"),
    ("PciMapping", {"mapping": mapping(())}, "pool-has-devices", "has no device"),
    ("LxcGpuPassthrough", {"container": container(driver="vfio-pci")}, "container-on-nvidia", "vfio-pci"),
    ("ConfidentialVm", {"vm": vm(driver="nvidia"), "host": HOST}, "vm-on-vfio", "nvidia"),
    ("ConfidentialVm", {"vm": vm(), "host": HOST}, "gpu-confidential-computing-off", "4 GPUs"),
    (
        "ConfidentialVm",
        {"vm": vm(), "host": replace(HOST, kernel_command_line="iommu=pt")},
        "snp-needs-translated-iommu",
        "iommu=pt",
    ),
    ("SglangService", {"service": service(effective_environment={})}, "p2p-disabled", "not set"),
    ("SglangService", {"service": sized(3)}, "tp-divides-heads", "32 attention heads"),
    ("SglangService", {"service": sized(2)}, "model-fits", "misses"),
    ("SglangService", {"service": service(arguments={"tp": 8})}, "argument-computed", "--tp"),
    ("SglangService", {"service": service(text=unit("--tp 8"))}, "tp-equals-pool", "--tp 8"),
    (
        "SglangService",
        {"service": service(effective_environment={}, translated_iommu=None), "host": HOST},
        "p2p-disabled",
        "not set",
    ),
]


@pytest.mark.parametrize("component", SOUND)
def test_a_sound_component_violates_nothing(component: str) -> None:
    """What the rules allow, the pack allows, floats and proxies notwithstanding."""
    violations, _ = judge(component, wired(**SOUND[component]))
    assert violations == {}


@pytest.mark.parametrize(("component", "specs", "rule", "says"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_rule_is_a_violation_of_its_policy(
    component: str, specs: dict[str, Any], rule: str, says: str
) -> None:
    """The policy of the rule says what the rule says."""
    violations, _ = judge(component, wired(**specs))
    assert rule in violations
    assert any(says in message and f"Rule {rule}" in message for message in violations[rule])


def test_a_policy_looks_at_its_components_only() -> None:
    """A policy says so where it does not apply, instead of passing silently."""
    _, idle = judge("PciMapping", wired(**SOUND["PciMapping"]))
    assert {"tp-divides-heads", "numa-node", "snp-host"} <= idle
    assert {"pool-has-devices", "hostpci-count", INPUTS_KNOWN}.isdisjoint(idle)


def test_other_resources_are_none_of_the_packs_business() -> None:
    """On a resource that is no component of ours every policy is not applicable."""
    violations, idle = judge("AgentInstall", proxied({}))
    assert violations == {}
    assert idle == {p.name for p in policies() if isinstance(p, ResourceValidationPolicy)}


@pytest.mark.parametrize(
    ("path", "unknown", "says"),
    [
        (("service",), UNKNOWN_STRING_VALUE, "input service is not known yet"),
        (("service", "devices"), UNKNOWN_ARRAY_VALUE, "input service.devices is not known yet"),
        (("service", "model", "kv_heads"), UNKNOWN_NUMBER_VALUE, "input service.model.kv_heads is not known yet"),
        (("service", "effective_environment", "NCCL_P2P_DISABLE"), UNKNOWN_STRING_VALUE, "NCCL_P2P_DISABLE"),
    ],
)
def test_an_unknown_input_is_a_violation(path: tuple[str, ...], unknown: str, says: str) -> None:
    """What is not known in preview is refused there: an unknown value would turn every mandatory policy advisory."""
    props = _plain_service()
    here = props
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = unknown
    violations, idle = judge("SglangService", proxied(props))
    assert set(violations) == {INPUTS_KNOWN}
    assert says in violations[INPUTS_KNOWN][0]
    assert "tp-divides-heads" in idle


def _plain_service() -> dict[str, Any]:
    return {"service": _unwrap(wired(**SOUND["SglangService"])["service"])}


def _unwrap(value: Any) -> Any:
    if hasattr(value, "keys"):
        return {key: _unwrap(value[key]) for key in value}
    return [_unwrap(v) for v in value] if hasattr(value, "__len__") and not isinstance(value, str) else value


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda props: props.pop("service"), "input service is missing"),
        (lambda props: props["service"].pop("tp"), "input service.tp: field required"),
        (lambda props: props["service"].update(tp=4.5), "input service.tp:"),
        (lambda props: props["service"].update(devices="0000:01:00.0"), "input service.devices:"),
        (lambda props: props["service"].update(arguments=[["a"]]), "input service.arguments.0"),
    ],
    ids=["no spec", "no field", "half a GPU", "text for a list", "half a pair"],
)
def test_a_malformed_input_is_a_violation(edit: Any, says: str) -> None:
    """An input that is no spec is refused by name, and is no traceback."""
    props = _plain_service()
    edit(props)
    violations, _ = judge("SglangService", proxied(props))
    assert set(violations) == {INPUTS_KNOWN}
    assert says in violations[INPUTS_KNOWN][0]


def test_fields_that_a_spec_does_not_have_are_ignored() -> None:
    """A component may show more than the rules read."""
    props = _plain_service()
    props["service"]["colour"] = "green"
    assert judge("SglangService", proxied(props))[0] == {}


def test_a_gpu_in_two_pools_is_seen_in_the_whole_stack() -> None:
    """No single component shows that two pools have the same GPU."""
    sound = judge_stack(("serving", {"devices": [*SERVING]}), ("confidential", {"devices": [*CONFIDENTIAL]}))
    assert sound == {}
    twice = judge_stack(("serving", {"devices": [*SERVING]}), ("confidential", {"devices": [SERVING[0]]}))
    assert "pools serving and confidential: both have 0000:01:00" in twice[STACK_WIDE][0]


@pytest.mark.parametrize("outputs", [{}, {"devices": UNKNOWN_ARRAY_VALUE}], ids=["missing", "unknown"])
def test_a_pool_without_known_devices_is_no_silent_pass(outputs: dict[str, Any]) -> None:
    """What cannot be compared is reported."""
    assert "pool serving" in judge_stack(("serving", outputs))[STACK_WIDE][0]


def test_the_pack_has_a_policy_for_each_rule_that_components_decide() -> None:
    """Rules of the stack file and of facts alone are judged before there are components."""
    names = {policy.name for policy in policies()}
    decided = {rule.name for rule in RULES.values() if not set(rule.scopes) <= {Scope.CONFIG, Scope.FACTS, Scope.STACK}}
    assert names == decided | {INPUTS_KNOWN, STACK_WIDE}


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: policy.name)
def test_a_policy_explains_itself_and_has_its_rules_level(policy: Any) -> None:
    """Refusals are mandatory by default, warnings advisory."""
    assert policy.display_name
    assert policy.description.endswith(".")
    assert policy.remediation_steps
    assert policy.severity
    warns = policy.name in RULES and RULES[policy.name].level is Level.WARN
    assert policy.enforcement_level is (EnforcementLevel.ADVISORY if warns else EnforcementLevel.MANDATORY)


def test_every_violation_is_reported_once() -> None:
    """A rule that two checks of a component judge speaks once."""
    violations, _ = judge("SglangService", wired(service=service(effective_environment={}), host=HOST))
    assert len(violations["p2p-disabled"]) == 1


def test_a_vm_pool_is_sound_too() -> None:
    """The confidential half of kpro6 passes."""
    assert judge("GpuPool", wired(pool=vm_pool(), host=HOST))[0] == {}


def test_no_rule_of_a_component_goes_without_a_policy() -> None:
    """Whatever a judgement of a plan's part says, a policy says too, but for what spans parts."""
    fired = {p.rule for case in test_rules_specs.CASES for judge in case.fires.values() for p in judge()}
    assert fired - {policy.name for policy in policies()} == {"memory-shared"}


def test_a_rule_is_applicable_where_its_scopes_say() -> None:
    """No policy calls itself not applicable to a component that its rule judges."""
    kinds = {"GpuPool": Scope.POOL, "VfioBinding": Scope.BINDING, "PciMapping": Scope.MAPPING}
    kinds |= {"LxcGpuPassthrough": Scope.CONTAINER, "ConfidentialVm": Scope.VM, "SglangService": Scope.SERVICE}
    for component, specs, rule, _ in BROKEN:
        assert kinds[component] in RULES[rule].scopes, (component, rule)
        assert rule not in judge(component, wired(**specs))[1]
