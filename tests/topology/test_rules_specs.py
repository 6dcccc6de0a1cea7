"""Rules on the parts of a plan, each firing and not firing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.topology.specs import (
    CONFIDENTIAL,
    HOST,
    QUIET,
    SERVING,
    Case,
    binding,
    container,
    device,
    mapping,
    pool,
    service,
    sized,
    unit,
    vm,
    vm_pool,
    whole,
)
from topology.presets import model_preset
from topology.rules import (
    check_binding,
    check_container,
    check_host,
    check_mapping,
    check_pool,
    check_pools,
    check_service,
    check_spec,
    check_vm,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from topology.problem import Problem

    Judgement = Callable[[], tuple[Problem, ...]]

FP8 = model_preset("qwen3-235b-a22b-fp8")
QWEN = model_preset("qwen3.5-397b-a17b-nvfp4")
ANY_MEMORY = {"memory_mib": 1 << 20}
"""A card so large that only the shape counts."""


def _pool(**changes: Any) -> Judgement:
    return lambda: check_pool(pool(**changes), HOST)


def _vm_pool(**changes: Any) -> Judgement:
    return lambda: check_pool(vm_pool(**changes), HOST)


def _vm(**changes: Any) -> Judgement:
    return lambda: check_vm(vm(**changes))


def _service(**changes: Any) -> Judgement:
    return lambda: check_service(service(**changes))


def _sized(gpus: int, **changes: Any) -> Judgement:
    return lambda: check_service(sized(gpus, **changes))


def _host(*, sev_snp: bool = True, **changes: Any) -> Judgement:
    return lambda: check_host(replace(HOST, **changes), [vm(sev_snp=sev_snp)], [service(translated_iommu=None)])


def _arguments(**changes: Any) -> Judgement:
    return _service(arguments={name.replace("_", "-"): value for name, value in changes.items()})


def _environment(**changes: str | None) -> Judgement:
    found = {name: value for name, value in (QUIET | changes).items() if value is not None}
    return _service(effective_environment=found)


def _nodes(*nodes: int) -> Judgement:
    return _pool(devices=tuple(device(a, numa_node=n) for a, n in zip(SERVING, nodes, strict=False)))


def _two_services(first: str, second: str) -> Judgement:
    both = [service(name=n, arguments={"mem-fraction-static": f}) for n, f in (("a", first), ("b", second))]
    return lambda: check_spec(whole(services=tuple(both)))


sound: Judgement = lambda: check_spec(whole())  # noqa: E731  a name for the commonest calm judgement

CASES = (
    Case(
        "one-device-one-owner",
        {
            "pools serving and confidential: both have 0000:81:00": lambda: check_pools(
                [pool(devices=(device(CONFIDENTIAL[0]),)), vm_pool()]
            ),
            "has 0000:01:00 twice": _pool(devices=(device("0000:01:00.0"), device("0000:01:00.1"))),
            "binds 0000:81:00": lambda: check_binding(
                binding(others=(*CONFIDENTIAL, "0000:01:00.1"), devices=(*SERVING, CONFIDENTIAL[0]))
            ),
            "PCI mapping gpu-confidential: has 0000:81:00 twice": lambda: check_mapping(mapping(CONFIDENTIAL[:1] * 2)),
        },
        (lambda: check_pools([pool(), vm_pool()]), lambda: check_binding(binding()), lambda: check_mapping(mapping())),
    ),
    Case(
        "one-pool-one-owner",
        {"belongs to lxc/129, lxc/130": _pool(owners=("lxc/129", "lxc/130"))},
        (_pool(), _pool(owners=())),
    ),
    Case(
        "pool-has-devices",
        {
            "pool serving: has no device": _pool(devices=()),
            "PCI mapping gpu-confidential: has no": lambda: check_mapping(mapping(())),
            "container 129: has no": lambda: check_container(container(devices=())),
            "VM 200: has no": _vm(devices=()),
            "binding of pool serving: has no": lambda: check_binding(binding(devices=())),
        },
        (_pool(), _vm()),
    ),
    Case(
        "same-devices",
        {
            "container 129: has 0000:01:00.0, and pool serving": lambda: check_container(
                container(devices=SERVING[:1]), pool()
            ),
            "service sglang-qwen": lambda: check_spec(whole(services=(service(devices=CONFIDENTIAL),))),
            "VM 200": lambda: check_spec(whole(vms=(vm(devices=SERVING),))),
            "binding of pool serving": lambda: check_spec(whole(bindings=(binding(devices=SERVING[:2]),))),
            "PCI mapping gpu-confidential": lambda: check_spec(whole(mappings=(mapping(CONFIDENTIAL[:3]),))),
        },
        (
            lambda: check_container(container(), pool()),
            lambda: check_container(container(devices=SERVING[::-1]), pool()),
            lambda: check_spec(whole(mappings=(mapping(tuple(a[:-2] for a in CONFIDENTIAL)),))),
        ),
    ),
    Case(
        "driver-known",
        {
            "pool serving: has driver 'nouveau'": _pool(driver="nouveau", owners=()),
            "binding of pool serving": lambda: check_binding(binding(driver="nouveau")),
        },
        (_pool(), _vm_pool()),
    ),
    Case(
        "container-on-nvidia",
        {
            "pool serving": _pool(driver="vfio-pci"),
            "container 129": lambda: check_container(container(driver="vfio-pci")),
        },
        (_pool(), lambda: check_container(container())),
    ),
    Case(
        "vm-on-vfio",
        {"pool confidential": _vm_pool(driver="nvidia"), "VM 200": _vm(driver="nvidia")},
        (_vm_pool(), _vm()),
    ),
    Case(
        "service-on-nvidia",
        {
            "pool serving": _pool(driver="vfio-pci", owners=("host",)),
            "service sglang-qwen in lxc/129": _service(driver="vfio-pci"),
            "in the host": _service(driver="vfio-pci", container=None),
        },
        (_service(), _pool(owners=("host",))),
    ),
    Case(
        "numa-node",
        {
            "0000:71:00.0 on NUMA node 1, and declares node 0": _nodes(0, 0, 0, 1),
            "0000:01:00.0 on NUMA node -1": _nodes(-1, 0, 0, 0),
            "names no NUMA node": _pool(numa_node=None),
            "on NUMA node -1. Rule": lambda: check_pool(pool(devices=(device(SERVING[0], numa_node=-1),))),
        },
        (
            _nodes(0, 0, 0, 0),
            _pool(numa_node=None, span_numa_nodes=True, devices=(device(SERVING[0]), device(CONFIDENTIAL[0]))),
            lambda: check_pool(pool(devices=(device(SERVING[0], numa_node=-1),)), replace(HOST, numa_nodes=1)),
        ),
    ),
    Case(
        "iommu-group",
        {
            "share IOMMU group 20": lambda: check_pools(
                [pool(), vm_pool(devices=(device(CONFIDENTIAL[0], iommu_group=20),))]
            ),
            "is in no IOMMU group": _vm_pool(devices=(device(CONFIDENTIAL[0], iommu_group=-1),)),
        },
        (
            lambda: check_pools([pool(), pool(name="b", devices=(device(CONFIDENTIAL[0], iommu_group=20),))]),
            _vm_pool(devices=tuple(device(a, iommu_group=30) for a in CONFIDENTIAL)),
            _pool(devices=(device(SERVING[0], iommu_group=-1),)),
            lambda: check_pools([pool(devices=(device(SERVING[0], iommu_group=-1),)), vm_pool(devices=())]),
        ),
    ),
    Case(
        "hostpci-count",
        {
            "VM 200: has 17 devices": _vm(devices=tuple(f"0000:{i:02x}:00.0" for i in range(17))),
            "PCI mapping": lambda: check_mapping(mapping(tuple(f"0000:{i:02x}:00.0" for i in range(17)))),
            "pool confidential": _vm_pool(devices=tuple(device(f"0000:{i:02x}:00.0") for i in range(17))),
        },
        (_vm(devices=tuple(f"0000:{i:02x}:00.0" for i in range(16))),),
    ),
    Case(
        "snp-needs-translated-iommu",
        {
            "has iommu=pt on": _host(kernel_command_line="ro amd_iommu=on iommu=pt"),
            "has iommu=off on": _host(kernel_command_line="iommu=off"),
            "has amd_iommu=off on": _host(kernel_command_line="amd_iommu=off"),
            "amd_iommu=pgtbl_v2": _host(kernel_command_line="amd_iommu=fullflush,pgtbl_v2"),
            "iommu.passthrough=1": _host(kernel_command_line="iommu.passthrough=1"),
            "does not translate DMA": _host(translated_iommu=False),
        },
        (
            _host(),
            _host(kernel_command_line="iommu=pt iommu=nopt"),
            _host(kernel_command_line="iommu=pt", sev_snp=False),
            _host(translated_iommu=None),
        ),
    ),
    Case(
        "snp-host",
        {"sev_snp is N": _host(snp=False), "kvm_amd is not loaded": _host(snp=None)},
        (_host(), _host(snp=False, sev_snp=False)),
    ),
    Case(
        "mmio-window",
        {
            "1024 GiB for its GPUs' BARs, and CPU 'EPYC-Turin' has 40 address bits": _vm(cpu="EPYC-Turin"),
            "CPU 'default' has 40": _vm(cpu=""),
            "CPU 'cputype=x86-64-v4,flags=+aes'": _vm(cpu="cputype=x86-64-v4,flags=+aes"),
            "phys-bits=43": _vm(cpu="EPYC-Turin,phys-bits=41"),
            "X-PciMmio64Mb gives 512 GiB": _vm(args="-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=524288"),
            "has 40 address bits": _vm(args="-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=1048576", cpu="kvm64"),
            "has 36 address bits": _vm(cpu="host", args="-cpu host,phys-bits=36"),
        },
        (
            _vm(),
            _vm(cpu="max,flags=+aes"),
            _vm(cpu="EPYC-Turin,phys-bits=host"),
            _vm(cpu="EPYC-Turin,phys-bits=43"),
            _vm(cpu="custom-turin"),
            _vm(cpu="EPYC-Turin", args="-cpu EPYC-Turin,host-phys-bits=on"),
            _vm(cpu="kvm64,phys-bits=42", args="-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=1048576"),
            _vm(cpu="kvm64", bar_bytes=0),
            _vm(cpu="kvm64", bar_bytes=32 << 30),
        ),
    ),
    Case(
        "mmio-window-unsure",
        {"phys-bits=43": _vm(cpu="EPYC-Turin,phys-bits=42")},
        (_vm(), _vm(cpu="EPYC-Turin,phys-bits=43"), _vm(cpu="EPYC-Turin,phys-bits=41")),
    ),
    Case(
        "gpu-confidential-computing-off",
        {"has 4 GPUs under SEV-SNP": _vm()},
        (_vm(devices=CONFIDENTIAL[:1]), _vm(sev_snp=False)),
    ),
    Case(
        "tp-whole",
        {
            "4 GPUs / (pipeline 3 x data 1)": _service(pipeline=3),
            "4 GPUs / (pipeline 0": _service(pipeline=0),
        },
        (_service(),),
    ),
    Case(
        "tp-equals-pool",
        {
            "has tp 8 on 4 GPUs": _service(tp=8),
            "unit sglang-qwen.service: says --tp 8": _service(text=unit("--tp 8")),
            "says --tp 2": _service(text=unit("--tp 4 --tensor-parallel-size=2")),
            "says no --tp, which means 1": _service(text=unit("")),
            "says no --pp": _sized(8, pipeline=2, tp=4, text=unit("--tp 4")),
            "says --dp 2": _service(text=unit("--tp 4 --dp-size 2")),
            "has no ExecStart": _service(text="[Service]\n"),
        },
        (
            _service(),
            _service(text=unit("--tensor-parallel-size=4")),
            _service(text=unit("\\\n  --tp-size 4")),
            _sized(8, pipeline=2, tp=4, text=unit("--tp 4 --pp-size 2")),
            _service(
                text=unit("--tp ${TP}") + "EnvironmentFile=/etc/q.env\n", effective_environment=QUIET | {"TP": "4"}
            ),
        ),
    ),
    Case(
        "tp-divides-heads",
        {"tp 3 over 32 attention heads": _sized(3, **ANY_MEMORY), "1, 2, 4, 8, 16": _sized(7, **ANY_MEMORY)},
        (_sized(8), _sized(16)),
    ),
    Case(
        "tp-fits-kv-heads",
        {"tp 3 over 2 KV heads": _sized(3, **ANY_MEMORY)},
        (_sized(1, **ANY_MEMORY), _sized(2, **ANY_MEMORY), _sized(16)),
    ),
    Case(
        "tp-divides-linear-heads",
        {
            "16 linear-attention key heads": _sized(32),
            "64 linear-attention value heads": _sized(6, **ANY_MEMORY),
        },
        (_sized(16),),
    ),
    Case(
        "tp-divides-vision-heads",
        {"tp 32 over 16 vision heads": _sized(32)},
        (_sized(32, arguments={"mm-enable-dp-encoder": True}), _sized(16)),
    ),
    Case(
        "tp-fills-expert-blocks",
        {"1536/8 = 192": _sized(8, model=FP8)},
        (_sized(4, model=FP8), _sized(8, model=FP8, arguments={"ep-size": 8}), _sized(8, model=QWEN)),
    ),
    Case(
        "tp-pads-expert-blocks",
        {"not every kernel pads": _sized(8, model=replace(FP8, kernels_pad=True))},
        (_sized(8, model=FP8), _sized(8)),
    ),
    Case(
        "expert-parallel-divides-tp",
        {"--ep 3 at tp 4": _arguments(ep=3), "--ep 0": _arguments(ep_size=0), "--ep all": _arguments(ep="all")},
        (_arguments(ep=2), _arguments(expert_parallel_size=4)),
    ),
    Case(
        "dp-attention",
        {
            "parallelism.data 2": _sized(
                8, tp=4, data=2, text=unit("--tp 4 --dp 2"), arguments={"enable-dp-attention": True}
            )
        },
        (_arguments(enable_dp_attention=True), _sized(8, tp=4, data=2, text=unit("--tp 4 --dp 2"))),
    ),
    Case(
        "model-fits",
        {
            "for qwen3.5-397b-a17b-nvfp4 at tp 2": _sized(2),
            "GPUs for tp 4": _sized(2),
            "context-length to 953,685 or less, or set arguments.kv-cache-dtype": _arguments(context_length=1010000),
            "use a smaller model": _service(memory_mib=8192),
        },
        (
            _service(),
            _sized(8),
            _sized(2, memory_mib=195774),
            _arguments(context_length=1010000, kv_cache_dtype="fp8_e4m3"),
            _arguments(
                speculative_algorithm="NEXTN",
                speculative_num_draft_tokens=4,
                max_running_requests=16,
                mamba_scheduler_strategy="extra_buffer",
            ),
            _arguments(disable_radix_cache=True),
        ),
    ),
    Case(
        "memory-margin",
        {"mem-fraction-static 0.95": _arguments(mem_fraction_static=0.95)},
        (_arguments(mem_fraction_static=0.93), _service()),
    ),
    Case(
        "memory-shared",
        {"services a and b: ask for 120%": _two_services("0.6", "0.6")},
        (_two_services("0.4", "0.4"), sound, _two_services("x", "0.9")),
    ),
    Case(
        "argument-number",
        {
            "'most' for --mem-fraction-static": _arguments(mem_fraction_static="most"),
            "which must be below 1": _arguments(mem_fraction_static=85),
            "'128k' for --context-length": _arguments(context_length="128k"),
            "'1.5' for --context-length": _arguments(context_length="1.5"),
            "'-1' for --context-length": _arguments(context_length=-1),
            "'inf'": _arguments(mamba_full_memory_ratio="inf"),
        },
        (_arguments(mem_fraction_static="0.9", context_length="131072"),),
    ),
    Case(
        "p2p-disabled",
        {
            "gets NCCL_P2P_DISABLE not set": _environment(NCCL_P2P_DISABLE=None),
            "gets NCCL_P2P_DISABLE '0' (its unit says 1)": _environment(NCCL_P2P_DISABLE="0"),
            "gets NCCL_P2P_DISABLE": lambda: check_host(
                HOST, services=[service(effective_environment={}, translated_iommu=None)]
            ),
            "NCCL waits for ever": lambda: check_host(
                replace(HOST, translated_iommu=None), [vm()], [service(effective_environment={})]
            ),
        },
        (
            _service(),
            _service(effective_environment={}, translated_iommu=False),
            _sized(1, effective_environment={}, **ANY_MEMORY),
            lambda: check_host(replace(HOST, translated_iommu=False), services=[service(effective_environment={})]),
        ),
    ),
    Case(
        "p2p-not-asked-for",
        {
            "gets NCCL_P2P_LEVEL SYS": _environment(NCCL_P2P_LEVEL="SYS"),
            "gets NCCL_P2P_LEVEL 4": _environment(NCCL_P2P_LEVEL="4"),
            "NVREG: has ForceP2P=0x11": _environment(NVREG="ForceP2P=0x11"),
            "host kpro6: has ForceP2P=0x11": _host(
                kernel_command_line='nvidia.NVreg_RegistryDwords="ForceP2P=0x11;RMForceP2PType=1"'
            ),
        },
        (
            _environment(NCCL_P2P_LEVEL="LOC"),
            _environment(NVREG="ForceP2P=0"),
            _host(kernel_command_line="ForceP2P=0x11", sev_snp=False, translated_iommu=False),
            _service(
                effective_environment=QUIET | {"NCCL_P2P_LEVEL": "SYS"},
                translated_iommu=False,
            ),
        ),
    ),
    Case(
        "p2p-all-reduce-off",
        {
            "has --enable-mscclpp": _arguments(enable_mscclpp=True),
            "has --enable-torch-symm-mem": _service(text=unit("--tp 4 --enable-torch-symm-mem")),
            "runs at tp 2 without --disable-custom-all-reduce": _sized(2, **ANY_MEMORY),
        },
        (
            _service(),
            _arguments(enable_mscclpp=False),
            _sized(2, arguments={"disable-custom-all-reduce": True}, **ANY_MEMORY),
            _sized(2, translated_iommu=False, **ANY_MEMORY),
        ),
    ),
    Case(
        "p2p-companions",
        {
            "gets NCCL_MIN_NCHANNELS not set": _environment(NCCL_MIN_NCHANNELS=None),
            "gets NCCL_BUFFSIZE 4096": _environment(NCCL_BUFFSIZE="4096"),
        },
        (_service(), _service(effective_environment={}, translated_iommu=False)),
    ),
    Case(
        "p2p-unsure",
        {"on 4 GPUs with P2P on": _service(effective_environment={}, translated_iommu=None)},
        (_service(translated_iommu=None), _sized(1, effective_environment={}, translated_iommu=None, **ANY_MEMORY)),
    ),
    Case(
        "argument-computed",
        {"has --tp among": _arguments(tp=4), "has --dp-size among": _arguments(dp_size=2)},
        (_service(),),
    ),
    Case(
        "no-secret-in-clear",
        {
            "--api-key": _arguments(api_key="hunter2"),
            "HF_TOKEN": _service(environment=QUIET | {"HF_TOKEN": "hunter2"}),
        },
        (_arguments(api_key="${SGLANG_API_KEY}"),),
    ),
)


def test_the_split_is_sound_but_for_gpu_confidential_computing() -> None:
    """The plan of kpro6 breaks nothing, and says aloud what several GPUs in one SEV-SNP VM do not have."""
    assert [problem.rule for problem in sound()] == ["gpu-confidential-computing-off"]


def test_a_wrong_tp_is_told_alone() -> None:
    """What a wrong TP would split unevenly is no second complaint."""
    assert {problem.rule for problem in check_service(service(tp=3))} == {"tp-equals-pool"}
