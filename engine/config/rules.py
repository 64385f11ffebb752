"""The rules between keys of a run. Each rule raises ValueError with the keys and what would be right.

`check_stages` has those of [stages.NAME]: names, the keys of each kind of stage, and the columns that stages give each
other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter

from engine.config.stages import OWN_COLUMNS, OWN_STAGES, REFERENCE_COLUMN, REFERENCE_STAGE, ROUTES_COLUMN, Stage
from engine.config.tree import Tree, foreign_cores
from engine.errors import has_password, without_password

INSTEAD = {
    "tracking.uri": "set MLflow's user and password in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a "
    "whole URI (for example of a database) in MLFLOW_TRACKING_URI",
}
"""What to use instead, by key."""
ELSEWHERE = "set keys in the environment, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in ~/.aws"


def check_no_password(config: Tree) -> None:
    """Raise ValueError that names the first key with a password in its address, and what to use instead."""
    for key, text in _addresses(config):
        if has_password(text):
            raise ValueError(
                f"{key} = {without_password(text)!r} (shown without its password): a recipe is written to the run "
                f"folder, to MLflow and to checkpoints, so it must not contain one; {INSTEAD.get(key, ELSEWHERE)}"
            )


def _addresses(config: Tree) -> Iterator[tuple[str, str]]:
    yield "tracking.uri", config.tracking.uri
    yield "checkpoint.path", config.checkpoint.path
    yield "model.path", config.model.path
    for one in config.data.sets:
        yield "data.train", one.path
    yield "data.heldout", config.data.heldout
    for path in config.data.decontaminate:
        yield "data.decontaminate", path
    for path in config.evaluate.benchmarks:
        yield "evaluate.benchmark", path
    yield "evaluate.folder", config.evaluate.folder


ONLY_PROGRAMS = ("gives", "reward_weight")
"""Keys that only a program's stage has."""
ONLY_REFERENCE = ("tensor", "pipeline", "context", "data", "devices", "restarts")
"""Keys that only the reference's stage has."""
SMALL_NAME = re.compile("[a-z][a-z0-9_]*")
"""Form of the names of stages and columns."""


def check_stages(config: Tree) -> None:
    """Raise ValueError for the first mistake in the names, keys and columns of the stages."""
    for name, stage in config.stages.items():
        if not SMALL_NAME.fullmatch(name):
            raise ValueError(
                f"[stages.{name}]: a stage name is a lowercase letter followed by lowercase letters, digits and "
                "underscores"
            )
        if name in OWN_STAGES:
            raise ValueError(
                f"[stages.{name}]: every run has a stage of this name ({', '.join(OWN_STAGES)}): choose another name"
            )
        if name == REFERENCE_STAGE:
            _check_reference_stage(config, stage)
        else:
            _check_program_stage(name, stage)
    _check_columns(config)


def _check_reference_stage(config: Tree, stage: Stage) -> None:
    if not config.algorithm.kl_coef:
        raise ValueError(
            "[stages.reference] computes the reference's log-probabilities for the KL term, and algorithm.kl_coef = 0 "
            "means there is none: set algorithm.kl_coef above 0, or remove the stage"
        )
    for key in (*ONLY_PROGRAMS, "needs"):
        if _is_set(stage, key):
            raise ValueError(
                f"stages.reference.{key} can't be changed: the reference needs prompt and responses, gives "
                f"{REFERENCE_COLUMN}, and has no reward. Remove the key, or choose another name for the stage of a "
                "program"
            )


def _check_program_stage(name: str, stage: Stage) -> None:
    for key in ONLY_REFERENCE:
        if _is_set(stage, key):
            raise ValueError(
                f"stages.{name}.{key} only applies to [stages.reference]; whoever starts your program decides how "
                "many processes it has, and where. Remove the key"
            )
    for key, example in (("needs", "responses"), ("gives", name)):
        if not getattr(stage, key):
            raise ValueError(f'stages.{name}.{key} must name at least one column, for example {key} = ["{example}"]')
    for column in stage.gives:
        if not SMALL_NAME.fullmatch(column):
            raise ValueError(
                f"stages.{name}.gives: {column!r}: a column name is a lowercase letter followed by lowercase letters, "
                "digits and underscores"
            )
        if column in (*OWN_COLUMNS, REFERENCE_COLUMN, ROUTES_COLUMN):
            raise ValueError(
                f"stages.{name}.gives: {column} is a column of Metronome's own stages: choose another name"
            )
    if stage.reward_weight and len(stage.gives) > 1:
        raise ValueError(
            f"stages.{name}.reward_weight needs exactly one column, and stages.{name}.gives has {len(stage.gives)}: "
            "split the stage in two"
        )


