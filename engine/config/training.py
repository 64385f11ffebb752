"""The tables of the training side: step loop, algorithm, parallel layout, platform, checkpoints."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, Strict, model_validator

from engine.config.marks import FIXED, FIXED_CODE, OWN, PLAN, PLAN_CODE, ReadIf, only_with
from engine.config.table import Table

Step = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Recompute = Annotated[bool, Strict()] | Literal["selective"] | PositiveInt
Threshold = Annotated[float, Field(gt=0, lt=1)] | Literal["auto"]


def _names_a_function(value: str) -> str:
    if not re.fullmatch(r".+:[A-Za-z_]\w*", value):
        raise ValueError('expected a function of your own, as "file.py:function" or "package.module:function"')
    return value


Own = Annotated[str, AfterValidator(_names_a_function)]
"""A user's own function, as "file.py:function" or "package.module:function"."""


class Train(Table):
    """The step loop, its optimizer, and the memory and precision of the trainer's models."""

    mode: Annotated[Literal["sync", "periodic", "one_step_off", "bounded"], PLAN] = "periodic"
    """When a step trains its groups. "periodic": each group as it arrives. "sync": all groups, once the last has
    arrived. Both train on responses of the step's own weights only. "one_step_off" also generates the next batch while
    a step trains, "bounded" up to max_staleness batches; these two are off-policy on purpose (docs/modes.md)."""
    max_staleness: PositiveInt = 1
    """Largest number of steps between the weights that sampled a response and those that train it. Only in mode
    "bounded"; the other modes refuse a value above 1."""
    exact_lag: bool = False
    """Publish new weights only when all batches in flight are generated, so that batch t is sampled from version
    t − max_staleness exactly. Only in mode "bounded"; the other modes refuse it."""
    steps: PositiveInt = 60
    """Number of steps of the run. Each step publishes its weights once, so this is also the final weight version."""
    prompts_per_step: Annotated[int, FIXED] = Field(default=32, gt=0, le=100_000)
    """Prompts, and so groups, that one step trains on (B; N in the papers)."""
    updates: Annotated[PositiveInt, FIXED] = 1
    """Optimizer updates per step. Each trains a mini-batch of prompts_per_step / updates groups, taken in the order of
    `consume`. Updates after the first are off-policy, in every mode (docs/modes.md)."""
    consume: Literal["arrival", "prompt_order"] = "arrival"
    """Order in which a step trains its groups. "arrival" is the fastest. "prompt_order" makes a run a function of its
    seed, if rollout.deterministic is on."""
    record: bool = False
    """Write every group and the order of training to `record.msgpack` in the run folder, for `--replay`."""
    devices: list[int] = []
    """Numbers of the CPU cores that the trainer's ranks share evenly. Empty: the operating system places the ranks.
    A core that this process may not use is refused."""
    micro_batch_tokens: Annotated[PositiveInt, PLAN] = 4096
    """Largest number of tokens in one forward and backward pass. Groups that have arrived are packed up to it. A group
    above it is split, and its prompt is computed once per part; a single response above it stands alone."""
    prefetch: Literal["auto", "on", "off"] = "auto"
    """Lease, open and pack the next window in a thread while one is trained; the numbers are the same. "auto": on
    devices, not on a CPU."""
    learning_rate: Annotated[PositiveFloat, PLAN] = 1e-6
    """Learning rate of AdamW at the peak of the schedule. The papers use 1e-6 for full models; tiny models need about
    3e-4."""
    schedule: Annotated[Literal["constant", "linear", "cosine"], FIXED] = "constant"
    """Course of the learning rate after the warm-up. "linear" and "cosine" fall to min_learning_rate at the
    run's last update."""
    min_learning_rate: Annotated[float, PLAN, only_with("train.schedule", "linear", "cosine")] = Field(
        default=0.0, ge=0
    )
    """Learning rate at the end of a schedule that falls; at most learning_rate."""
    warmup_steps: Annotated[int, PLAN] = Field(default=0, ge=0)
    """Updates in which the learning rate rises linearly to its peak; at most those of the run, and fewer if the
    schedule then falls. 0: no warm-up."""
    weight_decay: Annotated[float, PLAN] = Field(default=0.01, ge=0)
    """Weight decay of AdamW. It is never applied to norms and biases."""
    betas: Annotated[tuple[Beta, Beta], FIXED] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    max_grad_norm: Annotated[PositiveFloat, PLAN] = 1.0
    """Largest norm of an update's whole gradient. A gradient above it is scaled down to it."""
    dtype: Annotated[Literal["float32", "bfloat16"], PLAN] = "float32"
    """Type of the trainer's weights and activations. With "bfloat16" the optimizer keeps master weights and gradients
    in fp32, and ratio_gap_limit must be 0 or at least 0.2."""
    router_dtype: Annotated[Literal["float32", "bfloat16"], PLAN] = "float32"
    """Type in which the routers of a mixture of experts compute their logits. vLLM and transformers compute them in the
    model's own type: "bfloat16" does so, too, and then fewer tokens near a tie go to other experts. Needs dtype =
    "bfloat16". Dense models have no routers."""
    recompute: Annotated[Recompute, PLAN] = False
    """Drop activations and compute them again in the backward pass, for less memory. "selective": the outputs of norms
    and SwiGLU, a quarter to a third of a dense model's activations for a few per cent more time. A number: everything
    inside that many layers of each pipeline stage (Megatron's method "block"). true: everything inside each layer, for
    about a third more time."""
    deterministic: bool = False
    """Have a CUDA or NPU device add up in the same order each time, so that equal batches give equal bits. torch then
    refuses operators that can't. This is slower; a CPU does so anyway."""
    offload: bool = False
    """Keep the weights of old policy and reference in host memory. The two take turns in one model on the device, and
    are copied there for each window."""
    distributed_optimizer: Annotated[bool, PLAN] = False
    """Split the optimizer's state among the data-parallel replicas (ZeRO stage 1)."""
    ratio_gap_limit: float = Field(default=1e-3, ge=0)
    """Largest max_ratio_gap of a step (max |π_trainer / π_rollout − 1| over its tokens) in modes "sync" and "periodic".
    A step above it fails the run, because the weights or the numerics of trainer and instances differ. 0 only reports
    the gap; so do the other modes, in which the policy has moved since."""
    profile: list[Step] = Field(default=[], max_length=2)
    """First and last step that torch's profiler (on NPUs torch_npu's) records on each trainer rank and each of the
    run's own instances, into `profile/` of the run folder: [5, 6] (docs/training.md). Empty: none. It slows these steps
    down, and changes no weight."""
    timeout_s: PositiveFloat = 600.0
    """Seconds without a sign of life between trainer and orchestrator after which the run fails. While the trainer
    loads its models, it has rollout.timeout_s more. A trainer outside the run has as long for a window before the
    window is leased again (docs/service.md)."""


