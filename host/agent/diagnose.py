"""Why a service did not become ready: the journal's tail, the GPUs' load, and the likely cause with its fix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .facts_services import NCCL_CONF, assignments
from .guests import run_inside
from .pci import Address, parse_address
from .processes import allowed, unit_environment
from .result import BadRequestError, Json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .request import Service
    from .system import System

JOURNAL_LINES = 40
BUSY = 95
"""Per cent of utilisation at which a GPU without a token is spinning in a collective."""
_LOAD = ("nvidia-smi", "--query-gpu=pci.bus_id,utilization.gpu,power.draw,memory.used", "--format=csv,noheader,nounits")

NCCL_CAUSE = (
    "NCCL P2P under a translated IOMMU: every GPU is at 100 % and no token comes, because the IOMMU's translation "
    "(SEV-SNP needs it) corrupts peer-to-peer DMA, and NCCL_P2P_DISABLE=1 is not in the process's environment. Fix: "
    "set NCCL_P2P_DISABLE=1 and its companions in the service's environment (`gpu-topology` renders them by itself)"
)
_CAUSES = (
    (
        r"out of memory|OutOfMemoryError|Not enough memory",
        "out of GPU memory: lower mem-fraction-static or the context",
    ),
    (r"address already in use|Errno 98", "its port is taken: `ss -ltnp` in its container names the process"),
    (
        r"config\.json|Repo id must be|not a local folder|No such file or directory.*(model|/)|can't load the model",
        "the model's path is missing where the service runs: mount it into the container, or correct the path",
    ),
)


@dataclass(frozen=True)
class Load:
    """A GPU's utilisation in per cent, power in watts, and used memory in MiB."""

    address: Address
    utilisation: int
    power: float
    memory: int


def journal(system: System, service: Service, lines: int, secret: str | None = None) -> list[str]:
    """The unit's last journal lines, without secrets: SGLang prints all its arguments when it starts."""
    done = run_inside(
        system,
        service.container,
        "journalctl",
        "-u",
        service.unit,
        "-n",
        str(lines),
        "--no-pager",
        "-o",
        "cat",
        limit=15,
    )
    return [without_secrets(line, secret)[:500] for line in done.out.splitlines() if line.strip()]


def without_secrets(line: str, secret: str | None) -> str:
    """A journal line with API keys hidden."""
    if secret:
        line = line.replace(secret, "***")
    line = re.sub(r"((?:api_key|hf_token|token)['\"]?\s*[=:]\s*)(['\"])(?!\2).*?\2", r"\1\2***\2", line)
    return re.sub(r"(--(?:admin-)?api-key[= ])\S+", r"\1***", line)


def loads(system: System, devices: Iterable[Address]) -> list[Load]:
    """What the service's GPUs do right now, as the host's nvidia-smi says."""
    wanted, found = set(devices), []
    done = system.run(*_LOAD, limit=15)
    for line in done.out.splitlines() if done.ok else ():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            domain, _, rest = cells[0].partition(":")
            load = Load(
                parse_address(f"{domain[-4:]}:{rest}"), int(float(cells[1])), float(cells[2]), int(float(cells[3]))
            )
        except (ValueError, IndexError, BadRequestError):
            continue
        if load.address in wanted:
            found.append(load)
    return found


@dataclass(frozen=True)
class Suspect:
    """A service that is not ready: its GPUs, the parallelism its unit asks for, what it sees, what it may not tell."""

    service: Service
    devices: tuple[Address, ...]
    tp: int
    visible: int | None
    translated: bool
    secret: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What was seen of a suspect."""

    suspect: Suspect
    journal: list[str]
    loads: list[Load]
    environment: dict[str, str]

    @property
    def cause(self) -> str:
        """The likely cause and its fix, or that it isn't known."""
        suspect = self.suspect
        if suspect.visible is not None and suspect.tp > suspect.visible:
            return (
                f"tensor parallelism {suspect.tp} and only {suspect.visible} GPUs are visible to it: "
                "the unit's --tp and its pool disagree"
            )
        said = "\n".join(self.journal)
        for pattern, cause in _CAUSES:
            if re.search(pattern, said, re.IGNORECASE):
                return cause
        spinning = bool(self.loads) and all(one.utilisation >= BUSY for one in self.loads)
        unset = self.environment.get("NCCL_P2P_DISABLE") != "1"
        if spinning and suspect.tp > 1 and suspect.translated and unset:
            return NCCL_CAUSE
        return "unknown; the journal's tail and the GPUs' load are below"

    def details(self) -> dict[str, Json]:
        """For the result's JSON."""
        return {
            "cause": self.cause,
            "journal": [*self.journal],
            "gpus": [
                {"address": one.address, "utilisation": one.utilisation, "power_w": one.power, "memory_mib": one.memory}
                for one in self.loads
            ],
        }

    def text(self) -> str:
        """For the message: the cause, the GPUs' load, and the journal's last lines."""
        busy = ", ".join(f"{one.address} {one.utilisation} % {one.power:.0f} W" for one in self.loads) or "not known"
        tail = "\n  ".join(self.journal[-8:]) or "empty"
        return f"Likely cause: {self.cause}. GPUs: {busy}. Journal:\n  {tail}\n"


def diagnose(system: System, suspect: Suspect) -> Diagnosis:
    """Look at a service that is not ready, before anything is undone."""
    service = suspect.service
    lines = journal(system, service, JOURNAL_LINES, suspect.secret)
    seen = loads(system, suspect.devices)
    conf = run_inside(system, service.container, "cat", NCCL_CONF)
    environment = assignments(conf.out if conf.ok else "") | allowed(unit_environment(system, service))
    return Diagnosis(suspect, lines, seen, environment)
