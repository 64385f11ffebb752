"""The inference side: sampling, instances, weight sync."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from engine.config.table import Table


class Rollout(Table):
    """Sampling responses."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """The embedded engine is a process in this environment, for CPU and small devices;
    vLLM runs in its own (`make vllm`)."""
    instances: int = Field(default=1, ge=0)
    """Rollout instances that the run starts itself; others may join (`metronome serve --join`). 0: all join."""
    tensor: PositiveInt = 1
    """Devices that share one vLLM instance's model (its tensor parallelism)."""
    devices: list[int] = []
    """Cores (CPU) or devices (vLLM on CUDA, NPU) of the instances that the run starts, `len / instances` each, in turn.
    Empty: the system places them; a training refuses that on devices, where all would take those from 0 on, as its
    ranks do."""
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
    """Fixed decode shapes: a response depends on prompt, seed and weights only.
    benchmarks/determinism.py prints the cost."""
    partial: bool = False
    """A response under way when new weights come is cut and continued under them, so long ones hold up no update; each
    token keeps its version. Only in modes that allow staleness (docs/modes.md)."""
    timeout_s: PositiveFloat = 600.0
    """Seconds a request, a weight update or the start of an instance may take."""
    restarts: int = Field(default=2, ge=0)
    """How often an instance of the run that died is started again."""
    heartbeat_s: PositiveFloat = 5.0
    """An instance that does not answer for so long is silent:
    what it holds is sent to others until it answers again."""
    wait_s: PositiveFloat = 60.0
    """How long a run waits for an instance when none is left, before it stops with a checkpoint."""
    listen: str = "127.0.0.1:0"
    """Address where instances join and /metrics is served; port 0 takes a free one.
    Off loopback METRONOME_TOKEN must be set."""


class Weights(Table):
    """Weight sync from trainer to instances."""

    transport: Literal["file", "gloo", "nccl", "hccl"] = "file"
    """"file": safetensors in shared memory or a shared folder; "gloo" (CPU), "nccl" (CUDA), "hccl" (NPU):
    over the network."""
    staged: bool = False
    """Send to the instances' host memory in the background and swap at the boundary (AsyncFlow §4.2.3)."""
    bucket_mb: PositiveInt = 256
    """MiB that are gathered and sent at a time: what the export holds in memory beside the model."""
    check_tokens: int = Field(default=16, ge=0)
    """Fixed tokens whose log-probabilities trainer and instances compare after each sync; 0 leaves the comparison out.
    On a CPU each costs as much as a generated one, on both sides; bf16, whose mean difference is compared, wants 32 or
    more."""
