"""Every rule fires where it must, stays calm where it must, and stands in the catalogue."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.topology import test_rules_configuration, test_rules_facts, test_rules_specs
from tests.topology.specs import Case, service, stack
from topology.problem import Level, Problem, TopologyError
from topology.rules import RULES, check_config, refuse, service_fit
from topology.rules.catalogue import broken

CASES = [
    pytest.param(case, id=f"{module.__name__.rsplit('_', 1)[1]}-{case.rule}")
    for module in (test_rules_configuration, test_rules_facts, test_rules_specs)
    for case in module.CASES
]


def _cases() -> list[Case]:
    return [case for parameter in CASES for case in parameter.values if isinstance(case, Case)]


@pytest.mark.parametrize("case", CASES)
def test_a_rule_fires(case: Case) -> None:
    """In each of its cases the rule is broken, and the message says with what."""
    for says, judgement in case.fires.items():
        messages = [str(problem) for problem in judgement() if problem.rule == case.rule]
        assert messages, says
        assert any(says in message for message in messages), messages


@pytest.mark.parametrize("case", CASES)
def test_a_rule_stays_calm(case: Case) -> None:
    """Just beside of what breaks it the rule is kept."""
    assert case.calm
    for judgement in case.calm:
        assert not [problem for problem in judgement() if problem.rule == case.rule]


@pytest.mark.parametrize("case", CASES)
def test_a_message_names_object_value_rule_and_fix(case: Case) -> None:
    """A person can act on every message, whose level is the rule's."""
    for judgement in case.fires.values():
        for problem in judgement():
            assert all((problem.subject, problem.value, problem.why, problem.fix))
            assert f"Rule {problem.rule}: " in str(problem)
            assert not problem.fix.endswith(".")
            assert problem.level is RULES[problem.rule].level


def test_every_rule_has_cases() -> None:
    """No rule of the catalogue goes without a case in which it fires, and no case names another rule."""
    assert {case.rule for case in _cases()} == set(RULES)


def test_rules_are_made_from_the_catalogue_only() -> None:
    """No module of the rules makes a problem past the catalogue, which knows its level."""
    folder = Path(test_rules_specs.__file__).parents[2] / "topology" / "rules"
    makers = {
        path.name
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem"
    }
    assert makers == {"catalogue.py"}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_explains_itself(name: str) -> None:
    """Its title, demand and remedy read on their own."""
    rule = RULES[name]
    assert rule.title[0].isupper()
    assert not rule.demand.endswith(".")
    assert rule.remedy
    assert rule.scopes


def test_titles_spell_names_as_people_do() -> None:
    """Abbreviations are in capitals."""
    assert RULES["tp-fits-kv-heads"].title == "TP fits KV heads"
    assert RULES["snp-needs-translated-iommu"].title == "SEV-SNP needs translated IOMMU"


def test_refuse_raises_with_all_refusals() -> None:
    """Refusals come together in one error, warnings are no part of it."""
    refusal = broken("tp-whole", "service a", "x", "y", "z")
    warning = broken("memory-margin", "service a", "x", "y", "z")
    with pytest.raises(TopologyError) as caught:
        refuse([warning, refusal, refusal])
    assert caught.value.problems == (refusal, refusal)


def test_refuse_returns_warnings() -> None:
    """Where nothing is refused, what to say aloud comes back."""
    warning = broken("memory-margin", "service a", "x", "y", "z")
    assert warning.level is Level.WARN
    assert refuse([warning]) == (warning,)
    assert refuse(check_config(stack())) == ()


def test_preview_can_say_what_fits() -> None:
    """The fit of a service is that of its own arguments."""
    short = service_fit(service(arguments={"context-length": "8192", "mem-fraction-static": "0.8"}))
    assert short.context == 8192
    assert short.static_mib == int((97887 - short.runtime_mib) * 0.8)


def test_problems_are_values() -> None:
    """The same problem found twice is one."""
    one, other = (broken("tp-whole", "a", "b", "c", "d") for _ in range(2))
    assert isinstance(one, Problem)
    assert {one, other} == {one}
