"""The base of the guest's image: Debian's root file system, its kernel unpacked, and a small initial RAM disk."""

from __future__ import annotations

import lzma
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.engine.cache import digest
from testbed.engine.progress import SetupError, run, step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from testbed.engine.progress import Step

INIT = Path(__file__).parent / "guest" / "initrd" / "init"
SUITE = "bookworm"
GUEST_PACKAGES = (
    "busybox-static", "dbus", "driverctl", "iproute2", "kmod", "lxc", "openssh-server", "pciutils", "procps", "psmisc",
    "python3", "systemd", "systemd-sysv", "udev",
)  # fmt: skip
MODULES = (
    "autofs4", "crc32c_generic", "ext4", "fuse", "tun", "vfio-pci", "vfio_iommu_type1", "virtio_blk", "virtio_net",
    "virtio_pci", "virtio_rng",
)  # fmt: skip
"""What the guest can use of Debian's modules; what these need comes along."""
INITRD_MODULES = ("virtio_pci", "virtio_blk", "virtio_net", "ext4", "crc32c_generic")


def base_key(release: str) -> str:
    """The key of what the base is made of."""
    return digest(SUITE, release, *GUEST_PACKAGES, *MODULES, Path(__file__), INIT)[:12]


def build_base(folder: Path, release: str) -> None:
    """Build it: the folder gets root/, vmlinux and initrd.gz."""
    with step(f"kernel {release}") as current:
        _unpack_kernel(folder, release, current)
    with step(f"Debian {SUITE} root file system") as current:
        slim = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man")]
        options = ["--mode=root", "--variant=minbase", '--aptopt=APT::Install-Recommends "false"', *slim]
        run(["mmdebstrap", *options, f"--include={','.join(GUEST_PACKAGES)}", SUITE, folder / "root"], current)
        _add_modules(folder, release, current)
    with step("initial RAM disk") as current:
        _build_initrd(folder, release, current)
    shutil.rmtree(folder / "kernel")


def _unpack_kernel(folder: Path, release: str, current: Step) -> None:
    download = folder / "kernel"
    download.mkdir()
    # apt drops its rights for a download, and warns where it may not write.
    run(["apt-get", "-o", "APT::Sandbox::User=root", "download", f"linux-image-{release}"], current, cwd=download)
    run(["dpkg-deb", "-x", next(download.glob("*.deb")), download], current)
    packed = (download / "boot" / f"vmlinuz-{release}").read_bytes()
    start = packed.find(b"\xfd7zXZ\x00")
    kernel = lzma.LZMADecompressor().decompress(packed[start:])
    if not kernel.startswith(b"\x7fELF"):
        raise SetupError(f"the kernel in linux-image-{release} is not packed with xz: the lab boots it unpacked")
    (folder / "vmlinux").write_bytes(kernel)


def _add_modules(folder: Path, release: str, current: Step) -> None:
    kernel, root = folder / "kernel", folder / "root"
    run(["depmod", "-b", kernel, release], current)
    target = root / "lib" / "modules" / release
    target.mkdir(parents=True)
    for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
        shutil.copy(kernel / "lib" / "modules" / release / name, target)
    for path in _with_needed(kernel, release, MODULES):
        place = root / path.relative_to(kernel)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    run(["depmod", "-b", root, release], current)


def _with_needed(root: Path, release: str, modules: Sequence[str]) -> list[Path]:
    """The modules' files with those that they need, in the order to load them in."""
    command = ["modprobe", "-d", str(root), "-S", release, "--show-depends", "-a", *modules]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return list(dict.fromkeys(Path(line.split()[1]) for line in shown.splitlines() if line.startswith("insmod")))


def _build_initrd(folder: Path, release: str, current: Step) -> None:
    root = folder / "initrd"
    for name in ("bin", "dev", "modules", "proc", "root", "sys"):
        (root / name).mkdir(parents=True)
    shutil.copy(folder / "root" / "bin" / "busybox", root / "bin")
    shutil.copy(INIT, root / "init")
    modules = _with_needed(folder / "root", release, INITRD_MODULES)
    for path in modules:
        shutil.copy(path, root / "modules")
    (root / "modules" / "order").write_text("".join(f"{path.name}\n" for path in modules))
    archive = shlex.quote(str(folder / "initrd.gz"))
    run(["sh", "-c", f"find . | cpio --quiet -o -H newc | gzip -1 > {archive}"], current, cwd=root)
    shutil.rmtree(root)
