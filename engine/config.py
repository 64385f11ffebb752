"""One typed tree for a run, read from TOML. Every field says its unit and why its default is what it is.

`load(recipe, overrides)` is the only way in; it turns every mistake into one `BadInput` that names file, key and remedy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

WINDOW_PER_STAGE = 4
"""Micro-batches of a window per pipeline stage: a full window idles at most (p - 1) / (5p - 1) < 20 % of its time."""

BF16_GAP = 0.2
"""Below this a limit on max|ratio - 1| refuses sound bf16 runs: a token's log-probability moves by up to 0.15."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    """Base of all tables: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Table):
    """The run as a whole."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9_-][A-Za-z0-9._-]*)?$")
    """Folder name under `output`. Empty: recipe name and start time, so that a second run never meets the first."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompt order and sampling."""
    output: str = "runs"
    """Folder that holds run folders, base models, caches and the MLflow store."""


class Model(Table):
    """The base model."""

    path: str = "quickstart"
    """A Hugging Face folder, or "quickstart": the tiny Qwen3 that Metronome warms up itself (cached under `run.output`)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the rollout instances; bfloat16 needs rollout.engine = "vllm". fp32 on CPU: bf16 moves log-probabilities by 0.15 there."""


class Data(Table):
    """Problem sets in DeepScaleR's schema (problem, answer, solution): .json, .jsonl, .parquet or a folder of them."""

    train: str = "data/addition_train.jsonl"
    """Problems to train on. Relative paths are tried from the current folder, then from Metronome's own."""
    heldout: str = "data/addition_heldout.jsonl"
    """Problems never trained on; what `evaluate.benchmark = ""` evaluates."""
    prompt_template: str = "{problem}"
    """Text with `{problem}` in it, or "chat": the tokenizer's chat template around one user message."""

    @model_validator(mode="after")
    def _template(self) -> Data:
        if self.prompt_template != "chat" and "{problem}" not in self.prompt_template:
            raise ValueError('data.prompt_template must contain "{problem}" or be "chat"')
        return self


class Reward(Table):
    """How a response is scored."""

    function: str = "exact"
    """"math", "exact", "file.py:function" or "package.module:function"."""
    timeout_s: PositiveFloat = 10.0
    """Seconds one call may take before its worker is killed and the response scores 0. math-verify needs milliseconds."""
    on_error: Literal["stop", "zero"] = "stop"
    """A reward that raises or returns the wrong number: stop the run after a checkpoint, or score 0 and count it."""
    workers: PositiveInt = 1
    """Verifier processes. One keeps up with a small model; raise it when verifying is slow."""


class Rollout(Table):
    """Sampling responses."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """The embedded engine is a process in this environment, for CPU and small devices; vLLM runs in its own (`make vllm`)."""
    instances: int = Field(default=1, ge=0)
    """Rollout instances that the run starts itself; others may join (`metronome serve --join`). 0: all join."""
    tensor: PositiveInt = 1
    """Devices that share one vLLM instance's model (its tensor parallelism)."""
    devices: list[int] = []
    """CPU: cores of each instance in turn, `len / instances` each; empty leaves placing to the system."""
    concurrency: PositiveInt = 4
    """Groups in flight per instance: fewer start training earlier, more decode faster."""
    group_size: PositiveInt = 8
    """Responses per prompt (G)."""
    max_context: PositiveInt = 2048
    """Prompt and response tokens together; prompts that leave no room for a response are counted skips."""
    max_new_tokens: PositiveInt = 512
    """Length limit of a response; it then counts as truncated."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Of sampling and of the log-probabilities on both sides."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """1 in training, or trainer and instance no longer speak of the same distribution."""
    top_k: int = Field(default=0, ge=0)
    """0 switches it off; see top_p."""
    stop: list[str] = []
    """Strings of one token each that end a response, beside the tokenizer's end of sequence."""
    deterministic: bool = False
    """Fixed decode shapes: a response depends on prompt, seed and weights only. benchmarks/determinism.py prints the cost."""
    timeout_s: PositiveFloat = 600.0
    """Seconds a request, a weight update or the start of an instance may take."""
    restarts: int = Field(default=2, ge=0)
    """How often an instance of the run that died is started again."""
    heartbeat_s: PositiveFloat = 5.0
    """An instance that does not answer for so long is silent: what it holds is sent to others until it answers again."""
    wait_s: PositiveFloat = 60.0
    """How long a run waits for an instance when none is left, before it stops with a checkpoint."""
    listen: str = "127.0.0.1:0"
    """Address where instances join and /metrics is served; port 0 takes a free one. Off loopback METRONOME_TOKEN must be set."""


