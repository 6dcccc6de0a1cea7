from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.engine.plugins._resource import Job
    from testbed.engine.plugins._wire import Props


def autonamed(job: Job, olds: Props, inputs: Props, seed: bytes) -> Props:
    """The inputs with a `name`: the given one, else the previous one, else the resource's and seven hex digits."""
    if inputs.get("name") is not None:
        return inputs
    return inputs | {"name": olds.get("name") or f"{job.name}-{hashlib.sha256(seed).hexdigest()[:7]}"}
