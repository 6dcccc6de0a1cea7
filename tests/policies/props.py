"""Components' inputs as the engine hands them to a policy, and policies run as it runs them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pulumi_policy import (
    PolicyCustomTimeouts,
    PolicyResource,
    PolicyResourceOptions,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.policy import _NotApplicableError
from pulumi_policy.proxy import unknown_checking_proxy

from policies.pack import policies

if TYPE_CHECKING:
    from collections.abc import Mapping

OPTIONS = PolicyResourceOptions(
    protect=False,
    ignore_changes=[],
    delete_before_replace=None,
    aliases=[],
    custom_timeouts=PolicyCustomTimeouts(0, 0, 0),
    additional_secret_outputs=[],
    parent=None,
)


def wired(**specs: Any) -> dict[str, Any]:
    """What arrives of a component's specs: lists for tuples, floats for whole numbers, through proxies."""
    plain = json.loads(json.dumps({key: asdict(spec) for key, spec in specs.items()}), parse_int=float)
    return proxied(plain)


def proxied(props: dict[str, Any]) -> dict[str, Any]:
    """The same with proxies that raise where a value is not known."""
    return unknown_checking_proxy(props)


def token(component: str) -> str:
    """A component's type."""
    return f"gpu-topology:index:{component}"


def judge(component: str, props: Mapping[str, Any]) -> tuple[dict[str, list[str]], set[str]]:
    """Run every policy on a component: what each violated one says, and which are not applicable."""
    violations: dict[str, list[str]] = {}
    idle: set[str] = set()
    for policy in policies():
        if isinstance(policy, ResourceValidationPolicy):
            args = ResourceValidationArgs(token(component), props, "urn:x", "x", OPTIONS, None)
            try:
                policy.validate(args, _reporter(violations, policy.name))
            except _NotApplicableError:
                idle.add(policy.name)
    return violations, idle


def judge_stack(*pools: tuple[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Run every stack policy on pools, given as name and registered outputs."""
    violations: dict[str, list[str]] = {}
    resources = [
        PolicyResource(token("GpuPool"), proxied(props), f"urn:{name}", name, OPTIONS, None, None, [], {})
        for name, props in pools
    ]
    resources.append(PolicyResource("pulumi:pulumi:Stack", proxied({}), "urn:s", "s", OPTIONS, None, None, [], {}))
    for policy in policies():
        if isinstance(policy, StackValidationPolicy):
            policy.validate(StackValidationArgs(resources), _reporter(violations, policy.name))
    return violations


def _reporter(violations: dict[str, list[str]], name: str) -> Any:
    def report(message: str, urn: str | None = None) -> None:
        violations.setdefault(name, []).append(message)

    return report