def _is_set(stage: Stage, key: str) -> bool:
    """Whether a key is not at its default."""
    return bool(getattr(stage, key) != getattr(Stage(), key))


def _check_columns(config: Tree) -> None:
    """Raise ValueError unless one stage gives each column, and no stages wait for each other."""
    giver = {REFERENCE_COLUMN: REFERENCE_STAGE} if config.reference_stage else {}
    for name, stage in config.stages.items():
        for column in stage.gives:
            if column in giver:
                raise ValueError(
                    f"the column {column} is given twice, by stages.{giver[column]} and stages.{name}: rename one of "
                    "them"
                )
            giver[column] = name
    known = (*OWN_COLUMNS, *giver, *([ROUTES_COLUMN] if config.algorithm.routing_replay else []))
    for name, stage in config.stages.items():
        if unknown := [column for column in stage.needs if column not in known]:
            raise ValueError(
                f"stages.{name}.needs: no stage gives {', '.join(unknown)}; there are {', '.join(known)}"
                + (" (reference_logprobs needs a table [stages.reference])" if REFERENCE_COLUMN in unknown else "")
            )
    waits = {name: [giver[one] for one in stage.needs if one in giver] for name, stage in config.stages.items()}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        circle = " → ".join(reversed(error.args[1]))
        raise ValueError(
            f"[stages] wait for each other in a cycle: {circle} (each needs a column that the next gives). Remove one "
            "of these columns from needs"
        ) from None


BF16_GAP = 0.2
"""Smallest limit on max |ratio − 1| that does not fail sound bf16 runs: bf16 moves a token's log-probability by up to
0.15."""


def _check_groups(config: Tree) -> None:
    rollout = config.rollout
    advantage = config.algorithm.advantage
    if rollout.group_size < 2 and advantage != "reinforce_plus_plus":
        raise ValueError(
            f'rollout.group_size must be at least 2 for algorithm.advantage = "{advantage}": '
            "a group of one has nothing to compare with"
        )
    if advantage == "gpg" and (config.algorithm.kl_coef or config.algorithm.entropy_coef):
        raise ValueError(
            'algorithm.advantage = "gpg" scales the whole gradient at the step\'s end, KL and entropy terms too: '
            "set algorithm.kl_coef and entropy_coef to 0"
        )
    if config.algorithm.overlong_buffer > rollout.max_new_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer ({config.algorithm.overlong_buffer}) must be at most rollout.max_new_tokens "
            f"({rollout.max_new_tokens})"
        )
    if rollout.max_new_tokens >= rollout.max_context:
        raise ValueError(
            f"rollout.max_new_tokens ({rollout.max_new_tokens}) must be below "
            f"rollout.max_context ({rollout.max_context}) to leave room for a prompt"
        )


def _check_cores(config: Tree) -> None:
    # with "auto" only the start of the instances tells whether vLLM's devices are cores
    on_cores = config.rollout.engine == "embedded" or config.platform.device == "cpu"
    scoring = config.reference_stage.devices if config.reference_stage is not None else []
    if missing := foreign_cores("train.devices", config.train.devices) or (
        on_cores
        and (
            foreign_cores("rollout.devices", config.rollout.devices)
            or foreign_cores("stages.reference.devices", scoring)
        )
    ):
        raise ValueError(missing)
    for key, cores, sharers, count in (
        ("rollout.devices", config.rollout.devices, "instances", config.rollout.instances),
        ("train.devices", config.train.devices, "trainer ranks", config.parallel.ranks),
        ("stages.reference.devices", scoring, "ranks", config.scorer_ranks),
    ):
        if cores and (not count or len(cores) % count):
            raise ValueError(f"{key} names {len(cores)} cores or devices, which {count} {sharers} can't share evenly")


