"""The tables of the inference side: sampling, instances, weight sync."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from engine.config.marks import FIXED, PLAN, REWARD_CODE, only_with
from engine.config.table import Table

SET_ELSEWHERE = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "rollout.max_context",
    "max_num_seqs": "rollout.concurrency and rollout.group_size, whose product it is",
    "tensor_parallel_size": "rollout.tensor",
    "enable_return_routed_experts": "algorithm.routing_replay",
    "host": "--host of `metronome serve`",
    "port": "--port of `metronome serve`",
    "served_model_name": "--model of `metronome serve`",
    "api_key": "METRONOME_TOKEN",
    "middleware": "METRONOME_TOKEN for access; the middleware has the routes of the protocol",
}
"""vLLM's name of an argument that Metronome sets → what the user sets instead."""
_ONE_ENGINE = "an instance is one engine on rollout.tensor devices; more devices are more instances (rollout.instances)"
_SERVED = "the server is Metronome's own, and sets CORS and logging itself"
REFUSED = {
    "logprobs_mode": "the trainer needs log-probabilities after the temperature and before top_p",
    "generation_config": "sampling is set in the recipe, not in a file of the model",
    "worker_extension_cls": "Metronome's own class is set there, which receives the weights",
    "seed": "each instance gets a different one, otherwise two would sample the same responses; for reproducible "
    "responses see rollout.deterministic",
    "skip_tokenizer_init": "instances take token ids; `metronome serve --model` answers text",
    "allowed_origins": _SERVED,
    "disable_uvicorn_access_log": _SERVED,
    "disable_fastapi_docs": _SERVED,
    "config": "a file of arguments would bypass these checks; give each argument in the recipe",
    "trust_remote_code": "Metronome runs no code of a model's folder",
    "quantization": "the instance would not sample from the policy's own weights, and syncing quantised weights is "
    "untested; for less memory see kv_cache_dtype (docs/rollouts.md)",
    "pipeline_parallel_size": _ONE_ENGINE,
    "api_server_count": _ONE_ENGINE,
    "nnodes": _ONE_ENGINE,
    "node_rank": _ONE_ENGINE,
    "headless": _ONE_ENGINE,
}
"""vLLM's name of an argument that no run may set → why."""
REFUSED_BY_PREFIX = {"ssl_": "runs talk to their instances over plain HTTP", "data_parallel_": _ONE_ENGINE}
"""The begin of vLLM's name of arguments that no run may set → why."""


def _check_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for arguments of vLLM that Metronome sets itself, and for values that vLLM can't be given."""
    for name, value in arguments.items():
        key = f"rollout.vllm.{name}"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"{key}: expected vLLM's name of an argument, with underscores: max_num_batched_tokens")
        plain = name.removeprefix("no_")  # vLLM takes --no-NAME, too
        if plain in SET_ELSEWHERE:
            raise ValueError(f"{key}: Metronome sets this argument of vLLM; set {SET_ELSEWHERE[plain]}")
        why = next((why for prefix, why in REFUSED_BY_PREFIX.items() if plain.startswith(prefix)), REFUSED.get(plain))
        if why is not None:
            raise ValueError(f"{key} can't be set: {why}")
        if isinstance(value, list) and any(str(one).startswith("-") for one in value):
            raise ValueError(f"{key} = {value!r}: an element that begins with - would be read as another argument")
        if plain == "hf_overrides" and not isinstance(value, dict):
            raise ValueError(f"{key} = {value!r}: must be a table")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"{key} = {value!r}: must be a string, a number, true, false, a list or a table") from None
    return arguments


