"""The training side: step loop, algorithm, parallel layout, checkpoints."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from engine.config.table import Table

Beta = Annotated[float, Field(ge=0, lt=1)]
Threshold = Annotated[float, Field(gt=0, lt=1)] | Literal["auto"]


def _own(value: str) -> str:
    if not re.fullmatch(r".+:[A-Za-z_]\w*", value):
        raise ValueError('a function of your own is named "file.py:function" or "package.module:function"')
    return value


Own = Annotated[str, AfterValidator(_own)]


class Train(Table):
    """The step loop and its optimizer."""

    mode: Literal["sync", "periodic", "one_step_off", "bounded"] = "periodic"
    """"periodic" trains each group as it arrives; "sync" starts when the step's last group is in. The others are
    off-policy on purpose: "one_step_off" generates the next batch meanwhile, "bounded" up to max_staleness batches
    (docs/modes.md)."""
    max_staleness: PositiveInt = 1
    """Updates that responses may be behind, in mode "bounded"."""
    exact_lag: bool = False
    """In mode "bounded": weights wait until all batches in flight are generated,
    so batch t has version t − max_staleness."""
    steps: PositiveInt = 60
    """Updates, hence also the final weight version."""
    prompts_per_step: PositiveInt = 32
    """Prompts per step (B, the papers' N)."""
    consume: Literal["arrival", "prompt_order"] = "arrival"
    """Order of training: arrival is fastest, prompt_order makes a run a function of its
    seed (with rollout.deterministic)."""
    record: bool = False
    """Store every group and the order of training in `record.msgpack`, for `--replay`."""
    devices: list[int] = []
    """CPU: cores of the trainer; empty leaves placing to the system."""
    micro_batch_tokens: PositiveInt = 4096
    """Token budget of a forward: groups that are there are packed up to it,
    one above it is split (its prompt computed again)."""
    learning_rate: PositiveFloat = 1e-6
    """Peak of the schedule. 1e-6 is what the papers use for full models; tiny ones want 3e-4."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine end at 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's; never applied to norms and biases."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm above which the gradient is scaled down."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's weights and activations. With bfloat16 the optimizer keeps fp32 master weights and gradients."""
    recompute: bool = False
    """Forget each layer's activations and compute them again in the backward pass: less memory, a third more time."""
    offload: bool = False
    """Keep old policy and reference in host memory; they take turns in one model on the device,
    copied there for each window."""
    distributed_optimizer: bool = False
    """Share the optimizer's state among the data-parallel replicas (ZeRO stage 1)."""
    score_early: bool = False
    """Compute old and reference log-probabilities as soon as a response lands while
    the trainer would otherwise wait."""
    ratio_gap_limit: float = Field(default=1e-3, ge=0)
    """A step whose max_ratio_gap exceeds it fails the run (weights of trainer and instance differ). 0 only reports."""
    timeout_s: PositiveFloat = 600.0
    """Seconds without any sign of life between trainer and launcher before either gives up."""


class M2po(Table):
    """Of `algorithm.loss = "m2po"`."""

    threshold: PositiveFloat = 0.04
    """Largest mean of (log ratio)² over the tokens that are not masked. 0.04 is the paper's."""


class Bapo(Table):
    """Of `algorithm.loss = "bapo"`."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """The share of the surrogate that tokens with A > 0 are to bring. 0.5 is the paper's (its authors' release)."""
    low: tuple[Beta, Beta] = (0.6, 0.9)
    """Where the lower bound of the ratio starts, and how far it may rise; as the paper's authors have it."""
    high: tuple[PositiveFloat, PositiveFloat] = (1.2, 3.0)
    """The same for the upper bound."""

    @model_validator(mode="after")
    def _bounds(self) -> Bapo:
        for key, (start, end), side in (("low", self.low, "below"), ("high", self.high, "above")):
            if start > end or (start > 1) != (side == "above") or (end > 1) != (side == "above"):
                raise ValueError(
                    f"algorithm.bapo.{key} = [{start:g}, {end:g}]: expected where the bound starts and how far it may "
                    f"rise, both {side} 1"
                )
        return self