def _check_precision(config: Tree) -> None:
    limit = config.train.ratio_gap_limit
    for key, dtype in (("train.dtype", config.train.dtype), ("model.dtype", config.model.dtype)):
        if dtype == "bfloat16" and 0 < limit < BF16_GAP:
            also = ""
            if config.model.dtype == "float32":
                also = '; also set model.dtype = "bfloat16", so that both sides round alike'
            elif config.train.dtype == "float32":
                also = '; also set train.dtype = "bfloat16", so that both sides round alike'
            raise ValueError(
                f'{key} = "bfloat16" changes log-probabilities of tokens by more than train.ratio_gap_limit = '
                f"{limit:g}; set train.ratio_gap_limit = 0 (the gap is only reported) or at least {BF16_GAP:g}{also}"
            )

    if config.train.router_dtype == "bfloat16" and config.train.dtype != "bfloat16":
        raise ValueError(
            'train.router_dtype = "bfloat16" needs train.dtype = "bfloat16": routers compute in the type of the model, '
            "or in float32"
        )


def _check_updates(config: Tree) -> None:
    updates = config.train.updates
    if config.train.prompts_per_step % updates:
        raise ValueError(
            f"train.updates ({updates}) must divide train.prompts_per_step ({config.train.prompts_per_step}): each "
            "update trains equally many groups"
        )
    if updates > 1 and config.algorithm.old_policy == "previous":
        raise ValueError(
            'algorithm.old_policy = "previous" is the policy one update ago, and train.updates = '
            f'{updates} makes several in a step: set it to "behavior" (the weights at the step\'s start, which is '
            'verl\'s recomputed old policy) or to "rollout"'
        )


def _check_learning_rate(config: Tree) -> None:
    low = config.train.min_learning_rate
    if low > config.train.learning_rate:
        raise ValueError(
            f"train.min_learning_rate ({low:g}) must be at most train.learning_rate ({config.train.learning_rate:g})"
        )


def _check_warmup(config: Tree) -> None:
    train = config.train
    updates = train.steps * train.updates
    falls = train.schedule != "constant"
    if train.warmup_steps and train.warmup_steps >= updates + (not falls):
        raise ValueError(
            f"train.warmup_steps ({train.warmup_steps}) must be {'below' if falls else 'at most'} train.steps x "
            f'train.updates ({updates}): the learning rate of schedule "{train.schedule}" would '
            + ("never fall" if falls else "never reach its peak")
        )


def _check_profile(config: Tree) -> None:
    chosen = config.train.profile
    steps = config.train.steps
    if chosen and not (len(chosen) == 2 and chosen[0] <= chosen[1] < steps):
        raise ValueError(
            f"train.profile = {chosen}: expected the first and the last step to profile, of 0 to {steps - 1} "
            "(train.steps - 1), or []"
        )


def _check_dynamic_sampling(config: Tree) -> None:
    if config.algorithm.dynamic_sampling and config.rollout.group_size < 2:
        raise ValueError(
            "algorithm.dynamic_sampling needs a rollout.group_size of at least 2: the scores of a group of one are "
            "all equal"
        )
    if config.algorithm.dynamic_sampling and config.reward_weights:
        weighted = [f"stages.{name}.reward_weight" for name, stage in config.stages.items() if stage.reward_weight]
        raise ValueError(
            f"algorithm.dynamic_sampling can't be combined with {', '.join(weighted)}: it selects groups by the "
            "scores of reward.function alone, before a stage has added to the reward. Set the weight to 0, or score "
            "in reward.function"
        )


def _check_template(config: Tree) -> None:
    template = config.data.prompt_template
    if not (template == "chat" or "{problem}" in template or (config.rollout.program and template)):
        raise ValueError('data.prompt_template must contain "{problem}" or be "chat"')


def _check_partial(config: Tree) -> None:
    mode = config.train.mode
    if config.rollout.partial and config.rollout.program:
        raise ValueError(
            "rollout.partial can't be combined with rollout.program: a turn under way ends under the weights that it "
            "began with. Remove one of the two keys"
        )
    if config.rollout.partial and mode in ("sync", "periodic"):
        raise ValueError(
            f"rollout.partial continues responses under newer weights than they began with, which train.mode = "
            f'"{mode}" forbids: every token of a step has the step\'s own version there. It needs '
            '"one_step_off" or "bounded"'
        )
    if config.rollout.partial and config.train.exact_lag:
        raise ValueError(
            "rollout.partial can't be combined with train.exact_lag: with exact_lag weights wait until all responses "
            "are generated, so none is ever cut"
        )


