"""The memory that each device of the run needs, in bytes, as a sum of terms. Each term has its formula."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import WINDOW_PER_STAGE, Config
from engine.config.training import Parallel, Recompute
from engine.model.shape import Experts, ModelShape
from engine.run.progress import format_size

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}

RESERVE_GIB = 4.0
"""Allowance on a trainer's device for the driver's context, buffers of collectives and fragmentation. An estimate, not
measured."""
PROCESS_GIB = 0.5
"""Allowance for a process that computes on a CPU: libraries and buffers."""
OTHERS_GIB = 1.0
"""Allowance for the other processes of a run: the command, Prefect's server, the orchestrator and the verifiers."""
ENGINE_GIB = 3.0
"""Allowance on a rollout device, including the peak of vLLM's own profiling run. An estimate, not measured."""
ENGINE_SHARE = 0.9
"""Share of a device's memory that vLLM takes if rollout.vllm has no gpu_memory_utilization. A little less than vLLM's
default (0.92 in vLLM 0.32)."""
CONTEXTS_GIB = 2.0
"""What trainer and instance hold of a shared device outside of their allocators, above all two contexts. An estimate.
"""
LOGITS_BYTES = 2**30
"""Most bytes of logits at a time. Their gradient takes their place (engine.model.logprobs)."""
CHUNK_BYTES = 2**28
CHUNKS = 3
"""Logits are processed in chunks of `CHUNK_BYTES`, up to three at a time (engine.model.logprobs)."""
BUCKETS = 3
"""Number of buckets in memory during a weight sync: one is gathered, one written, one sent."""
RECEIVED = 2
"""Number of buckets in an instance's memory: one is received while the last one is loaded."""


LOWERED_BY = {
    "weights": ("parallel.tensor", "parallel.pipeline"),
    "gradients": ("parallel.tensor", "parallel.pipeline"),
    "optimizer": ("train.distributed_optimizer", "parallel.data", "parallel.tensor"),
    "frozen": ("train.offload", "algorithm.old_policy", "algorithm.kl_coef"),
    "last gradient": ("algorithm.gradient_control",),
    "activations": ("train.recompute", "train.micro_batch_tokens", "parallel.sequence", "parallel.context"),
    "logits": ("train.micro_batch_tokens", "parallel.tensor", "parallel.context"),
    "one layer's backward": ("train.micro_batch_tokens", "parallel.tensor", "parallel.context"),
    "sync buckets": ("weights.bucket_mb",),
    "key-value cache": ("rollout.concurrency", "rollout.max_context"),
}
"""Name of a term → the keys on which it depends."""
STATES = ("weights", "gradients", "optimizer", "frozen", "last gradient")
"""Names of the terms that stay in memory between two steps."""


@dataclass(frozen=True)
class Term:
    """One term of the sum."""

    name: str
    bytes: float
    formula: str


@dataclass(frozen=True)
class Need:
    """The memory that one device needs and has."""

    who: str
    terms: tuple[Term, ...]
    available: float
    """Memory of the device in bytes."""

    @property
    def total(self) -> float:
        """The sum of the terms in bytes."""
        return sum(term.bytes for term in self.terms)

    @property
    def fits(self) -> bool:
        """Whether the sum fits into the memory."""
        return self.total <= self.available

    def part(self, states: bool) -> tuple[Term, ...]:
        """The terms that stay in memory between two steps (`states`), or those of a working step; without the
        allowances."""
        return tuple(term for term in self.terms if term.name in LOWERED_BY and (term.name in STATES) == states)

    def summed(self) -> str:
        """The sum, written out in GiB."""
        parts = " + ".join(f"{term.name} {format_size(term.bytes)}" for term in self.terms)
        return f"{parts} = {format_size(self.total)}, and it has {format_size(self.available)}"


def is_on_cpu(config: Config) -> bool:
    """Whether the trainer computes on cores. "auto" is one of an accelerator if this machine has the files of its
    driver, as torch is too slow to ask."""
    found = any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "davinci[0-9]*"))
    return config.platform.device == "cpu" or config.platform.device == "auto" and not found


def host_memory(root: Path = Path("/")) -> float:
    """Bytes of memory that the processes of a run may have together: the machine's, or less if a cgroup (v1 or v2) of
    this process or one above it says so. `root`: where `proc` and `sys` are."""
    least = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        top = root / "sys/fs/cgroup" / mount
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                least = min(least, math.inf if text == "max" else float(text))
    return least


