"""Rules on devices, guests and hosts, by name."""

from __future__ import annotations

from topology.problem import Level
from topology.rules.rule import Rule, Scope, Weight

_S = Scope
_DEVICES = "change the pools' device lists in the stack file"

DEVICE_RULES = (
    # Ownership
    Rule(
        "one-device-one-owner",
        "a GPU, with all functions of its slot, belongs to exactly one pool",
        _DEVICES,
        (_S.STACK, _S.CONFIG, _S.BINDING, _S.POOL, _S.MAPPING, _S.CONTAINER, _S.VM),
        Weight.CRITICAL,
    ),
    Rule(
        "one-pool-one-owner",
        "a pool belongs to one container, one VM or the host itself",
        "split the pool's devices into one pool per owner",
        (_S.POOL, _S.CONFIG),
        Weight.CRITICAL,
    ),
    Rule("pool-exists", "containers, VMs and services name a pool of the stack file", "correct the name", (_S.CONFIG,)),
    Rule(
        "same-devices",
        "whoever uses a pool uses exactly its devices",
        "let the plan make the parts; don't edit one alone",
        (_S.STACK, _S.CONTAINER),
        Weight.CRITICAL,
    ),
    Rule(
        "pool-has-devices",
        "whatever holds GPUs holds at least one",
        "list the devices, or remove the entry",
        (_S.POOL, _S.BINDING, _S.MAPPING, _S.CONTAINER, _S.VM),
    ),
    Rule(
        "driver-known",
        "a pool's driver is nvidia or vfio-pci",
        "set the pool's driver",
        (_S.POOL, _S.BINDING),
    ),
    Rule(
        "container-on-nvidia",
        "a container's GPUs are on the nvidia driver, which makes the device nodes it is given",
        "set driver: nvidia on the pool, or give the pool to a VM",
        (_S.POOL, _S.CONTAINER, _S.CONFIG),
        Weight.CRITICAL,
    ),
    Rule(
        "vm-on-vfio",
        "a VM's GPUs are on vfio-pci, which hands the whole device to it",
        "set driver: vfio-pci on the pool, or give the pool to a container",
        (_S.POOL, _S.VM, _S.CONFIG),
        Weight.CRITICAL,
    ),
    Rule(
        "service-on-nvidia",
        "a service runs on GPUs of the nvidia driver",
        "let the service use a pool with driver: nvidia",
        (_S.POOL, _S.SERVICE, _S.CONFIG),
        Weight.CRITICAL,
    ),
    Rule(
        "service-in-its-container",
        "a service runs where its pool's GPUs are",
        "let the service and its container name the same pool",
        (_S.CONFIG,),
    ),
    Rule(
        "names-unique",
        "units, ports, mappings and local copies are not shared by accident",
        "give each its own",
        (_S.CONFIG,),
    ),
    Rule(
        "proxmox-endpoint",
        "PCI mappings are made through Proxmox's API",
        "fill in proxmox.endpoint",
        (_S.CONFIG,),
    ),
    # Where the devices sit
    Rule(
        "numa-node",
        "a pool does not span NUMA nodes unless it says so, and a node is known",
        "move the device to a pool of its node, or say spanNumaNodes: true",
        (_S.POOL, _S.FACTS),
    ),
    Rule(
        "iommu-group",
        "devices that share an IOMMU group go to a VM together or not at all",
        "put the whole group into one pool",
        (_S.POOL, _S.STACK, _S.FACTS),
        Weight.CRITICAL,
    ),
    Rule(
        "iommu-group-mixed",
        "a container's GPU shares its IOMMU group with nothing, else it cannot later go to a VM alone",
        "mind it before the pool's driver becomes vfio-pci",
        (_S.FACTS,),
        Weight.LOW,
        Level.WARN,
    ),
    # VMs
    Rule(
        "hostpci-count",
        "a VM has at most 16 hostpci entries",
        "give the VM a smaller pool",
        (_S.VM, _S.MAPPING, _S.CONFIG),
    ),
    Rule(
        "snp-needs-translated-iommu",
        "SEV-SNP needs an IOMMU that translates",
        "remove iommu=pt, iommu=off and amd_iommu=off or pgtbl_v2 from the kernel's command line and reboot",
        (_S.VM,),
        Weight.CRITICAL,
    ),
    Rule(
        "snp-host",
        "a SEV-SNP VM needs a host with SEV-SNP on",
        "turn on SMEE, SEV-SNP and the IOMMU in the BIOS, and kvm_amd.sev=1",
        (_S.VM,),
        Weight.CRITICAL,
    ),
    Rule(
        "mmio-window",
        "a VM's 64-bit MMIO window and address width hold its GPUs' BARs",
        "use CPU type host, or set phys-bits, or X-PciMmio64Mb",
        (_S.VM,),
    ),
    Rule(
        "mmio-window-unsure",
        "a VM's address width holds its GPUs' BARs with older firmware too",
        "use CPU type host, or set phys-bits higher, or X-PciMmio64Mb",
        (_S.VM,),
        Weight.LOW,
        Level.WARN,
    ),
    Rule(
        "gpu-confidential-computing-off",
        "it is known that several GPUs in one VM run without GPU confidential computing",
        "use one GPU per VM where GPU memory and PCIe traffic must be protected too",
        (_S.VM,),
        Weight.MEDIUM,
        Level.WARN,
    ),
    Rule("preset", "a preset named is a preset shipped", "see `gpu-topology presets`", (_S.CONFIG,)),
    # Facts
    Rule("host-name", "the host reached is the node meant", "correct host.address or host.node", (_S.FACTS,)),
    Rule("facts-complete", "what was not readable is no declared device or guest", "see the message", (_S.FACTS,)),
    Rule(
        "facts-partial",
        "everything on the host could be read",
        "see the message",
        (_S.FACTS,),
        Weight.LOW,
        Level.WARN,
    ),
    Rule("device-exists", "every declared address exists on the host", "correct the address", (_S.FACTS,)),
    Rule("device-answers", "a declared device answers", "reset or power-cycle the host", (_S.FACTS,)),
    Rule("device-is-gpu", "a declared device is a GPU of the declared model", "correct address or gpu", (_S.FACTS,)),
    Rule("device-memory", "a GPU has the declared memory", "correct gpu", (_S.FACTS,)),
    Rule("device-whole", "a GPU has no SR-IOV functions and no MIG slices", "turn them off", (_S.FACTS,)),
    Rule("boot-vga", "a VM's GPU is not the boot console", "let another card have the console", (_S.FACTS,)),
    Rule(
        "boot-vga-shared",
        "a container's GPU is not the boot console",
        "let another card have the console",
        (_S.FACTS,),
        Weight.LOW,
        Level.WARN,
    ),
    Rule("guest-exists", "a container or VM named exists", "correct the VMID", (_S.FACTS,)),
    Rule(
        "guest-undeclared",
        "no guest that the stack file does not name is given a pool's GPU by its configuration",
        "take the GPU out of that guest's configuration, or name the guest in the stack file",
        (_S.FACTS,),
        level=Level.WARN,
    ),
    Rule(
        "vfio-ids",
        "no ids= option of vfio-pci takes a container's GPUs at boot",
        "remove the option",
        (_S.FACTS,),
        Weight.MEDIUM,
        Level.WARN,
    ),
)
