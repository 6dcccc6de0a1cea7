"""Rules on services, by name."""

from __future__ import annotations

from topology.problem import Level
from topology.rules.rule import Rule, Scope, Weight

_S = Scope

SERVICE_RULES = (
    # Tensor parallelism
    Rule(
        "tp-whole",
        "TP = GPUs / (pipeline x data) is a whole number",
        "change the pool's size or the service's parallelism",
        (_S.SERVICE, _S.CONFIG),
    ),
    Rule(
        "tp-equals-pool",
        "TP equals the pool's size over pipeline x data, in the unit's command line too",
        "let the program write the unit",
        (_S.SERVICE,),
        Weight.CRITICAL,
    ),
    Rule(
        "tp-divides-heads",
        "TP divides the attention heads",
        "choose a pool size that does",
        (_S.SERVICE,),
    ),
    Rule(
        "tp-fits-kv-heads",
        "TP divides the KV heads or is a multiple of them",
        "choose a pool size that does",
        (_S.SERVICE,),
    ),
    Rule(
        "tp-divides-linear-heads",
        "TP divides the linear-attention heads",
        "choose a pool size that does",
        (_S.SERVICE,),
    ),
    Rule(
        "tp-divides-vision-heads",
        "TP divides the vision heads",
        "choose a pool size that does, or set mm-enable-dp-encoder",
        (_S.SERVICE,),
    ),
    Rule(
        "tp-fills-expert-blocks",
        "an expert's share per GPU is whole quantisation blocks, where the format's kernels do not pad",
        "choose a smaller TP, or expert parallelism",
        (_S.SERVICE,),
    ),
    Rule(
        "tp-pads-expert-blocks",
        "an expert's share per GPU is whole quantisation blocks, else the kernels must pad",
        "choose a smaller TP, or try it: newer kernels pad",
        (_S.SERVICE,),
        Weight.LOW,
        Level.WARN,
    ),
    Rule(
        "expert-parallel-divides-tp",
        "expert parallelism divides TP",
        "change the ep argument",
        (_S.SERVICE,),
    ),
    Rule(
        "dp-attention",
        "SGLang's DP attention is not combined with parallelism.data, which it counts differently",
        "remove enable-dp-attention, or set parallelism.data to 1",
        (_S.SERVICE,),
    ),
    # Memory
    Rule(
        "model-fits",
        "weights, KV cache for the asked context and recurrent state fit the GPU's memory with a margin",
        "use more GPUs, a shorter context or a smaller KV cache type",
        (_S.SERVICE,),
    ),
    Rule(
        "memory-margin",
        "room is left for activations, CUDA graphs and NCCL",
        "lower mem-fraction-static",
        (_S.SERVICE,),
        Weight.MEDIUM,
        Level.WARN,
    ),
    Rule(
        "memory-shared",
        "services on one pool divide its memory",
        "lower their mem-fraction-static, or give each its own pool",
        (_S.STACK,),
    ),
    Rule("argument-number", "arguments that are figures are figures", "write a number", (_S.SERVICE,)),
    # NCCL
    Rule(
        "p2p-disabled",
        "under a translated IOMMU every service on several GPUs has NCCL_P2P_DISABLE=1",
        "set NCCL_P2P_DISABLE to 1, and look into drop-ins, environment files and /etc/nccl.conf",
        (_S.SERVICE, _S.VM),
        Weight.CRITICAL,
    ),
    Rule(
        "p2p-not-asked-for",
        "under a translated IOMMU nothing asks for P2P: no NCCL_P2P_LEVEL, no ForceP2P",
        "remove the setting",
        (_S.SERVICE, _S.VM),
        Weight.CRITICAL,
    ),
    Rule(
        "p2p-all-reduce-off",
        "under a translated IOMMU no all-reduce goes around NCCL",
        "remove the flag; with TP 2 set disable-custom-all-reduce",
        (_S.SERVICE, _S.VM),
        Weight.CRITICAL,
    ),
    Rule(
        "p2p-companions",
        "without P2P, NCCL gets channels and buffers enough for traffic through host memory",
        "set NCCL_MIN_NCHANNELS, NCCL_MAX_NCHANNELS, NCCL_BUFFSIZE and CUDA_DEVICE_MAX_CONNECTIONS",
        (_S.SERVICE, _S.VM),
        Weight.MEDIUM,
        Level.WARN,
    ),
    Rule(
        "p2p-unsure",
        "it is known whether the IOMMU translates",
        "set NCCL_P2P_DISABLE to 1 if it may",
        (_S.SERVICE,),
        Weight.MEDIUM,
        Level.WARN,
    ),
    # Arguments
    Rule(
        "argument-computed",
        "what the program computes is not among the arguments: --tp, --pp, --dp, --port, --host, --model-path",
        "remove it; change the pool's devices or the service's own keys",
        (_S.SERVICE, _S.CONFIG),
    ),
    Rule(
        "no-secret-in-clear",
        "no secret stands in a command line or a unit's environment",
        "put it into a root-only file in the container, list that in environmentFiles, and refer to it as ${NAME}",
        (_S.SERVICE, _S.CONFIG),
        Weight.CRITICAL,
    ),
)