RATIOS = ReadIf(
    lambda config: ":" in config.algorithm.loss or not config.ratio_is_one,
    "where a ratio may differ from 1: with another algorithm.old_policy or train.updates above 1 (docs/modes.md, Which "
    "gradient)",
)
GAC = only_with("algorithm.gradient_control", "gac", OWN)
MISMATCH = only_with("algorithm.mismatch", "truncate", "mask")
REJECT = only_with("algorithm.mismatch_reject", "token", "sequence", "geometric")
RAY = only_with("cluster.engine", "ray")
CLIPS = only_with("algorithm.loss", "grpo", "dapo", "dr_grpo", "gspo", "cispo", OWN)


class M2po(Table):
    """Settings of the loss "m2po"; other losses do not read them."""

    threshold: PositiveFloat = 0.04
    """Of the tokens whose ratio the gradient moves further from 1, those with the largest (log ratio)² are masked,
    until the mean of (log ratio)² is at most this number (the paper's τ). 0.04 is the paper's value, and that of the
    authors' release."""


class Bapo(Table):
    """Settings of the loss "bapo"; other losses do not read them."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """Least share of the clipped surrogate that tokens with a positive advantage are to contribute (the paper's ρ0).
    The bounds rise until it is reached or both are at their limits. 0.5 is the value of the authors' release."""
    low: tuple[Beta, Beta] = (0.6, 0.9)
    """Lower bound of the ratio: the value it starts from and the value it may rise to, both below 1. The defaults are
    those of the authors' release."""
    high: tuple[PositiveFloat, PositiveFloat] = (1.2, 3.0)
    """Upper bound of the ratio: the value it starts from and the value it may rise to, both above 1. The defaults are
    those of the authors' release."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Bapo:
        for key, (start, end), side in (("low", self.low, "below"), ("high", self.high, "above")):
            if start > end or (start > 1) != (side == "above") or (end > 1) != (side == "above"):
                raise ValueError(
                    f"algorithm.bapo.{key} = [{start:g}, {end:g}]: expected the value where the bound starts and the "
                    f"value it may rise to, both {side} 1"
                )
        return self


class Algorithm(Table):
    """Advantage, loss and KL term, and the corrections of rewards, tokens and gradients."""

    advantage: Annotated[
        (
            Literal[
                "grpo",
                "grpo_passk",
                "dr_grpo",
                "rloo",
                "opo",
                "gpg",
                "reinforce_plus_plus",
                "reinforce_plus_plus_baseline",
            ]
            | Own
        ),
        FIXED_CODE,
    ] = "grpo"
    """Advantage of a response, computed from the rewards of its group (formulas in docs/algorithms.md). The last two
    need the whole batch, and so any mode but "periodic". A function of your own is "file.py:function"."""
    loss: Annotated[Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "gpg", "m2po", "bapo"] | Own, FIXED_CODE] = (
        "grpo"
    )
    """Surrogate and its mean over tokens (formulas in docs/algorithms.md); "grpo" takes the mean over each response,
    then over all responses. The last two need statistics of the whole batch, and so any mode but "periodic",
    and old_policy = "rollout" (or "previous", at a staleness of at most 1). A function of your own is
    "file.py:function"."""
    old_policy: Annotated[Literal["behavior", "previous", "rollout"], FIXED] = "behavior"
    """Denominator of the loss's ratio π / π_old. "behavior": the policy's own log-probabilities, detached, which on
    on-policy data gives the policy gradient. "previous": those of the weights before the last update, which are kept as
    a third model, as in the papers' Algorithm 1. "rollout": those that the instance returned (docs/modes.md, Which
    gradient). With train.updates above 1 "behavior" is the weights at the step's start, and "previous" is refused."""
    clip_low: Annotated[float, CLIPS, RATIOS] = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 − clip_low. "gspo" needs far less, since its ratio is that of a whole response:
    3e-4, and 4e-4 for clip_high (its paper). Not read by "gpg", "m2po" and "bapo"."""
    clip_high: Annotated[float, CLIPS, RATIOS] = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high. Not read by "gpg", "m2po" and "bapo"."""
    dual_clip: Annotated[float, RATIOS] = 0.0
    """Largest ratio with which a token with A < 0 counts, which clip_low and clip_high leave unbounded (dual-clip PPO;
    verl's clip_ratio_c). Above 1; 0: no bound, as in the papers. verl's default is 3. Only for "grpo", "dapo" and
    "dr_grpo"; the other losses of Metronome refuse it."""
    m2po: Annotated[M2po, only_with("algorithm.loss", "m2po", OWN)] = M2po()
    """Settings of the loss "m2po"."""
    bapo: Annotated[Bapo, only_with("algorithm.loss", "bapo", OWN)] = Bapo()
    """Settings of the loss "bapo"."""
    routing_replay: bool = False
    """Compute each token with the experts that computed it in the instance (R3), in policy, old policy and reference.
    Only for mixtures of experts, and with rollout.engine = "vllm" (docs/algorithms.md)."""
    kl_coef: Annotated[float, FIXED] = Field(default=0.0, ge=0)
    """Weight β of the KL term between policy and reference. 0: no KL term, and no reference model is loaded."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], only_with("algorithm.kl_coef")] = "k3"
    """Estimate of the KL of one token. With x = log π_ref − log π: "k1" is −x, "k2" is x²/2, "k3" is e^x − x − 1
    (Periodic Asynchrony eq. 6)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss (entropy in nats per token). 0: no bonus."""
    dynamic_sampling: Annotated[bool, FIXED] = False
    """Train only groups of which some responses are right and some are not, by `Score.correct` if all of them have it,
    else by different scores: the first train.prompts_per_step such groups in prompt order (DAPO, §3.2). More prompts
    are generated until there are enough; a step that needs more than ten times train.prompts_per_step, as in verl,
    fails the run."""
    overlong_buffer: int = Field(default=0, ge=0)
    """A response that ends within this many tokens of rollout.max_new_tokens (those of tools count) loses reward:
    linearly, from 0 up to overlong_penalty at the limit (DAPO). One that rollout.max_context ends before loses none,
    so leave room for both, or use mask_truncated. 0: none does. At most rollout.max_new_tokens."""
    overlong_penalty: Annotated[float, only_with("algorithm.overlong_buffer")] = Field(default=1.0, ge=0)
    """Reward that a response loses when it ends at rollout.max_new_tokens, with overlong_buffer above 0."""
    gradient_control: Annotated[Literal["none", "measure", "gac"] | Own, PLAN_CODE] = "none"
    """What is done about the cosine between the gradients of consecutive steps. "measure" reports it, "gac" bounds it
    (GAC, Algorithm 1); both keep one copy of the gradient. A function of your own is "file.py:function"."""
    gac_low: Annotated[Threshold, only_with("algorithm.gradient_control", "measure", "gac", OWN)] = 0.1
    """Absolute cosine up to which GAC makes an update as it is. Above it, up to gac_high, the gradient is turned until
    its absolute cosine is gac_low. "measure" tells when the mean leaves it. "auto": taken from the run's first steps
    (modes "sync" and "periodic")."""
    gac_high: Annotated[Threshold, GAC] = 0.3
    """Absolute cosine above which GAC skips the update; must be above gac_low. "auto" as for gac_low. The default is
    unconfirmed: our copy of the paper lacks its values."""
    gac_skips: Annotated[PositiveInt | Literal["staleness"], GAC] = "staleness"
    """Largest number of updates that GAC skips in a row; the next one is made, turned as below gac_high. "staleness":
    train.max_staleness, which is 1 in modes without it. After that many skips the weights have not changed for as long
    as a response may be old, so staleness is no longer a reason to skip. The paper has no bound: a direction that
    persists is then skipped for ever."""
    mask_truncated: bool = False
    """Train no token of a response that the length limit cut. The response still counts in the group's statistics, and
    in the denominator of a loss that divides by responses."""
    mismatch: Literal["none", "truncate", "mask"] = "none"
    """Multiply each token's gain by w = π_old / π_rollout. "truncate" bounds w by mismatch_limit; "mask" drops tokens
    whose w is outside of 1/mismatch_limit to mismatch_limit. With old_policy = "behavior" in an off-policy mode this is
    verl's decoupled loss. Refused with old_policy = "rollout", and with "previous" at a staleness above 1
    (docs/algorithms.md)."""
    mismatch_level: Annotated[Literal["token", "sequence"], MISMATCH] = "token"
    """What w is computed over. "token": each token. "sequence": the product over the trained tokens of its response."""
    mismatch_limit: Annotated[float, MISMATCH] = Field(default=2.0, gt=1)
    """Largest factor that `mismatch` leaves as it is; for "mask" the smallest is 1/mismatch_limit."""
    mismatch_reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Drop tokens whose w is outside of 1/mismatch_reject_limit to mismatch_reject_limit, and leave the weight of the
    others alone. w is that of the token, the product over its response, or the geometric mean over it, which does not
    depend on its length. With old_policy = "rollout" it is π / π_rollout. Goes with or without `mismatch`."""
    mismatch_reject_limit: Annotated[float, REJECT] = Field(default=2.0, gt=1)
    """Largest w that mismatch_reject keeps. 2 suits "token"; verl's examples have about 1.001 for "geometric"."""