def device_bytes(config: Config) -> float:
    """Memory of one device in bytes. A CPU's is this machine's, which all processes of the run share."""
    return host_memory() if is_on_cpu(config) else config.platform.memory_gib * GIB


def trainer_need(shape: ModelShape, config: Config) -> Need:
    """The memory of the trainer rank that needs most. Computes all pipeline stages, because the first and the last
    differ."""
    needs = [_stage_need(shape, config, stage) for stage in range(config.parallel.pipeline)]
    return max(needs, key=lambda need: need.total)


def _stage_need(shape: ModelShape, config: Config, stage: int) -> Need:
    held = rank_parameters(shape, config.parallel, stage)
    terms = (
        *_states(held, config),
        *_working(shape, config, stage),
        Term("reserve", (PROCESS_GIB if is_on_cpu(config) else RESERVE_GIB) * GIB, "our allowance"),
    )
    who = f"trainer rank of stage {stage + 1} of {config.parallel.pipeline}"
    left = 1.0 - (_engine_share(config) if config.rollout.share_devices else 0.0)
    return Need(who, tuple(term for term in terms if term.bytes), left * device_bytes(config))


def allocator_share(config: Config, device: float) -> float:
    """The share of a shared device of so many bytes that a trainer rank may allocate (rollout.share_devices): what vLLM
    leaves, which asks for all of its own share whenever it starts."""
    return max(0.0, 1.0 - _engine_share(config) - CONTEXTS_GIB * GIB / device)


def beside_cache(shape: ModelShape, config: Config) -> int:
    """Bytes of vLLM's share of a device that are not for the key-value cache."""
    need, _ = instance_need(shape, config)
    return int(sum(term.bytes for term in need.terms if term.name != "key-value cache"))


def _engine_share(config: Config) -> float:
    """The share of a device's memory that vLLM takes."""
    return float(config.rollout.vllm.get("gpu_memory_utilization", ENGINE_SHARE))


def _states(held: Parameters, config: Config) -> Iterator[Term]:
    """The terms that are proportional to the number of parameters."""
    size = BYTES[config.train.dtype]
    count = held.total
    yield Term("weights", count * size, f"{count / 1e6:,.1f} M parameters × {size} bytes")
    yield Term("gradients", count * 4, "parameters × 4 bytes (fp32)")
    yield optimizer_term(held, config)
    copies = frozen_copies(config)
    on_device = min(1, copies) if config.train.offload else copies
    yield Term("frozen", on_device * count * size, f"{on_device} × weights (old policy, reference)")
    if config.algorithm.gradient_control != "none":
        yield Term("last gradient", count * 4, "gradients (algorithm.gradient_control)")


