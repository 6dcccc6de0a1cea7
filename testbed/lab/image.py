"""The guest's image: Debian's root file system and kernel (the base), then everything that is the lab's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.engine.cache import REPOSITORY, Cache, building, digest
from testbed.engine.progress import SetupError, run, step
from testbed.lab.base import base_key, build_base
from testbed.lab.packages import kernel_release
from testbed.simulator.state import HostState, load_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.engine.progress import Step

HERE = Path(__file__).parent
DISK_SIZE = "2G"
KEPT_S = 24 * 3600
MASKED = (
    "apt-daily-upgrade.timer", "apt-daily.timer", "console-getty.service", "dev-hugepages.mount", "dev-mqueue.mount",
    "dnsmasq.service", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer",
    "getty@tty1.service", "lxc-monitord.service", "lxc-net.service", "lxc.service",
    "modprobe@configfs.service", "modprobe@dm_mod.service", "modprobe@drm.service", "modprobe@efi_pstore.service",
    "modprobe@fuse.service", "modprobe@loop.service", "proc-sys-fs-binfmt_misc.automount", "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount", "systemd-binfmt.service", "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service", "systemd-journal-flush.service", "systemd-logind.service",
    "systemd-pstore.service", "systemd-random-seed.service", "systemd-remount-fs.service", "systemd-sysctl.service",
    "systemd-sysusers.service", "systemd-timesyncd.service", "systemd-update-utmp-runlevel.service",
    "systemd-update-utmp.service", "systemd-user-sessions.service",
)  # fmt: skip
"""Units that take seconds of an emulated processor and that nothing here is about."""
MASKED_IN_CONTAINER = (
    "dbus.service", "dbus.socket", "driverctl@.service", "pve-guests.service", "ssh.service",
    "systemd-tmpfiles-setup-dev.service", "systemd-tmpfiles-setup.service", "systemd-udev-settle.service",
    "systemd-udev-trigger.service", "systemd-udevd.service",
)  # fmt: skip
TOOLS = {
    "usr/lib/testbed-lab/pct": "pct",
    "usr/lib/testbed-lab/qm": "qm",
    "usr/bin/kvm": "kvm",
    "usr/bin/nvidia-smi": "nvidia_smi",
    "usr/bin/nvidia-persistenced": "persistenced",
    "usr/lib/testbed-lab/start-guests": "guests",
    "usr/lib/python3/dist-packages/sglang/launch_server.py": "sglang",
}
"""Programs in the guest, and the module of testbed/lab/guest that each runs."""
LAUNCHER = """\
#!/usr/bin/python3 -ES
import sys
sys.path.insert(0, "/usr/lib/testbed-lab")
from testbed.lab.guest.{module} import main
main()
"""
SHARED = ("testbed/simulator/pveconf.py", "testbed/simulator/sglang_stub.py")
"""What the guest takes over from the simulator."""


@dataclass(frozen=True)
class Image:
    """A built image: what QEMU boots, and the keys to log in with."""

    folder: Path

    @property
    def kernel(self) -> Path:
        """The kernel, unpacked: an emulated processor takes seconds to unpack it."""
        return self.folder / "vmlinux"

    @property
    def initrd(self) -> Path:
        """The initial RAM disk."""
        return self.folder / "initrd.gz"

    @property
    def disk(self) -> Path:
        """The root disk; never written to, each machine writes to a layer over it."""
        return self.folder / "root.img"

    @property
    def acpi_table(self) -> Path:
        """The table that puts the first host bridge on NUMA node 0."""
        return self.folder / "numa.aml"

    @property
    def identity_file(self) -> Path:
        """The private key that root may log in with."""
        return self.folder / "keys" / "id_ed25519"

    @property
    def host_key(self) -> str:
        """The host's public key, one line in authorized_keys format."""
        return " ".join((self.folder / "keys" / "ssh_host_ed25519_key.pub").read_text().split()[:2])