class Attention(Table):
    """How attention is computed in the trainer."""

    shared_prompt: bool = True
    """Compute a group's prompt once for all of its responses (Periodic Asynchrony §4.2). Off: once per response."""


class Parallel(Table):
    """How the trainer's ranks share the model and the work. Their number is tensor × pipeline × context × data."""

    tensor: PositiveInt = 1
    """Ranks that share each layer's matrices (tensor parallelism)."""
    pipeline: PositiveInt = 1
    """Stages that share the model's layers (pipeline parallelism, 1F1B). It must divide the number of layers."""
    context: PositiveInt = 1
    """Ranks that share the tokens of a micro-batch (context parallelism)."""
    data: PositiveInt = 1
    """Replicas of the model (data parallelism). Each takes groups from one table as it becomes free."""
    expert: PositiveInt = 1
    """Ranks, out of tensor × context × data, that share the experts of a mixture-of-experts model; each holds whole
    experts. It must divide the number of experts; 1 for a dense model."""
    nodes: PositiveInt = 1
    """Machines that run trainer ranks, the same number of ranks on each. All must see the run folder
    (docs/operate.md)."""
    rendezvous: str = ""
    """Address host:port on the orchestrator's node at which the nodes meet; at the port after it the ranks reach the
    orchestrator, over TLS. The host "auto" is this machine's own address, as with `rollout.listen`. Needed with nodes
    above 1, else empty. With cluster.engine = "ray" an address that this machine does not have, or that is in use, is
    replaced, as with `rollout.listen`."""
    sequence: bool = False
    """Share the norms' work and activations among the tensor ranks, too (sequence parallelism). Needs tensor above 1.
    Off by default, because it is slower on a CPU."""

    @property
    def ranks(self) -> int:
        """Number of trainer ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def ranks_per_node(self) -> int:
        """Number of trainer ranks on each node."""
        return self.ranks // self.nodes

    @property
    def lockstep(self) -> int:
        """Number of replicas that share experts, and so take their windows together; 1 if no replica does."""
        return max(1, self.expert // (self.tensor * self.context))

    @property
    def replica_groups(self) -> int:
        """Number of replica groups: replicas, or sets of replicas in lockstep, that take windows on their own."""
        return self.data // self.lockstep

    @model_validator(mode="after")
    def _check_sizes(self) -> Parallel:
        if self.ranks % self.nodes:
            raise ValueError(f"parallel.nodes ({self.nodes}) must divide the number of ranks ({self.ranks})")
        if (self.nodes > 1) != bool(self.rendezvous):
            raise ValueError(
                'parallel.nodes above 1 needs parallel.rendezvous = "host:port" (an address of the orchestrator\'s '
                'node, such as "auto:29500"); one node needs none'
            )
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "parallel.sequence shares activations among tensor ranks: it needs parallel.tensor above 1"
            )
        if self.expert > 1 and self.tensor > 1 and not self.sequence:
            raise ValueError(
                "parallel.expert with parallel.tensor above 1 needs parallel.sequence = true "
                "(Megatron's rule for training)"
            )
        replica = self.tensor * self.context
        if self.expert % replica and replica % self.expert:
            raise ValueError(
                f"parallel.expert ({self.expert}) and parallel.tensor x parallel.context ({replica}): one must divide "
                "the other: experts are shared inside a replica or by whole replicas"
            )
        if self.data % self.lockstep:
            raise ValueError(
                f"parallel.expert ({self.expert}) must divide parallel.tensor x context x data "
                f"({replica * self.data}): experts are shared among these ranks"
            )
        return self


class Platform(Table):
    """The devices of the trainer, and their sizes, which the dry run and the rollout pool's nodes need."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Kind of device that the trainer computes on. "auto": an NPU if there is one, else a CUDA device, else the CPU."""
    devices: int = Field(default=0, ge=0)
    """Number of accelerators that the whole run may use, training and rollouts together. `run.dry` refuses a layout
    that needs more. 0: no limit."""
    devices_per_node: PositiveInt = 8
    """Number of accelerators of one node. `run.dry` reads it, and it decides how many instances a node of the rollout
    pool takes. 8 is usual; 16 for Atlas A3."""
    memory_gib: Annotated[PositiveFloat, only_with("platform.device", "auto", "cuda", "npu")] = 60.9
    """Memory of one accelerator in GiB as torch reports it (`metronome doctor --device`), read by `run.dry`. 60.9 is
    that of a 64 GB Ascend 910B; an 80 GB H100 or H800 has 79.1."""
    network_gbps: PositiveFloat = 200.0
    """Gbit/s between nodes, by which `metronome plan` counts weights and gradients; 100 in Periodic Asynchrony (§6)."""