class Rollout(Table):
    """The rollout instances, and how they sample responses."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """Program that runs in an instance. "embedded": Metronome's own engine, in this environment, for CPU and small
    devices. "vllm": vLLM, in a separate environment (`make vllm`)."""
    instances: int = Field(default=1, ge=0)
    """Number of rollout instances that the run starts itself; others may join (`metronome serve --join`). 0: the run
    starts none, and all of them join."""
    tensor: PositiveInt = 1
    """Devices that share the model of one vLLM instance (tensor parallelism). The embedded engine takes only 1."""
    devices: list[int] = []
    """Numbers of the CPU cores, or of the devices with vLLM on CUDA or NPU, that the run's own instances share evenly:
    the first instance takes the first of them, and so on. Empty: the system places the instances. With vLLM on devices
    a training refuses an empty list, because each instance would take devices from 0 on, which the trainer's ranks
    use."""
    share_devices: bool = False
    """Let vLLM instances use devices of trainer ranks, as where a machine has only one. `gpu_memory_utilization` in
    [rollout.vllm] must then say vLLM's share of the memory; a rank allocates at most the rest. Weights travel by "file"
    or "gloo". Not on NPUs."""
    concurrency: PositiveInt | Literal["all"] = 4
    """Whole groups that are in flight on one instance at a time. With fewer, training starts earlier; with more,
    decoding is faster. A response that ends frees its slot at once; the next group is sent when it has a slot for each
    of its responses. "all": so many that a whole batch is sent at once, evenly to all instances."""
    group_size: Annotated[PositiveInt, FIXED] = 8
    """Responses sampled for each prompt (G). Every advantage but "reinforce_plus_plus" needs at least 2."""
    max_context: PositiveInt = 2048
    """Largest number of tokens of prompt and response together. A prompt that leaves no room for a response is skipped
    and counted."""
    max_new_tokens: Annotated[PositiveInt, PLAN] = 512
    """Largest number of tokens of a response; must be below max_context. A response that this limit ends counts as
    truncated."""
    temperature: Annotated[float, FIXED] = Field(default=1.0, ge=0.01, le=100)
    """Temperature of sampling, and of the log-probabilities that trainer and instances compute."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the most likely tokens that are sampled from; 1 is all of them. Keep it at 1 in training:
    with less, responses do not come from the distribution that is trained (a warning says so). Trainer and instances
    compute log-probabilities of the whole distribution."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens that are sampled from; 0 is all of them. Keep it at 0 in training, as top_p at 1."""
    stop: list[str] = []
    """Strings that end a response, in addition to the end of sequence, and to the end of a turn where prompts are
    written in the chat template. A string that is not exactly one token is refused."""
    deterministic: bool = False
    """Make a response depend on prompt, seed and weights only, not on what else runs. The embedded engine decodes in
    batches of a fixed shape (benchmarks/determinism.py prints what it costs). vLLM gets VLLM_BATCH_INVARIANT=1 on CUDA
    and NPU; an instance that does not give the same bits alone and in a full batch refuses to start
    (docs/rollouts.md)."""
    program: Annotated[str, REWARD_CODE] = ""
    """Rollouts of several turns: a function of your own, "file.py:function" or "package.module:function", that samples
    each response in turns and says what stands between them (docs/programs.md). It runs in `reward.workers` processes
    of its own, and fails as a reward does (`reward.on_error`, `reward.on_timeout`). Empty: a response is one turn."""
    program_timeout_s: Annotated[PositiveFloat, only_with("rollout.program")] = 60.0
    """Seconds that a program may take for one response, without the time in which its turns are sampled."""
    max_turns: Annotated[PositiveInt, only_with("rollout.program")] = 16
    """Largest number of turns of a response of a program. `max_new_tokens` counts all of its turns and what the program
    has put between them."""
    partial: bool = False
    """Cut responses under way when new weights come, and continue them under the new weights, so that a long response
    delays no update. Each token keeps its version. Only in modes "one_step_off" and "bounded" (docs/modes.md)."""
    timeout_s: PositiveFloat = 600.0
    """Longest time in seconds of one request, of one weight update, of the start of an instance, and of the wait for
    the first instance to join, counted from when the trainer is ready. An instance that starts before its run waits as
    long for it."""
    vllm: Annotated[dict[str, Any], AfterValidator(_check_arguments)] = {}
    """Further arguments of vLLM for each instance, by vLLM's names with underscores: `gpu_memory_utilization = 0.8` in
    [rollout.vllm]. Those that Metronome sets itself are refused, and so is every one without engine = "vllm"
    (docs/rollouts.md)."""
    restarts: int = Field(default=2, ge=0)
    """Number of times that each of the run's own instances is restarted after it died. An hour without a fault resets
    the count. 0: never."""
    heartbeat_s: PositiveFloat = 5.0
    """Seconds without an answer after which an instance gets no prompts, and what it holds is sent to other instances,
    until it answers again."""
    wait_s: PositiveFloat = 60.0
    """Seconds that a run whose last instance died or left waits for another before it stops with a checkpoint, and that
    an instance which joined waits for an orchestrator that does not answer. A run waits longer if the model takes
    longer to load (100 MiB/s)."""
    listen: str = "127.0.0.1:0"
    """Address host:port of the run's server: instances join there, stages and programs outside ask there, and it serves
    /status and /metrics. Port 0 takes a free port. The host "auto" is this machine's address on the default route. An
    address other than loopback needs METRONOME_TOKEN to be set. Instances on other nodes need one."""

    @property
    def seeded(self) -> bool:
        """Whether each request of the training has a seed of its own. With vLLM a seed can cost one kernel for each
        response and token, and without batch-invariant kernels it repeats no response: so only a deterministic one
        gets them. The embedded engine draws from a seed in any case."""
        return self.deterministic or self.engine == "embedded"

    def patience(self, met: bool, loading_s: float = 0.0) -> tuple[float, str]:
        """Seconds that the run and its instances wait for each other, and the key that sets them. Until they have met
        it is as long as the start of an instance may take: the other side is started by hand, or loads a model. It is
        never less than the `loading_s` that an instance needs to load the model."""
        if loading_s > max(self.wait_s, 0.0 if met else self.timeout_s):
            return loading_s, "the time to load the model"
        if met or self.wait_s > self.timeout_s:
            return self.wait_s, "rollout.wait_s"
        return self.timeout_s, "rollout.timeout_s"