class Train(Table):
    """The step loop and its optimizer."""

    mode: Literal["sync", "periodic"] = "periodic"
    """"periodic" trains each group as it arrives; "sync" starts when the step's last group is in."""
    steps: PositiveInt = 60
    """Updates, hence also the final weight version."""
    prompts_per_step: PositiveInt = 32
    """Prompts per step (B, the papers' N)."""
    consume: Literal["arrival", "prompt_order"] = "arrival"
    """Order of training: arrival is fastest, prompt_order makes a run a function of its seed (with rollout.deterministic)."""
    record: bool = False
    """Store every group and the order of training in `record.msgpack`, for `--replay`."""
    devices: list[int] = []
    """CPU: cores of the trainer; empty leaves placing to the system."""
    micro_batch_tokens: PositiveInt = 4096
    """Token budget of a forward: groups that are there are packed up to it, one above it is split (its prompt computed again)."""
    learning_rate: PositiveFloat = 1e-6
    """Peak of the schedule. 1e-6 is what the papers use for full models; tiny ones want 3e-4."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine end at 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's; never applied to norms and biases."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm above which the gradient is scaled down."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's weights and activations. With bfloat16 the optimizer keeps fp32 master weights and gradients."""
    recompute: bool = False
    """Forget each layer's activations and compute them again in the backward pass: less memory, a third more time."""
    offload: bool = False
    """Keep old policy and reference in host memory; they take turns in one model on the device, copied there for each window."""
    distributed_optimizer: bool = False
    """Share the optimizer's state among the data-parallel replicas (ZeRO stage 1)."""
    score_early: bool = False
    """Compute old and reference log-probabilities as soon as a response lands while the trainer would otherwise wait."""
    ratio_gap_limit: float = Field(default=1e-3, ge=0)
    """A step whose max_ratio_gap exceeds it fails the run (weights of trainer and instance differ). 0 only reports."""
    timeout_s: PositiveFloat = 600.0
    """Seconds without any sign of life between trainer and launcher before either gives up."""


class Algorithm(Table):
    """Advantage, loss and KL."""

    advantage: Literal["grpo"] = "grpo"
    """A = (R - mean) / (std + 1e-6) over the group, sample standard deviation."""
    loss: Literal["grpo"] = "grpo"
    """Clipped surrogate, mean over the tokens of a response, then over all responses of the step."""
    old_policy: Literal["behavior", "previous", "rollout"] = "behavior"
    """Denominator of the ratio: the policy's own detached values, the weights before the last update, or the engine's."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Ratio is clipped above at 1 + clip_high."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight β of the KL to the reference; 0 drops the reference model."""
    kl_estimator: Literal["k3"] = "k3"
    """e^x - x - 1 with x = log π_ref - log π (Periodic Asynchrony eq. 6)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""


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
    """Ranks, among tensor x context x data, that share the experts of a mixture-of-experts model (each holds whole ones)."""
    sequence: bool = False
    """Also share the norms' work and activations among the tensor ranks; off by default, it is slower on CPU."""

    @property
    def ranks(self) -> int:
        """Trainer ranks in all."""
        return self.tensor * self.pipeline * self.context * self.data

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
        if self.sequence and self.tensor == 1:
            raise ValueError("parallel.sequence shares activations among tensor ranks: it needs parallel.tensor above 1")
        if self.expert > 1 and self.tensor > 1 and not self.sequence:
            raise ValueError("parallel.expert with parallel.tensor above 1 needs parallel.sequence = true "
                             "(Megatron's rule for training)")
        replica = self.tensor * self.context
        if self.expert % replica and replica % self.expert:
            raise ValueError(f"of parallel.expert ({self.expert}) and parallel.tensor x parallel.context ({replica}) one must "
                             "divide the other: experts are shared inside a replica or by whole replicas")
        if self.data % self.lockstep:
            raise ValueError(f"parallel.expert ({self.expert}) must divide parallel.tensor x context x data "
                             f"({replica * self.data}): experts are shared among these ranks")
        return self