def ensure_image(cache: Cache) -> Image:
    """Build the image unless the cache has the one that is wanted.

    Raises:
        SetupError: a step of the build failed.
    """
    release = kernel_release()
    own = sorted(path for path in (HERE / "guest").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    own += [Path(__file__), HERE / "numa.asl", *(REPOSITORY / name for name in SHARED)]
    key = digest(base_key(release), *own, repr(load_state("kpro6")))[:12]
    home = cache.root / "lab"
    base, folder = home / f"base-{base_key(release)}", home / f"image-{key}"
    with _locked(home):
        if not folder.is_dir():
            _need_root()
            if not base.is_dir():
                with building(base, base.name) as partial:
                    build_base(partial, release)
            with building(folder, key) as partial:
                _build_image(partial, base, release)
        for used in filter(Path.is_dir, (base, folder)):
            os.utime(used)
        _forget_unused(home)
    return Image(folder)


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield


def _need_root() -> None:
    if os.geteuid() != 0:
        raise SetupError(
            "the lab's image holds files of root and of a container, so only root can build and use it: "
            "run this as root, in a container if you like"
        )


def _forget_unused(home: Path) -> None:
    """Remove what was not used for a day, half a gigabyte each: another clone may be about to boot what is younger."""
    for folder in [*home.glob("base-*"), *home.glob("image-*")]:
        if time.time() - folder.stat().st_mtime > KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


def _build_image(folder: Path, base: Path, release: str) -> None:
    root = folder / "root"
    state = load_state("kpro6")
    with step("stand-in modules") as current:
        shutil.copytree(HERE / "guest" / "modules", folder / "modules")
        make = ["make", "-C", f"/usr/src/linux-headers-{release}", f"M={folder / 'modules'}", "modules"]
        run(make, current)
        run(["iasl", "-p", folder / "numa", HERE / "numa.asl"], current)
    with step("the hypervisor's files and its container") as current:
        run(["cp", "-a", "--reflink=auto", base / "root", root], current)
        for name in ("vmlinux", "initrd.gz"):
            shutil.copy(base / name, folder)
        extra = root / "lib" / "modules" / release / "extra"
        extra.mkdir()
        for module in (folder / "modules").glob("*.ko"):
            run(["strip", "--strip-debug", "-o", extra / module.name, module], current)
        run(["depmod", "-b", root, release], current)
        _add_tools(root)
        _link_pve(root / "etc" / "pve", state.hostname)
        _build_container(root, state)
        _build_host(root, state)
        _add_keys(root, folder / "keys", current)
    with step("disk image") as current:
        run(["truncate", "-s", DISK_SIZE, folder / "root.img"], current)
        options = ["-q", "-t", "ext4", "-E", "lazy_itable_init=1,lazy_journal_init=1"]
        run(["mke2fs", *options, "-d", root, folder / "root.img"], current)
    shutil.rmtree(root)
    shutil.rmtree(folder / "modules")


def _add_tools(root: Path) -> None:
    """Install the guest's programs: their modules under their own names, and a launcher for each."""
    library = root / "usr" / "lib" / "testbed-lab"
    sources = [*(HERE / "guest").glob("*.py"), *(REPOSITORY / name for name in SHARED)]
    for source in sources:
        place = library / source.relative_to(REPOSITORY)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    for name, module in TOOLS.items():
        _write(root / name, LAUNCHER.format(module=module), mode=0o755)
    subprocess.run(["python3", "-m", "compileall", "-q", "-s", root, library], check=True)


def _link_pve(pve: Path, hostname: str) -> None:
    """Lay out /etc/pve as pmxcfs does: guests below their node, links to this node's."""
    for kind in ("lxc", "qemu-server"):
        (pve / "nodes" / hostname / kind).mkdir(parents=True)
        (pve / kind).symlink_to(f"nodes/{hostname}/{kind}")
    (pve / "local").symlink_to(f"nodes/{hostname}")


def _build_container(root: Path, state: HostState) -> None:
    """Give container 129 the hypervisor's own Debian, by hard links, and its files from the simulator's state."""
    vmid, container = 129, state.containers[129]
    rootfs = root / "var" / "lib" / "lxc" / str(vmid) / "rootfs"
    for name in ("dev", "proc", "root", "run", "sys", "tmp", "var/cache", "var/lib", "var/log", "var/tmp"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "var" / "run").symlink_to("/run")
    subprocess.run(["cp", "-al", root / "usr", rootfs / "usr"], check=True)
    subprocess.run(["cp", "-a", root / "etc", rootfs / "etc"], check=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (rootfs / name).symlink_to(f"usr/{name}")
    _configure(rootfs, "sglang", (*MASKED, *MASKED_IN_CONTAINER))
    python = rootfs / "opt" / "sglang" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/usr/bin/python3")
    figures = {"memory_mib": 97887, **state.sglang.model_dump()}
    _write(rootfs / "etc" / "testbed-sglang.json", json.dumps(figures))
    _write_all(rootfs, container.files)
    _write(root / "etc" / "pve" / "lxc" / f"{vmid}.conf", container.config)


def _build_host(root: Path, state: HostState) -> None:
    shutil.copytree(HERE / "guest" / "root", root, dirs_exist_ok=True)
    _configure(root, state.hostname, MASKED)
    for vmid, vm in state.vms.items():
        _write(root / "etc" / "pve" / "qemu-server" / f"{vmid}.conf", vm.config)
    (root / "etc" / "pve" / "mapping").mkdir()
    _write_all(root, state.files)
    wanted = root / "etc" / "systemd" / "system" / "multi-user.target.wants"
    (wanted / "pve-guests.service").symlink_to("/usr/lib/systemd/system/pve-guests.service")
    _write(root / "usr" / "bin" / "pveversion", _pveversion(state), mode=0o755)


def _pveversion(state: HostState) -> str:
    return f'#!/bin/sh\necho "pve-manager/{state.pve_version}/lab (running kernel: $(uname -r))"\n'


def _configure(root: Path, hostname: str, masked: tuple[str, ...]) -> None:
    """Name a Debian, and keep its boot short."""
    _write(root / "etc" / "hostname", f"{hostname}\n")
    _write(root / "etc" / "machine-id", f"{uuid.uuid4().hex}\n")
    units = root / "etc" / "systemd" / "system"
    for name in masked:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
    (units / "default.target").unlink(missing_ok=True)
    (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")


def _add_keys(root: Path, keys: Path, current: Step) -> None:
    """Make fresh keys for this image, and let them in."""
    keys.mkdir(mode=0o700)
    for stale in (root / "etc" / "ssh").glob("ssh_host_*"):
        stale.unlink()
    for name in ("id_ed25519", "ssh_host_ed25519_key"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", keys / name], current)
    for name in ("ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"):
        shutil.copy(keys / name, root / "etc" / "ssh")
    _write(root / "root" / ".ssh" / "authorized_keys", (keys / "id_ed25519.pub").read_text(), mode=0o600)
    (root / "root" / ".ssh").chmod(0o700)


def _write_all(root: Path, files: dict[str, str]) -> None:
    """Write a state's files; text that begins with `-> ` is a symbolic link's target."""
    for name, text in files.items():
        place = root / name.lstrip("/")
        if text.startswith("-> "):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            place.symlink_to(text.removeprefix("-> "))
        else:
            _write(place, text)


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # it may be a hard link of another root's file
    path.write_text(text)
    path.chmod(mode)