BATCH_SCOPE = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Names of the advantages whose statistics are over the whole batch. Its groups are held back until the last is there
(engine.orchestrator.batches), in every mode but "periodic"."""
BATCH_SCOPE_LOSSES = ("m2po", "bapo")
"""Names of the losses whose statistics are over the whole batch. The trainer holds all windows of a step until the
statistics are known, so off-policy modes can use these losses, too."""


def _check_scope(config: Tree) -> None:
    if config.train.mode != "periodic":
        return
    for key, value, whole in (
        ("advantage", config.algorithm.advantage, BATCH_SCOPE),
        ("loss", config.algorithm.loss, BATCH_SCOPE_LOSSES),
    ):
        if value in whole:
            raise ValueError(
                f'algorithm.{key} = "{value}" takes its statistics over the whole batch, so no group can be trained '
                'before the last one has arrived: it needs train.mode = "sync", "one_step_off" or "bounded", not '
                '"periodic"'
            )


def _check_staleness(config: Tree) -> None:
    train = config.train
    if train.mode != "bounded" and (train.exact_lag or train.max_staleness > 1):
        raise ValueError(
            f'train.max_staleness and train.exact_lag belong to train.mode = "bounded", not "{train.mode}"'
        )


def _largest_staleness(config: Tree) -> int:
    """Largest number of steps between the weights that sample a response and those that it trains."""
    return {"sync": 0, "periodic": 0, "one_step_off": 1}.get(config.train.mode, config.train.max_staleness)


def _check_ratio(config: Tree) -> None:
    loss = config.algorithm.loss
    if loss not in BATCH_SCOPE_LOSSES:
        return
    if config.ratio_is_one:
        raise ValueError(
            f'algorithm.loss = "{loss}" acts on ratios other than 1, and algorithm.old_policy = "behavior" makes every '
            'ratio of a batch\'s only update 1: it needs algorithm.old_policy = "rollout" (or "previous" with a '
            "staleness of at most one update), or train.updates above 1"
        )
    staleness = _largest_staleness(config)
    if config.algorithm.old_policy == "previous" and staleness > 1:
        raise ValueError(
            f'algorithm.loss = "{loss}" needs the ratio to the weights that sampled. With a staleness of up to '
            f'{staleness} updates algorithm.old_policy = "previous" is not that: it needs algorithm.old_policy = '
            '"rollout"'
        )


DUAL_CLIP_LOSSES = ("grpo", "dapo", "dr_grpo")
"""Names of the losses that read algorithm.dual_clip. A loss of one's own may read it, too."""


def _check_dual_clip(config: Tree) -> None:
    bound = config.algorithm.dual_clip
    if bound and bound <= 1:
        raise ValueError(
            f"algorithm.dual_clip = {bound:g} must be above 1 (verl's default is 3), or 0 for no bound: it bounds "
            "ratios that have grown"
        )
    if bound and config.algorithm.loss not in DUAL_CLIP_LOSSES and ":" not in config.algorithm.loss:
        raise ValueError(
            f'algorithm.dual_clip is not read by algorithm.loss = "{config.algorithm.loss}": set it to 0, or use one '
            f"of {', '.join(DUAL_CLIP_LOSSES)}"
        )


def _check_mismatch(config: Tree) -> None:
    algorithm = config.algorithm
    if algorithm.mismatch != "none":
        key = f'algorithm.mismatch = "{algorithm.mismatch}"'
    elif algorithm.mismatch_reject != "none":
        key = f'algorithm.mismatch_reject = "{algorithm.mismatch_reject}"'
    else:
        return
    if algorithm.old_policy == "rollout" and algorithm.mismatch != "none":
        raise ValueError(
            f'{key} can\'t be combined with algorithm.old_policy = "rollout": its ratio already divides by the '
            "engine's probabilities, and the same correction would count twice"
        )
    if algorithm.old_policy == "previous" and _largest_staleness(config) > 1:
        raise ValueError(
            f'{key} with algorithm.old_policy = "previous" needs a staleness of at most one update, since the weights '
            'before the last update sampled nothing older. algorithm.old_policy = "behavior" (the decoupled loss) and, '
            'without algorithm.mismatch, "rollout" go with any staleness'
        )


