"""Revisions: why an operation runs again, and why it does not.

Pulumi runs an action when its trigger changes and never looks at the host. So the trigger is made from the host: while
a thing is as wanted, its revision is the one that the host's own book has; when it is not, the revision is new.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topology.facts import Facts

ADOPTED = "adopted"
"""The revision of what was found as wanted and was never touched."""


def revision(name: str, *, as_wanted: bool, desired: object, observed: object, facts: Facts) -> str:
    """The revision of the thing that the ledger calls `name`; `desired` and `observed` are JSON values.

    The ledger's sequence is in it, because every operation that tried to change something raises it: an attempt that
    failed, and left everything as it was, is tried again. The boot is in it, because a host that was installed anew or
    rolled back to a snapshot has its sequence, and all that was seen, as they were at an earlier attempt.
    """
    if as_wanted:
        return facts.ledger.revisions.get(name, ADOPTED)
    return f"{digest(desired)[:8]}-{digest(observed)[:8]}-{facts.ledger.sequence}-{facts.host.boot_id[:8]}"


def digest(value: object) -> str:
    """SHA-256 of a JSON value in canonical form, in hexadecimal."""
    return sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
