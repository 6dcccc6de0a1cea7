"""The policies: one for each rule that components' inputs can decide, mandatory or advisory as the rule is.

The rules are those of `topology.rules`, never a copy. Each policy's level can be set by its name in a policy
configuration (`pulumi preview --policy-pack policies --policy-pack-config FILE`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pulumi_policy import (
    EnforcementLevel,
    Policy,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    Severity,
    StackValidationArgs,
    StackValidationPolicy,
)

from policies.views import ViewError, view
from topology.problem import Level, Problem
from topology.rules import (
    RULES,
    Rule,
    Scope,
    check_binding,
    check_container,
    check_host,
    check_mapping,
    check_pool,
    check_service,
    check_vm,
    shared_devices,
)
from topology.spec import BindingSpec, ContainerSpec, HostSpec, MappingSpec, PoolSpec, ServiceSpec, VmSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NAME = "gpu-topology"
INPUTS_KNOWN = "inputs-known"
STACK_WIDE = "one-device-one-owner-in-stack"

_TOKEN = "gpu-topology:index:"  # noqa: S105  a type token
_POOL = f"{_TOKEN}GpuPool"
_LEVELS = {Level.REFUSE: EnforcementLevel.MANDATORY, Level.WARN: EnforcementLevel.ADVISORY}


def policies() -> list[Policy]:
    """Make every policy of the pack."""
    judged = [rule for rule in RULES.values() if not _SCOPES.isdisjoint(rule.scopes)]
    return [_inputs_known(), *(_resource_policy(rule) for rule in judged), _stack_policy()]


def _pool(props: Mapping[str, Any]) -> tuple[Problem, ...]:
    return check_pool(view(PoolSpec, props, "pool"), view(HostSpec, props, "host"))


def _binding(props: Mapping[str, Any]) -> tuple[Problem, ...]:
    return check_binding(view(BindingSpec, props, "binding"))


def _mapping(props: Mapping[str, Any]) -> tuple[Problem, ...]:
    return check_mapping(view(MappingSpec, props, "mapping"))


def _container(props: Mapping[str, Any]) -> tuple[Problem, ...]:
    return check_container(view(ContainerSpec, props, "container"))


def _vm(props: Mapping[str, Any]) -> tuple[Problem, ...]:
    vm = view(VmSpec, props, "vm")
    return (*check_vm(vm), *check_host(view(HostSpec, props, "host"), [vm]))


def _service(props: Mapping[str, Any]) -> tuple[Problem, ...]:
    service = view(ServiceSpec, props, "service")
    on_host = check_host(view(HostSpec, props, "host"), services=[service]) if "host" in props else ()
    return tuple(dict.fromkeys((*check_service(service), *on_host)))


_CHECKS: Mapping[str, tuple[Scope, Callable[[Mapping[str, Any]], tuple[Problem, ...]]]] = {
    _POOL: (Scope.POOL, _pool),
    f"{_TOKEN}VfioBinding": (Scope.BINDING, _binding),
    f"{_TOKEN}PciMapping": (Scope.MAPPING, _mapping),
    f"{_TOKEN}LxcGpuPassthrough": (Scope.CONTAINER, _container),
    f"{_TOKEN}ConfidentialVm": (Scope.VM, _vm),
    f"{_TOKEN}SglangService": (Scope.SERVICE, _service),
}
_SCOPES = frozenset(scope for scope, _ in _CHECKS.values())


def _resource_policy(rule: Rule) -> ResourceValidationPolicy:
    def validate(args: ResourceValidationArgs, report_violation: ReportViolation) -> None:
        scope, check = _CHECKS.get(args.resource_type, (None, None))
        if check is None:
            args.not_applicable(f"{args.resource_type} is no component of {NAME}")
            return
        try:
            problems = check(args.props)
        except ViewError:
            args.not_applicable(f"the component's inputs cannot be judged; {INPUTS_KNOWN} reports that")
            return
        broken = [str(problem) for problem in problems if problem.rule == rule.name]
        for message in broken:
            report_violation(message, None)
        if not broken and scope not in rule.scopes:
            args.not_applicable(f"{rule.name} does not look at {args.resource_type}")

    return ResourceValidationPolicy(
        name=rule.name,
        display_name=rule.title,
        description=f"{rule.demand[0].upper()}{rule.demand[1:]}.",
        remediation_steps=f"{rule.remedy[0].upper()}{rule.remedy[1:]}.",
        severity=Severity(rule.weight.value),
        enforcement_level=_LEVELS[rule.level],
        validate=validate,
    )


def _inputs_known() -> ResourceValidationPolicy:
    """Make the policy without which an unknown value would turn every other one advisory."""

    def validate(args: ResourceValidationArgs, report_violation: ReportViolation) -> None:
        _, check = _CHECKS.get(args.resource_type, (None, None))
        if check is None:
            args.not_applicable(f"{args.resource_type} is no component of {NAME}")
            return
        try:
            check(args.props)
        except ViewError as error:
            report_violation(
                f"{args.name}: {error}. Rule {INPUTS_KNOWN}: what cannot be read in preview cannot be judged there. "
                "Fix: give the component plain values, never outputs of other resources.",
                None,
            )

    return ResourceValidationPolicy(
        name=INPUTS_KNOWN,
        display_name="Inputs known",
        description="Inputs that rules judge are known in preview and complete.",
        remediation_steps="Give the component plain values, never outputs of other resources.",
        severity=Severity.CRITICAL,
        enforcement_level=EnforcementLevel.MANDATORY,
        validate=validate,
    )


def _stack_policy() -> StackValidationPolicy:
    rule = RULES["one-device-one-owner"]

    def validate(args: StackValidationArgs, report_violation: ReportViolation) -> None:
        pools = [resource for resource in args.resources if resource.resource_type == _POOL]
        owned = []
        for pool in pools:
            try:
                owned.append((pool.name, view(tuple[str, ...], pool.props, "devices")))
            except ViewError as error:
                report_violation(f"pool {pool.name}: {error}, so its devices cannot be compared with others'", pool.urn)
        for problem in shared_devices(owned):
            report_violation(str(problem), None)

    return StackValidationPolicy(
        name=STACK_WIDE,
        display_name="One device one owner, in the whole stack",
        description="No GPU belongs to two pools of the stack.",
        remediation_steps=f"{rule.remedy[0].upper()}{rule.remedy[1:]}.",
        severity=Severity(rule.weight.value),
        enforcement_level=EnforcementLevel.MANDATORY,
        validate=validate,
    )