def _check_thresholds(config: Tree) -> None:
    low = config.algorithm.gac_low
    high = config.algorithm.gac_high
    mode = config.train.mode
    controlled = config.algorithm.gradient_control == "gac"
    if "auto" in (low, high) and controlled and mode not in ("sync", "periodic"):
        raise ValueError(
            f'algorithm.gac_low and gac_high = "auto" are taken from a run\'s first on-policy steps, and '
            f'train.mode = "{mode}" has none: give numbers, for example those of a short run with train.mode = '
            '"sync" and algorithm.gradient_control = "measure"'
        )
    if isinstance(low, float) and isinstance(high, float) and low >= high:
        raise ValueError(f"algorithm.gac_low ({low:g}) must be below algorithm.gac_high ({high:g})")


def _check_embedded_engine(config: Tree) -> None:
    if config.rollout.engine != "embedded":
        return
    for key, value, allowed in (
        ("rollout.tensor", config.rollout.tensor, (1,)),
        ("rollout.vllm", config.rollout.vllm, ({},)),
        ("rollout.share_devices", config.rollout.share_devices, (False,)),
        ("weights.transport", config.weights.transport, ("file", "gloo")),
        ("algorithm.routing_replay", config.algorithm.routing_replay, (False,)),
    ):
        if value not in allowed:
            raise ValueError(
                f'{key} = {value!r} needs rollout.engine = "vllm"; the embedded engine takes '
                f"{' or '.join(map(repr, allowed))}"
            )


def _check_vllm(config: Tree) -> None:
    if config.rollout.engine != "vllm":
        return
    if config.rollout.deterministic and config.weights.transport == "nccl":
        raise ValueError(
            'rollout.deterministic with rollout.engine = "vllm" can\'t be combined with weights.transport = '
            '"nccl": batch-invariant vLLM sets NCCL variables that the trainer does not have, so the trainer\'s end '
            'of the communicator would hang; use "gloo" or "file"'
        )
    if config.rollout.share_devices and config.platform.device == "npu":
        raise ValueError("rollout.share_devices: NPUs can't be shared; give instances devices of their own")
    if config.rollout.share_devices and "gpu_memory_utilization" not in config.rollout.vllm:
        raise ValueError(
            "rollout.share_devices needs rollout.vllm.gpu_memory_utilization, the share of a device's memory that vLLM "
            "may take (0.4, say): vLLM's own default leaves the trainer almost none"
        )
    if config.weights.staged and config.weights.transport in ("nccl", "hccl") and config.rollout.tensor > 1:
        raise ValueError(
            f"weights.staged with weights.transport = {config.weights.transport!r} needs rollout.tensor = 1, but it is "
            f"{config.rollout.tensor}: on a device the broadcast and the instance's own collectives could wait for "
            'each other; use "gloo" or "file"'
        )


def _check_cluster(config: Tree) -> None:
    least = config.cluster.least_nodes
    if config.cluster.engine == "ray" and least > config.parallel.nodes:
        raise ValueError(f"cluster.least_nodes ({least}) is more than parallel.nodes ({config.parallel.nodes})")
    instances = config.rollout.instances + config.dry_run.joining
    most = config.cluster.most_instances
    if config.cluster.engine == "ray" and most and not 0 < instances <= most:
        raise ValueError(
            f"cluster.most_instances ({most}): the run starts with {instances} instances (rollout.instances and "
            "dry_run.joining); these must be at least 1, and at most most_instances"
        )


def _check_store(config: Tree) -> None:
    if config.queue.store == "orchestrator":
        return
    key = f'queue.store = "{config.queue.store}"'
    if not config.queue.unauthenticated:
        who = (
            "anyone who can reach the Ray cluster's nodes"
            if config.queue.address
            else "every user of the orchestrator's machine"
        )
        raise ValueError(
            f"{key} has no passwords: {who} can read and change the groups, and run code as the user of the storage "
            "units. To allow that, set queue.unauthenticated = true"
        )


RULES: tuple[Callable[[Tree], None], ...] = (
    _check_groups, check_stages, _check_cores, _check_precision, _check_updates, _check_warmup, _check_profile,
    _check_learning_rate, _check_scope, _check_staleness, _check_dynamic_sampling, _check_partial,
    _check_ratio, _check_template,
    _check_dual_clip, _check_mismatch, _check_thresholds, _check_embedded_engine, _check_vllm, _check_cluster,
    _check_store,
    check_no_password,
)  # fmt: skip
"""All rules, in the order in which they are checked; the first that does not hold is reported."""
