"""Every rule by name: what it demands, how much it weighs, where it can be judged.

A rule has one level. What is refused for one reason and only warned of for another is two rules, so that each can be
made stricter or laxer by name in a policy configuration.
"""

from __future__ import annotations

from topology.problem import Problem
from topology.rules.catalogue_devices import DEVICE_RULES
from topology.rules.catalogue_services import SERVICE_RULES

RULES = {rule.name: rule for rule in (*DEVICE_RULES, *SERVICE_RULES)}


def broken(rule: str, subject: str, value: str, why: str, fix: str) -> Problem:
    """Make a problem of a rule of the catalogue, which knows its level."""
    return Problem(rule=rule, subject=subject, value=value, why=why, fix=fix, level=RULES[rule].level)
