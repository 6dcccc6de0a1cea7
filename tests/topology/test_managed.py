"""What the host's own book must know as managed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.facts import hosts
from topology.facts import Facts
from topology.managed import agent_changes, agent_revision, managed_by, managed_revision

if TYPE_CHECKING:
    from topology.spec import TopologySpec


@pytest.fixture
def spec() -> TopologySpec:
    """kpro6 as it is split."""
    return hosts.plan(hosts.split(), hosts.facts("kpro6", "found")).spec


def _told(managed: object) -> Facts:
    raw = hosts.raw_facts("kpro6", "found")
    raw["ledger"] = {"managed": managed, "revisions": {"register": "told"}}
    return Facts.model_validate(raw)


def test_the_book_that_knows_all_keeps_its_revision(spec: TopologySpec) -> None:
    """What it knows beyond, of earlier configurations, is no reason to tell it again."""
    more = {**managed_by(spec), "vms": [200, 201]}
    assert managed_revision(spec, _told(managed_by(spec))) == "told"
    assert managed_revision(spec, _told(more)) == "told"


@pytest.mark.parametrize("lost", ["services", "vms", "containers"])
def test_a_book_that_lacks_something_is_told_again(spec: TopologySpec, lost: str) -> None:
    """A drain may stop only what the book knows, so what it lacks is a difference."""
    assert managed_revision(spec, _told({**managed_by(spec), lost: []})) != "told"


def test_a_lost_book_is_told_again(spec: TopologySpec) -> None:
    """Without a book nothing is managed, whatever the state says; once it was told, the revision stays."""
    raw = hosts.raw_facts("kpro6", "found")
    plan = hosts.plan(hosts.split(), Facts.model_validate(raw))
    told = managed_revision(spec, plan.facts)
    assert told != "adopted"
    after = Facts.model_validate(hosts.applied(plan, raw))
    assert managed_revision(spec, after) == told


def test_an_agent_file_that_is_gone_is_copied_again() -> None:
    """A copy by Pulumi sees no drift, so the revision is new while the file is gone, else the book's."""
    raw = hosts.raw_facts("kpro6", "split")
    raw["ledger"]["revisions"]["agent"] = "copied"
    assert agent_revision(Facts.model_validate(raw)) == "copied"
    raw["host"]["agent_installed"] = False
    assert agent_revision(Facts.model_validate(raw)) not in {"copied", "adopted"}


def test_only_what_was_installed_can_be_missing() -> None:
    """A host that is adopted has no agent yet, which is no difference; one whose boot unit was disabled has."""
    raw = hosts.raw_facts("kpro6", "split")
    raw["host"]["agent_installed"] = False
    assert not [*agent_changes(Facts.model_validate(raw))]
    raw["ledger"]["revisions"]["agent"] = "copied"
    (change,) = agent_changes(Facts.model_validate(raw))
    assert str(change) == "host kpro6: agent and boot unit missing or different -> installed"
    raw["host"]["agent_installed"] = True
    assert not [*agent_changes(Facts.model_validate(raw))]
