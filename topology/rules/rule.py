"""What is said of a rule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from topology.problem import Level


class Scope(StrEnum):
    """What a rule looks at: a component's spec, several together, the stack file, or the facts of a host."""

    POOL = "pool"
    BINDING = "binding"
    MAPPING = "mapping"
    CONTAINER = "container"
    VM = "vm"
    SERVICE = "service"
    STACK = "stack"
    CONFIG = "config"
    FACTS = "facts"


class Weight(StrEnum):
    """What breaks without the rule: a person's work is lost, a service doesn't run, or it runs worse."""

    CRITICAL = "critical"
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule's name, what it demands in a sentence, how to satisfy it, its scopes and weight."""

    name: str
    demand: str
    remedy: str
    scopes: tuple[Scope, ...]
    weight: Weight = Weight.HIGH
    level: Level = Level.REFUSE

    @property
    def title(self) -> str:
        """The name for people: `tp-divides-heads` is `TP divides heads`."""
        first, *rest = (_SPELLING.get(word, word) for word in self.name.split("-"))
        return " ".join([first[0].upper() + first[1:], *rest])


_SPELLING = {
    "tp": "TP",
    "kv": "KV",
    "vm": "VM",
    "vms": "VMs",
    "numa": "NUMA",
    "iommu": "IOMMU",
    "snp": "SEV-SNP",
    "p2p": "P2P",
    "gpu": "GPU",
    "mmio": "MMIO",
    "mig": "MIG",
    "sriov": "SR-IOV",
    "pci": "PCI",
    "dp": "DP",
    "vga": "VGA",
    "hostpci": "hostpci",
    "vfio": "VFIO",
}