class Platform(Table):
    """Where the trainer computes."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """"auto": an NPU if there is one, else a CUDA device, else the CPU."""


class Weights(Table):
    """Weight sync from trainer to instances."""

    transport: Literal["file", "gloo", "nccl", "hccl"] = "file"
    """"file": safetensors in shared memory or a shared folder; "gloo" (CPU), "nccl" (CUDA), "hccl" (NPU): broadcast over the network."""
    staged: bool = False
    """Send to the instances' host memory in the background and swap at the boundary (AsyncFlow §4.2.3)."""
    bucket_mb: PositiveInt = 256
    """MiB that are gathered and sent at a time: what the export holds in memory beside the model."""
    check_tokens: int = Field(default=32, ge=0)
    """Fixed tokens whose log-probabilities trainer and instances compare after each sync; 0 leaves the comparison out."""


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


class Evaluate(Table):
    """Evaluation of a model on a benchmark."""

    benchmark: str = ""
    """A problem file; empty takes data.heldout."""
    problems: int = Field(default=256, ge=0)
    """At most so many problems, the first of the file; 0 takes all."""
    samples: PositiveInt = 1
    """Responses per problem (k of avg@k and pass@k)."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Of sampling; 0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of sampling."""
    top_k: int = Field(default=0, ge=0)
    """Of sampling; 0 switches it off."""
    max_new_tokens: PositiveInt = 512
    """Length limit of a response."""


class Tracking(Table):
    """MLflow."""

    uri: str = ""
    """MLflow tracking URI; empty: sqlite in `run.output`, no server needed."""
    experiment: str = "metronome"
    """MLflow experiment."""


class Config(Table):
    """A whole run."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    train: Train = Train()
    algorithm: Algorithm = Algorithm()
    attention: Attention = Attention()
    parallel: Parallel = Parallel()
    platform: Platform = Platform()
    weights: Weights = Weights()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.algorithm.advantage == "grpo" and self.rollout.group_size < 2:
            raise ValueError("rollout.group_size must be at least 2 for algorithm.advantage = \"grpo\": "
                             "a group of one has no spread to compare with")
        if self.rollout.max_new_tokens >= self.rollout.max_context:
            raise ValueError(f"rollout.max_new_tokens ({self.rollout.max_new_tokens}) must be below "
                             f"rollout.max_context ({self.rollout.max_context}) to leave room for a prompt")
        for key, cores in (("train.devices", self.train.devices), ("rollout.devices", self.rollout.devices)):
            if missing := sorted(set(cores) - usable_cores()):
                raise ValueError(f"{key} names cores {missing}, which this process can't use; it has {sorted(usable_cores())}")
        for key, cores, sharers, count in (
            ("rollout.devices", self.rollout.devices, "instances", self.rollout.instances),
            ("train.devices", self.train.devices, "trainer ranks", self.parallel.ranks),
        ):
            if len(cores) % count:
                raise ValueError(f"{key} names {len(cores)} cores, which {count} {sharers} can't share evenly")
        if self.train.dtype == "bfloat16" and 0 < self.train.ratio_gap_limit < BF16_GAP:
            raise ValueError(f"train.dtype = \"bfloat16\" moves single log-probabilities by more than train.ratio_gap_limit = "
                             f"{self.train.ratio_gap_limit:g}; set it to at least {BF16_GAP:g}, or 0 to only report the gap")
        if self.train.score_early and self.train.consume == "prompt_order":
            raise ValueError("train.score_early needs train.consume = \"arrival\": which responses are scored together depends "
                             "on when they land, and with it the last bit of their log-probabilities")
        if self.train.score_early and self.parallel.lockstep > 1:
            raise ValueError("train.score_early needs replicas that share no experts (parallel.expert at most tensor x context): "
                             "those that do must compute together")
        return self

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run.output) / self.run.name

    @property
    def window_tokens(self) -> int:
        """Token budget of a window. A pipeline idles for its depth in each window, so it may take several micro-batches."""
        pipeline, deep = self.parallel.pipeline, self.parallel.pipeline > 1
        return self.train.micro_batch_tokens * self.parallel.lockstep * (WINDOW_PER_STAGE * pipeline if deep else 1)

    @property
    def trainer_threads(self) -> int:
        """Computing threads of a trainer rank: its own cores if it has some, else an even share."""
        return len(self.train.devices) // self.parallel.ranks or self._share

    @property
    def instance_threads(self) -> int:
        """Computing threads of a rollout instance: its own cores if it has some, else an even share."""
        return len(self.rollout.devices) // self.rollout.instances or self._share

    @property
    def _share(self) -> int:
        return max(1, len(usable_cores()) // (self.parallel.ranks + self.rollout.instances))


def usable_cores() -> set[int]:
    """CPU cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
