"""Rules that couple a host's IOMMU with its VMs and services."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topology.rules.catalogue import broken
from topology.rules.peers import forced_p2p, peer_problems

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from topology.problem import Problem
    from topology.spec import HostSpec, ServiceSpec, VmSpec

_OFF = {
    "iommu": ("off", "pt"),
    "amd_iommu": ("off", "pgtbl_v2"),
    "iommu.passthrough": ("1", "on", "y"),
}
"""Options with which the kernel refuses SEV-SNP (torvalds/linux drivers/iommu/amd/init.c, iommu_snp_enable)."""

_OPPOSITE = {"pt": "nopt", "off": "on", "pgtbl_v2": "pgtbl_v1", "1": "0", "on": "off", "y": "n"}


def check_host(
    host: HostSpec,
    vms: Sequence[VmSpec] = (),
    services: Sequence[ServiceSpec] = (),
) -> tuple[Problem, ...]:
    """Judge VMs and services against the host's IOMMU: SEV-SNP needs it to translate, and then P2P must be off."""
    confidential = [vm for vm in vms if vm.sev_snp]
    translated = True if confidential else host.translated_iommu
    return (
        *(problem for vm in confidential for problem in _snp(host, vm)),
        *(forced_p2p(f"host {host.node}", host.kernel_command_line) if translated else ()),
        *(problem for service in services for problem in peer_problems(service, translated=translated)),
    )


def _snp(host: HostSpec, vm: VmSpec) -> Iterator[Problem]:
    subject = f"VM {vm.vmid} on host {host.node}"
    options = _untranslating(host.kernel_command_line)
    if options or host.translated_iommu is False:
        found = f"has {' and '.join(options)} on its kernel's command line" if options else "does not translate DMA"
        yield broken(
            "snp-needs-translated-iommu",
            subject,
            f"is to run with SEV-SNP, and the host {found}",
            "the kernel turns SEV-SNP off when the IOMMU is off, passes through, or uses v2 page tables",
            f"remove {' and '.join(options) or 'iommu=pt'} (/etc/default/grub or /etc/kernel/cmdline), turn the IOMMU "
            "on in the BIOS, reboot; or set sevSnp: false",
        )
    if not host.snp:
        state = "is N" if host.snp is False else "cannot be read, so kvm_amd is not loaded"
        yield broken(
            "snp-host",
            subject,
            f"is to run with SEV-SNP, and /sys/module/kvm_amd/parameters/sev_snp {state}",
            "a SEV-SNP VM starts only on a host with SEV-SNP on",
            "turn on SMEE, SEV-SNP and the IOMMU in the BIOS, load kvm_amd with sev=1, reboot; or set sevSnp: false",
        )


def _untranslating(command_line: str) -> list[str]:
    """Options of the command line that keep the IOMMU from translating; of contradicting ones the last counts."""
    found: dict[str, str] = {}
    for word in command_line.split():
        name, _, values = word.partition("=")
        for value in values.split(","):
            for bad in _OFF.get(name, ()):
                if value == bad:
                    found[f"{name}={bad}"] = bad
                elif value == _OPPOSITE[bad]:
                    found.pop(f"{name}={bad}", None)
    return list(found)
