"""Smaller commands of the host."""

from __future__ import annotations

from testbed.simulator.commands.call import Answer, Call, options
from testbed.simulator.kernel import PCI_DRIVERS
from testbed.simulator.pveconf import GuestError

KNOWN_MODULES = {*PCI_DRIVERS, "vfio_pci", "vfio", "vfio_iommu_type1", "nvidia_uvm", "nvidia-uvm", "nvidia_modeset"}


async def modprobe(call: Call) -> Answer:
    """Load a module that the simulated kernel has."""
    words, _ = options(call.args, flags=("-q", "--quiet", "-v", "--first-time"))
    for module in words:
        if module not in KNOWN_MODULES:
            folder = f"/lib/modules/{call.machine.state.kernel.release}"
            text = f"modprobe: FATAL: Module {module} not found in directory {folder}\n"
            return Answer(stderr=text, code=1)
        call.machine.kernel.load_module(module)
    return Answer()


async def lxc_info(call: Call) -> Answer:
    """Print the PID of a container's init."""
    words, given = options(call.args, flags=("-p", "--pid", "-H", "--no-humanize", "-s", "--state"),
                           valued=("-n", "--name"))  # fmt: skip
    names = given.get("-n", []) + given.get("--name", []) + words
    if len(names) != 1 or not names[0].isdigit():
        raise call.limit()
    try:
        container = call.machine.containers.need(int(names[0]))
    except GuestError:
        return Answer(stderr=f"{names[0]} doesn't exist\n", code=1)
    bare = bool({"-H", "--no-humanize"} & given.keys())
    text = ""
    if {"-s", "--state"} & given.keys():
        state = "RUNNING" if container.running else "STOPPED"
        text += f"{state}\n" if bare else f"State:          {state}\n"
    if {"-p", "--pid"} & given.keys() and container.init_pid:
        text += f"{container.init_pid}\n" if bare else f"PID:            {container.init_pid}\n"
    return Answer(text)


async def pveversion(call: Call) -> Answer:
    """Print Proxmox's version."""
    if call.args:
        raise call.limit()
    state = call.machine.state
    return Answer(f"pve-manager/{state.pve_version}/0123456789abcdef (running kernel: {state.kernel.release})\n")


async def pvesh(call: Call) -> Answer:
    """Answer `pvesh get /version`."""
    words, given = options(call.args, valued=("--output-format",))
    if words != ["get", "/version"]:
        raise call.limit()
    version = call.machine.state.pve_version
    release = version.rsplit(".", 1)[0]
    if given.get("--output-format") == ["json"]:
        return Answer(f'{{"release":"{release}","repoid":"0123456789abcdef","version":"{version}"}}\n')
    return Answer(f"release {release}\nversion {version}\n")


async def dmesg(call: Call) -> Answer:
    """Print what the kernel says of hanging unbinds."""
    options(call.args, flags=("-T", "--ctime", "-H", "--nopager", "-x"), valued=("-l", "--level"))
    text = "NVRM: Attempting to remove device {} with non-zero usage count!\n"
    stuck = (f for f in call.machine.kernel.functions.values() if f.unbinding and f.driver == "nvidia")
    return Answer("".join(text.format(f.address) for f in stuck))


async def fuser(call: Call) -> Answer:
    """Print the PIDs that have device nodes open."""
    words, _ = options(call.args, flags=("-v", "-s"))
    text, found = "", False
    for name in words:
        node = "/" + str(call.path(name).relative_to(call.machine.tree.root))
        holders = call.machine.processes.holders(node)
        found = found or bool(holders)
        text += "".join(f" {p.pid}" for p in holders)
    return Answer(text.lstrip() + "\n" if text else "", code=0 if found else 1)


async def udevadm(call: Call) -> Answer:
    """Return from `udevadm settle`: no event of a device waits here."""
    if options(call.args, valued=("-t", "--timeout"))[0] != ["settle"]:
        raise call.limit()
    return Answer()


async def unsupported(call: Call) -> Answer:
    """Refuse what would touch the machine that the simulator runs on."""
    raise call.limit()