class Queue(Table):
    """Where the columns of a step's rows lie until the rows are trained."""

    store: Literal["orchestrator", "transferqueue"] = "orchestrator"
    """"orchestrator": in the orchestrator's memory. "transferqueue": in the storage units of TransferQueue, AsyncFlow's
    library (`pip install metronome[transferqueue]`): processes on the orchestrator's machine, or on the nodes of a Ray
    cluster (docs/rollouts.md). It needs unauthenticated = true."""
    address: Annotated[str, only_with("queue.store", "transferqueue")] = ""
    """Address "host:port" of a running Ray cluster, on each of whose nodes a storage unit starts (with cluster.engine =
    "ray": on each of the run's nodes); "auto": that of the orchestrator's machine. The orchestrator's machine must be
    one of its nodes. Empty: Metronome starts Ray on loopback on the orchestrator's machine."""
    unauthenticated: Annotated[bool, only_with("queue.store", "transferqueue")] = False
    """Allow a store without passwords: with "transferqueue" every user of the orchestrator's machine can read and
    change the groups, and run code as the user of the run. With an address, so can whoever reaches the cluster's nodes
    over the network, and code runs as the user of Ray there."""


class Weights(Table):
    """How new weights get from the trainer to the instances."""

    transport: Literal["file", "gloo", "nccl", "hccl"] = "file"
    """How the weights travel. "file": as safetensors in shared memory or a shared folder. "gloo" (from host memory),
    "nccl" (between CUDA devices) and "hccl" (between NPUs): over the network, by this backend of torch.distributed."""
    staged: bool = False
    """Send the weights to the instances' host memory in the background, and swap them in at the step's boundary
    (AsyncFlow §4.2.3). With "nccl" and "hccl" it needs `rollout.tensor` = 1."""
    interface: Annotated[str, only_with("weights.transport", "gloo", "nccl", "hccl")] = ""
    """Network interface of a trainer's node, "eth0" for example, through which instances on other machines reach the
    sender of the weights ("gloo", "nccl", "hccl"). Empty: the address of the host's name or, if that is loopback, the
    address from which the node reaches `parallel.rendezvous` or listens for instances (`rollout.listen`)."""
    bucket_mb: int = Field(default=0, ge=0)
    """Size in MiB of one bucket, the piece of the weights that is gathered and sent at a time. Up to three buckets are
    in the trainer's memory at once, and two in an instance's, in addition to the model. 0: 1024 between devices ("nccl"
    and "hccl"), else 256."""
    check_tokens: int = Field(default=16, ge=0)
    """Number of tokens of the run's prompts whose log-probabilities trainer and instances compare after each sync; 0
    and 1 switch the comparison off. On a CPU each costs both sides as much as a generated token. With bfloat16, where
    the mean difference is compared, 32 or more are advisable."""

    @property
    def bucket_bytes(self) -> int:
        """Size of one bucket in bytes. Between devices the messages of a small bucket take longer than its transfer."""
        return (self.bucket_mb or (1024 if self.transport in ("nccl", "hccl") else 256)) * 2**20