class Cluster(Table):
    """What places the processes of a run that are not on its own node (docs/operate.md)."""

    engine: Literal["pools", "ray"] = "pools"
    """"pools": Prefect's work pools for a deployed run; otherwise a person starts them. "ray": a running Ray cluster of
    which this machine is a node (`pip install metronome[ray]`). It gets all instances (`rollout.instances` and
    `dry_run.joining` together), the further trainer nodes, and the devices of the first one; an instance or node that
    dies starts again where there is room."""
    address: Annotated[str, RAY] = "auto"
    """Address "host:port" of the Ray cluster's head; "auto": the cluster of this machine."""
    wait_s: Annotated[PositiveFloat, RAY] = 600.0
    """Seconds that a run waits for Ray to have room for it, at its start, and before it resumes after the death of a
    trainer node."""
    least_nodes: Annotated[int, RAY] = Field(default=0, ge=0)
    """Trainer nodes with which a run goes on if others have died and Ray has none to replace them within a minute:
    `parallel.data` shrinks with `parallel.nodes`, and each later attempt asks for all nodes again. 0: all of them, for
    which the run waits."""
    most_instances: Annotated[int, RAY] = Field(default=0, ge=0)
    """Number of instances that a run may have while the cluster has room. It starts with those of `rollout.instances`
    and `dry_run.joining`, and takes others between two steps. 0: only those."""


EVALUATED = ReadIf(
    lambda config: 0 < math.lcm(config.checkpoint.every, config.evaluate.every) < config.train.steps - 1,
    "where a checkpoint is evaluated: set evaluate.every and checkpoint.every so that one divides the other, both "
    "below train.steps - 1",
)


class Checkpoint(Table):
    """Checkpoints. Each has everything that is needed to continue, bit for bit in modes "sync" and "periodic" on a
    CPU."""

    every: int = Field(default=20, ge=0)
    """Steps between two checkpoints. The last step always has one; 0: only the last step."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints that are kept. Older ones are deleted once a newer one is complete."""
    keep_best: Annotated[int, EVALUATED] = Field(default=0, ge=0)
    """Number of checkpoints that are kept too because an evaluation of `evaluate.every` (avg@k on the first benchmark)
    said most of them, the newest included. RUN/checkpoints/best is the best of them (docs/evaluation.md)."""
    path: str = ""
    """Folder or s3://… to which complete checkpoints are copied, into a folder of the run's name there. Empty: they
    stay in the run folder only."""
