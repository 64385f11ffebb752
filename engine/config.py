"""One typed tree for a run, read from TOML. Every field says its unit and why its default is what it is.

`load(recipe, overrides)` is the only way in; it turns every mistake into one `BadInput` that names file, key and remedy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

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
    dtype: Literal["float32"] = "float32"
    """Of the rollout instances. fp32 on CPU: bf16 moves log-probabilities by 0.15 there (notes/vllm)."""


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

    engine: Literal["embedded"] = "embedded"
    """The embedded engine is a process in this environment, for CPU and small devices."""
    instances: PositiveInt = 1
    """Rollout processes."""
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
    dtype: Literal["float32"] = "float32"
    """Of the trainer."""
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


class Weights(Table):
    """Weight sync from trainer to instances."""

    transport: Literal["file"] = "file"
    """"file": safetensors in shared memory (or the run folder where there is none)."""


class Checkpoint(Table):
    """Everything needed to go on, bit for bit."""

    every: int = Field(default=20, ge=0)
    """Steps between checkpoints; 0 keeps only the one at the end."""
    keep_last: PositiveInt = 2
    """Older ones are deleted once a newer one is complete."""
    path: str = ""
    """Where the final checkpoint is published: a folder or s3://…; empty keeps it in the run folder only."""


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
        if len(self.rollout.devices) % self.rollout.instances:
            raise ValueError(f"rollout.devices names {len(self.rollout.devices)} cores, which "
                             f"{self.rollout.instances} instances can't share evenly")
        return self

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run.output) / self.run.name

    @property
    def trainer_threads(self) -> int:
        """Computing threads of a trainer rank: its own cores if it has some, else an even share."""
        return len(self.train.devices) or self._share

    @property
    def instance_threads(self) -> int:
        """Computing threads of a rollout instance: its own cores if it has some, else an even share."""
        return len(self.rollout.devices) // self.rollout.instances or self._share

    @property
    def _share(self) -> int:
        return max(1, len(usable_cores()) // (1 + self.rollout.instances))


def usable_cores() -> set[int]:
    """CPU cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
