"""The rules, written once: asked when a stack file is loaded, when a plan is made, and by the policy pack."""

from topology.rules.catalogue import RULES
from topology.rules.configuration import check_config
from topology.rules.guests import check_container, check_vm
from topology.rules.hosts import check_host
from topology.rules.memory import service_fit
from topology.rules.observed import check_facts
from topology.rules.pools import check_binding, check_mapping, check_pool, check_pools, shared_devices
from topology.rules.rule import Rule, Scope, Weight
from topology.rules.services import check_service
from topology.rules.whole import check_spec, refuse, shared_memory

__all__ = [
    "RULES",
    "Rule",
    "Scope",
    "Weight",
    "check_binding",
    "check_config",
    "check_container",
    "check_facts",
    "check_host",
    "check_mapping",
    "check_pool",
    "check_pools",
    "check_service",
    "check_spec",
    "check_vm",
    "refuse",
    "service_fit",
    "shared_devices",
    "shared_memory",
]