def optimizer_term(held: Parameters, config: Config) -> Term:
    """Adam's two moments in fp32, and fp32 master weights if the weights are bf16. ZeRO stage 1 splits them among the
    replicas (Rajbhandari et al., arXiv:1910.02054 §3.1)."""
    each = 12 if config.train.dtype == "bfloat16" else 8
    parallel = config.parallel
    replicas = parallel.data * parallel.context if config.train.distributed_optimizer else 1
    expert_replicas = max(1, replicas * parallel.tensor // parallel.expert) if config.train.distributed_optimizer else 1
    amount = each * (held.shared / replicas + held.experts / expert_replicas)
    shared = f" / {replicas} replicas" if replicas > 1 else ""
    return Term("optimizer", amount, f"parameters × {each} bytes{shared}")


def frozen_copies(config: Config) -> int:
    """The number of frozen models of the trainer: the old policy, and the reference unless a separate stage computes
    it."""
    reference = config.algorithm.kl_coef > 0 and config.reference_stage is None
    return (config.algorithm.old_policy == "previous") + reference


def host_bytes(shape: ModelShape, config: Config) -> float:
    """Host memory of the trainer rank that needs most for frozen models (train.offload)."""
    held = max(rank_parameters(shape, config.parallel, stage).total for stage in range(config.parallel.pipeline))
    return frozen_copies(config) * held * BYTES[config.train.dtype] if config.train.offload else 0.0


def row_tokens(config: Config) -> int:
    """Tokens of the largest micro-batch, on one context rank."""
    longest = max(config.train.micro_batch_tokens, config.rollout.max_context)
    return -(-longest // config.parallel.context)


def _working(shape: ModelShape, config: Config, stage: int) -> Iterator[Term]:
    """The terms of a working step: activations of the micro-batches in flight, the peak on top of them, and the buckets
    of the weight sync."""
    yield activation_term(shape, config, stage)
    yield from _peak(shape, config, stage)
    yield _sync_term(shape, config, BUCKETS)


def _sync_term(shape: ModelShape, config: Config, buckets: int) -> Term:
    """Buckets on a device, with a transport between devices. A tensor larger than weights.bucket_mb is a bucket."""
    rows = max(shape.vocabulary, shape.intermediate)  # of the largest tensor, an embedding or a matrix of an MLP
    largest = max(config.weights.bucket_bytes, rows * shape.hidden * BYTES[config.model.dtype])
    count = buckets if config.weights.transport in ("nccl", "hccl") else 0
    formula = f"{count} × the larger of weights.bucket_mb and the largest tensor"
    return Term("sync buckets", float(count * largest), formula)


def activation_term(shape: ModelShape, config: Config, stage: int) -> Term:
    """Activations kept from forward to backward. With 1F1B, stage s of p keeps p − s micro-batches (Narayanan et al.,
    arXiv:2104.04473)."""
    parallel = config.parallel
    size = BYTES[config.train.dtype]
    tokens = row_tokens(config)
    flight = min(parallel.pipeline - stage, WINDOW_PER_STAGE * parallel.pipeline)
    kept = stage_elements(shape, parallel, config.train.recompute)
    formula = (
        f"{tokens:,} tokens × {kept:,} elements in {shape.layers // parallel.pipeline} layers "
        f"({_recomputed(shape, config)}) × {size} bytes × {flight} in flight"
    )
    return Term("activations", float(tokens) * kept * size * flight, formula)


def _recomputed(shape: ModelShape, config: Config) -> str:
    """What the backward pass recomputes, in words."""
    recompute = config.train.recompute
    if recompute == "selective":
        return "norms and SwiGLU recomputed"
    whole = whole_layers(recompute, shape.layers // config.parallel.pipeline)
    return f"{whole} of them recomputed" if whole else "none recomputed"


def _peak(shape: ModelShape, config: Config, stage: int) -> Iterator[Term]:
    """The peak on top of the activations: the logits of some tokens, or the backward pass of one layer."""
    parallel = config.parallel
    size = BYTES[config.train.dtype]
    tokens = row_tokens(config)
    again = 0
    if recompute := config.train.recompute:
        again = (cheap_elements if recompute == "selective" else layer_elements)(shape, parallel)
    layer = tokens * (again + 4 * shape.intermediate // parallel.tensor) * size
    width = -(-shape.vocabulary // parallel.tensor)
    chunks = CHUNKS * min(CHUNK_BYTES, tokens * width * 4)
    each = max(size, BYTES["float32"] if config.model.head_dtype == "float32" else 0)
    logits = min(LOGITS_BYTES, tokens * width * each)
    rounded = logits * size // each if each > size else 0  # their gradient, for its products
    head = logits + rounded + tokens * 3 * shape.hidden * size + chunks if stage == parallel.pipeline - 1 else 0
    if head >= layer:
        formula = f"{tokens:,} tokens × {width:,} × {each} bytes, 1 GiB at most, hidden states, fp32 chunks"
        yield Term("logits", head, formula)
    else:
        yield Term("one layer's backward", layer, f"{tokens:,} tokens × its elements × {size} bytes")


@dataclass(frozen=True)
class Room:
    """The key-value cache of one rollout instance."""

    per_token: int
    """Bytes of one token on each of the instance's devices: 2 · layers · key-value heads · head size · bytes /
    tensor."""
    tokens: int
    """The number of tokens that fit."""
    wanted: int
    """The number of tokens of all slots at full length."""


def instance_need(shape: ModelShape, config: Config) -> tuple[Need, Room]:
    """The memory of one device of a rollout instance, and its key-value cache.

    vLLM gives the remaining memory to the key-value cache, and one response at full length must fit. The embedded
    engine needs memory for all slots, in fp32, and for the prompts and a program's conversations that it keeps beside
    them; for a moment more, while it admits prompts or makes its slots longer. It keeps bf16 weights twice (`Linear` of
    its model).
    """
    rollout = config.rollout
    size = BYTES[config.model.dtype] if rollout.engine == "vllm" else BYTES["float32"]
    weights = rank_parameters(shape, _alone(config), 0).total * size
    heads = max(1, shape.kv_heads // rollout.tensor)
    per_token = 2 * shape.layers * heads * shape.head_dim * size
    wanted = config.slots * rollout.max_context
    vllm = rollout.engine == "vllm"
    share = _engine_share(config) if vllm else 1.0
    kept = decoded_slots(config.slots, rollout.deterministic) + kept_slots(config.slots, bool(rollout.program))
    least = rollout.max_context * (1 if vllm else kept)
    terms = (
        Term("weights", weights, f"{weights / size / 1e6:,.1f} M parameters × {size} bytes"),
        Term("engine", (ENGINE_GIB if vllm else PROCESS_GIB * is_on_cpu(config)) * GIB, "our allowance"),
        Term("key-value cache", per_token * least, f"{least:,} tokens × {per_token:,} bytes, at least"),
    )
    device = device_bytes(config)
    # vLLM's share has no room for buckets
    beside = _sync_term(shape, config, 0 if config.weights.staged else RECEIVED).bytes
    need = Need("rollout device", tuple(term for term in terms if term.bytes), min(share * device, device - beside))
    left = need.available - need.total + per_token * least
    return need, Room(per_token, max(0, int(left // per_token)), wanted)


def host_need(shape: ModelShape, config: Config, training: bool = True) -> tuple[Need, Term]:
    """The memory of all processes of a run, or without `training` of an evaluation alone, on this machine's cores; and
    the largest term of one process that a key lowers."""
    instance, _ = instance_need(shape, config)
    lowered = [*instance.part(states=False)]
    count = config.rollout.instances if training else max(1, config.rollout.instances)
    terms = [Term("instances", count * instance.total, f"{count} × {format_size(instance.total)}")]
    if training:
        trainer = trainer_need(shape, config)
        ranks = config.parallel.ranks_per_node
        held = config.scorer_ranks * (total_parameters(shape) * BYTES[config.train.dtype] + PROCESS_GIB * GIB)
        terms.insert(0, Term("trainer", ranks * trainer.total, f"{ranks} × {format_size(trainer.total)}"))
        terms.append(Term("scorers", held, "weights and our allowance"))
        lowered += trainer.part(states=False)
    terms.append(Term("other processes", OTHERS_GIB * GIB, "our allowance"))
    need = Need("this machine", tuple(term for term in terms if term.bytes), host_memory())
    return need, max(lowered, key=lambda term: term.bytes)


def _alone(config: Config) -> Parallel:
    return Parallel(tensor=config.rollout.tensor)


PROMPTS_KEPT = 8
"""Size of an embedded instance's prompt cache, in full slots, and of the prompts that are admitted together. This is
enough for the groups being admitted and small compared with the slots."""
ROWS = 16
"""A deterministic embedded instance decodes a multiple of so many slots."""


@dataclass(frozen=True)
class Parameters:
    """The number of parameters of one trainer rank."""

    shared: int
    """Parameters outside the experts; each data and context rank has a copy."""
    experts: int
    """Parameters of the experts on this rank."""

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.shared + self.experts


def total_parameters(shape: ModelShape) -> int:
    """The number of parameters of the whole model. A tied output layer counts once."""
    return rank_parameters(shape, Parallel(), 0).total


def rank_parameters(shape: ModelShape, parallel: Parallel, stage: int) -> Parameters:
    """The parameters of a rank of pipeline stage `stage` (0 …), split as in `engine.model.families`."""
    per_stage = shape.layers // parallel.pipeline
    layers = range(stage * per_stage, (stage + 1) * per_stage)
    vocabulary = -(-shape.vocabulary // parallel.tensor) * shape.hidden
    shared = 0
    experts = 0
    for layer in layers:
        shared += _attention(shape, parallel.tensor) + 2 * shape.hidden
        if shape.experts is not None and layer in shape.experts.layers:
            shared += shape.experts.count * shape.hidden
            experts += _experts(shape, shape.experts, parallel.expert)
        else:
            shared += 3 * shape.hidden * shape.intermediate // parallel.tensor
    first = stage == 0
    last = stage == parallel.pipeline - 1
    shared += vocabulary * first + shape.hidden * last
    if last and not (shape.tied and first):  # a tied output layer on another stage is a separate copy
        shared += vocabulary
    return Parameters(shared, experts)


def _attention(shape: ModelShape, tensor: int) -> int:
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    cut = shape.hidden * (queries + 2 * keys) + queries * shape.hidden
    if shape.architecture == "Qwen2ForCausalLM":
        cut += queries + 2 * keys
    return -(-cut // tensor) + (2 * shape.head_dim if head_norms(shape) else 0)


def _experts(shape: ModelShape, experts: Experts, share: int) -> int:
    return experts.count // share * 3 * shape.hidden * experts.intermediate


def head_norms(shape: ModelShape) -> bool:
    """Whether queries and keys are normalised per head."""
    return shape.architecture.startswith("Qwen3")


def layer_elements(shape: ModelShape, parallel: Parallel) -> int:
    """The number of elements that one layer keeps per token of a rank's row, without recomputation.

    They are counted from the tensors that the layers save, as in Korthikanti et al. (arXiv:2205.05198 §4.1):

    - Both norms keep their input, and the two linear layers after them keep the norms' outputs (4·h; split among the
      tensor ranks with sequence parallelism).
    - Attention keeps the joint projection, rotated queries and keys, and its output. With head norms and several
      key-value heads per rank it also keeps a copy of the queries.
    - The MLP keeps its gate and up projections and their product (3·f). Each of a token's experts also keeps its copy
      of the input, and the product times the router's share (h + 4·f).
    - The rotation keeps nothing, because all layers share its tables (engine.model.rotary).
    - Small statistics per token count as two elements per norm or head.
    """
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    stream = 4 * input_elements(shape, parallel)
    copied = queries if head_norms(shape) and shape.kv_heads > parallel.tensor else 0
    attention = (queries + 2 * keys) + queries + keys + queries + copied
    statistics = 2 + 2 * (shape.heads + shape.kv_heads) // parallel.tensor
    return stream + attention // parallel.tensor + statistics + _mlp(shape, parallel)


def _mlp(shape: ModelShape, parallel: Parallel) -> int:
    experts = shape.experts
    if experts is None:
        return 3 * shape.intermediate // parallel.tensor
    router = 3 * experts.count + 6 * experts.per_token
    return router + experts.per_token * (4 * experts.intermediate + shape.hidden)


def input_elements(shape: ModelShape, parallel: Parallel) -> int:
    """The elements per token of a layer's input."""
    return shape.hidden // (parallel.tensor if parallel.sequence else 1)


def cheap_elements(shape: ModelShape, parallel: Parallel) -> int:
    """The part of `layer_elements` that train.recompute = "selective" does not keep: the outputs of both norms and of
    SwiGLU, and with experts also that output times the router's share (engine.model.recompute)."""
    experts = shape.experts
    products = 2 * experts.per_token * experts.intermediate if experts else shape.intermediate // parallel.tensor
    return 2 * input_elements(shape, parallel) + products


def whole_layers(recompute: Recompute, layers: int) -> int:
    """Number of a stage's `layers` that are recomputed as a whole."""
    if isinstance(recompute, str):
        return 0
    return layers if recompute is True else min(int(recompute), layers)


def stage_elements(shape: ModelShape, parallel: Parallel, recompute: Recompute) -> int:
    """The number of elements that the layers of a stage keep per token of a rank's row. A layer that is recomputed as a
    whole keeps only its input."""
    layers = shape.layers // parallel.pipeline
    whole = whole_layers(recompute, layers)
    each = layer_elements(shape, parallel) - (cheap_elements(shape, parallel) if recompute == "selective" else 0)
    return whole * input_elements(shape, parallel) + (layers - whole) * each


def decoded_slots(slots: int, deterministic: bool) -> int:
    """The number of slots for which an embedded instance has keys and values."""
    return -(-slots // ROWS) * ROWS if deterministic else slots


def kept_slots(slots: int, conversations: bool) -> int:
    """The size of an embedded instance's prompt cache, in full slots. `conversations`: whether a rollout program's
    prompts come again with more tokens, so that as many as there are slots are kept."""
    return PROMPTS_KEPT + (slots if conversations else 0)