class Algorithm(Table):
    """Advantage, loss and KL."""

    advantage: (
        Literal[
            "grpo", "grpo_passk", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
        ]
        | Own
    ) = "grpo"
    """docs/algorithms.md has the formulas; the last two are over the whole batch (mode "sync").
    Or "file.py:function"."""
    loss: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "m2po", "bapo"] | Own = "grpo"
    """Surrogate and aggregation (docs/algorithms.md); grpo: mean over a response, then over all. The last two take
    statistics over the whole batch (every mode but "periodic"). Or "file.py:function"."""
    old_policy: Literal["behavior", "previous", "rollout"] = "behavior"
    """Denominator of the ratio: the policy's own detached values, the weights before the last update,
    or the engine's."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Ratio is clipped above at 1 + clip_high."""
    m2po: M2po = M2po()
    """Of the loss m2po."""
    bapo: Bapo = Bapo()
    """Of the loss bapo."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight β of the KL to the reference; 0 drops the reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With x = log π_ref - log π: -x, x²/2, or e^x - x - 1 (Periodic Asynchrony eq. 6)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    dynamic_sampling: bool = False
    """Train only groups with different scores: the first train.prompts_per_step of
    them in prompt order (DAPO, §3.2)."""
    dynamic_sampling_batches: PositiveInt = 10
    """So many times train.prompts_per_step prompts may a step use with dynamic_sampling,
    then the run stops (10 as in verl)."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Responses ending so many tokens before rollout.max_new_tokens lose reward,
    up to overlong_penalty at the limit (DAPO)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """What a response at the limit loses."""
    gradient_control: Literal["none", "measure", "gac"] | Own = "none"
    """The cosine of consecutive gradients: "measure" reports it (one gradient copy), "gac" bounds it (GAC, Algorithm
    1). Or "file.py:function"."""
    gac_low: Threshold = 0.05
    """Cosine up to which an update is made as it is, and to which GAC turns those above; "auto":
    from the run's first steps (on-policy modes)."""
    gac_high: Threshold = 0.3
    """Cosine above which GAC skips the update. Both defaults are unconfirmed:
    the paper's values are not in our copy of it."""
    mask_truncated: bool = False
    """Do not train responses that the length limit cut
    (they count in the denominator and in the group's statistics)."""
    mismatch: Literal["none", "truncate", "mask"] = "none"
    """Weigh tokens by π_trainer / π_rollout, both under the weights that sampled: "truncate" bounds it by
    mismatch_limit, "mask" drops tokens outside of it. Refused with old_policy = "rollout" and where those weights are
    not known (docs/algorithms.md)."""
    mismatch_limit: float = Field(default=2.0, gt=1)
    """Largest weight; "mask" drops below 1/limit too."""


class Attention(Table):
    """How attention is computed in the trainer."""

    shared_prompt: bool = True
    """Compute a group's prompt once (Periodic Asynchrony §4.2)."""


class Parallel(Table):
    """How the trainer's ranks share the model and the work; their product (without expert) is the number of ranks."""

    tensor: PositiveInt = 1
    """Ranks that share each layer's matrices."""
    pipeline: PositiveInt = 1
    """Stages that share the layers (1F1B)."""
    context: PositiveInt = 1
    """Ranks that share the tokens of a micro-batch."""
    data: PositiveInt = 1
    """Replicas; each takes groups from the one queue as it becomes free."""
    expert: PositiveInt = 1
    """Ranks, among tensor x context x data, that share the experts of a
    mixture-of-experts model (each holds whole ones)."""
    nodes: PositiveInt = 1
    """Machines that the ranks are shared among, the same number on each;
    they share the run folder (docs/operations.md)."""
    rendezvous: str = ""
    """With several nodes: host:port on the launcher's node, where they meet.
    The next port carries the control channel."""
    sequence: bool = False
    """Also share the norms' work and activations among the tensor ranks; off by default, it is slower on CPU."""

    @property
    def ranks(self) -> int:
        """Trainer ranks in all."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def ranks_per_node(self) -> int:
        """Trainer ranks on each node."""
        return self.ranks // self.nodes

    @property
    def lockstep(self) -> int:
        """Replicas whose experts are shared: they take their windows together."""
        return max(1, self.expert // (self.tensor * self.context))

    @property
    def units(self) -> int:
        """Replicas, or sets of replicas in lockstep, that take windows on their own."""
        return self.data // self.lockstep

    @model_validator(mode="after")
    def _allowed(self) -> Parallel:
        if self.ranks % self.nodes:
            raise ValueError(f"parallel.nodes ({self.nodes}) must divide the number of ranks ({self.ranks})")
        if (self.nodes > 1) != bool(self.rendezvous):
            raise ValueError(
                'parallel.nodes above 1 needs parallel.rendezvous = "host:port" (an address of the launcher\'s '
                "node); one node needs none"
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
                f"of parallel.expert ({self.expert}) and parallel.tensor x parallel.context ({replica}) one must "
                "divide the other: experts are shared inside a replica or by whole replicas"
            )
        if self.data % self.lockstep:
            raise ValueError(
                f"parallel.expert ({self.expert}) must divide parallel.tensor x context x data "
                f"({replica * self.data}): experts are shared among these ranks"
            )
        return self


class Platform(Table):
    """Where the trainer computes."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """"auto": an NPU if there is one, else a CUDA device, else the CPU."""
    devices: int = Field(default=0, ge=0)
    """Accelerators that the whole run may use, training and rollouts together; `run.dry` refuses more.
    0 leaves it open."""
    devices_per_node: PositiveInt = 8
    """Accelerators of a node, for `run.dry` and to share instances among the rollout pool's nodes: 8 is usual."""
    memory_gib: PositiveFloat = 64.0
    """GiB of memory of one accelerator, for `run.dry`: 64 is an Ascend 910B's (Periodic Asynchrony §6)."""


class Checkpoint(Table):
    """Everything needed to go on, bit for bit."""

    every: int = Field(default=20, ge=0)
    """Steps between checkpoints; 0 keeps only the one at the end."""
    keep_last: PositiveInt = 2
    """Older ones are deleted once a newer one is complete."""
    keep_best: int = Field(default=0, ge=0)
    """Beside the newest, so many are kept of those with the highest reward_mean at their last step."""
    path: str = ""
    """Where complete checkpoints are published: a folder or s3://…; empty keeps them in the run folder only."""
