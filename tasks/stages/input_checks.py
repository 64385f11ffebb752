"""Quick checks of all inputs of a run before anything slow starts, and the base model as a folder."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

from engine.config import Config, Model
from engine.config.no_effect import without_effect
from engine.config.recipe import HOME, check_made, find_file
from engine.data.named_models import fetch_named, is_named_model
from engine.data.prepared import Prepared, prepare_problems
from engine.data.problems import Problems
from engine.data.prompts import count_typed_tokens, encode_problems, keys_without_effect
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput
from engine.evaluation.benchmarks import read_benchmarks, with_evaluation_context
from engine.model.shape import end_of_sequence_ids, read_shape
from engine.orchestrator.checks import check_instances, check_rollouts, check_training, check_vllm
from engine.orchestrator.server import check_addresses, listen_address
from engine.orchestrator.workers.verifier_pool import VerifierPool
from engine.run.checkpoint_store import place_of
from engine.run.folder import RunFolder
from engine.run.identity import check_unclaimed, published_checkpoints
from engine.run.limits import check_memory
from engine.run.lock import check_not_held
from engine.run.memory import is_on_cpu
from engine.run.progress import folder_size, format_size
from engine.run.s3 import SCHEME
from engine.tools.dry_run import describe_duration
from engine.types import Prompt
from tasks.cluster.ray.placement import check_cluster
from tasks.stages.reward_trial import score_first_problem
from tasks.terminal.console import say
from tasks.terminal.progress_display import show_progress, since_now

_tried: set[str] = set()
"""The rewards that were called, with their problem."""


def check_run_folder(config: Config, resume: bool = False) -> None:
    """Check that a new run has a new folder and a new place in `checkpoint.path`, that a resumed run has a folder or
    checkpoints there, and that no process holds the folder.

    Raises BadInput if not, and CheckpointError if `checkpoint.path` cannot be read. Writes nothing.
    """
    folder = RunFolder(config.folder)
    _check_writable("run.output", config.run.output, config.run.output)
    _check_checkpoint_path(config.checkpoint.path)
    with show_progress("check", since_now(f"looking for checkpoints in {place_of(config)}")):
        _check_places(config, folder, resume)
    check_not_held(folder.lock, f"run folder {folder.path}")


def check_address(config: Config) -> None:
    """Raise BadInput unless the run's orchestrator can listen on its addresses. Do not call this for a restarted flow:
    its previous orchestrator may still hold them. On a Ray cluster they are chosen later; here it is asked whether it
    can have the run's instances (`check_cluster`)."""
    if config.cluster.engine != "ray":
        check_addresses(config)
        return
    with show_progress("check", since_now("asking the Ray cluster")):
        check_cluster(config.cluster, config.platform.device, config.rollout.engine)


def check_machine(config: Config) -> None:
    """Raise BadInput if this machine, on which the run is to be, lacks vLLM or an address that it listens on."""
    if config.cluster.engine != "ray":
        check_vllm(config)
        check_addresses(config, free=False)


def _check_places(config: Config, folder: RunFolder, resume: bool) -> None:
    if resume and not folder.config.exists() and not published_checkpoints(config):
        lost = (
            f", and {place_of(config)} (checkpoint.path) holds no complete checkpoint" if config.checkpoint.path else ""
        )
        raise BadInput(
            f"--resume: {folder.path} is not a run folder{lost}; name the run to continue by --set run.name=NAME"
        )
    if folder.config.exists() and not resume:
        raise BadInput(
            f"run folder {folder.path} already exists; give another --set run.name=NAME, or continue that run with "
            "--resume"
        )
    if not resume:
        check_unclaimed(config)


def check_inputs(
    config: Config, training: bool = True, sampling: bool = True, evaluates: bool = False
) -> tuple[Config, Prepared | None]:
    """Read the problems, load the reward, read the model's configuration, encode the prompts. Return the config with a
    model of the hub or S3 downloaded (`with_local_model`), and the problem sets of a training. Raises BadInput at the
    first failure.

    Without `training` (an evaluation) the trainer's layout is not checked. Without `sampling` (a replay) the run's own
    instances are not checked. `evaluates`: an evaluation starts an instance on this machine, also where
    rollout.instances = 0.
    """
    if config.run.dry:  # commands that allow run.dry do not call this
        raise BadInput(
            "run.dry only prints the plan of a recipe: `metronome run RECIPE --set run.dry=true`, or evaluate; set "
            "it to false here"
        )
    if training and sampling:
        if config.cluster.engine != "ray":
            listen_address(config.rollout.listen)
        check_instances(config)
    if evaluates and config.cluster.engine != "ray":
        check_vllm(config)
    with show_progress("check", since_now("reading the problem sets")):
        prepared = prepare_problems(config) if training else None
        benchmarks = read_benchmarks(config)
    problems = prepared.train if prepared is not None else None
    if problems is not None:
        _check_prompts(config, len(problems.rows))
    for benchmark in benchmarks:
        for note in benchmark.notes:
            _warn(note, "benchmark")
    _check_checkpoint_path(config.checkpoint.path)
    check_reward(config)
    if config.rollout.top_p < 1 or config.rollout.top_k:
        _warn(
            "rollout.top_p or rollout.top_k restricts sampling: responses no longer come from the distribution that "
            "is trained, whose log-probabilities trainer and instances compute",
        )
    if config.rollout.vllm.get("kv_cache_dtype", "auto") not in ("auto", config.model.dtype):
        _warn(
            f"rollout.vllm.kv_cache_dtype = {config.rollout.vllm['kv_cache_dtype']!r} rounds the instances' keys and "
            "values: responses do not come from the distribution that is trained; max_ratio_gap and mismatch_kl say "
            "how far",
        )
    if training and _clips_gpg(config):
        _warn(
            f'algorithm.advantage = "gpg" with algorithm.loss = "{config.algorithm.loss}" and algorithm.old_policy = '
            f'"{config.algorithm.old_policy}" is clipped; GPG has neither a ratio nor a clip: use algorithm.loss = '
            '"gpg"',
        )
    if training and config.algorithm.loss == "gspo" and not config.ratio_is_one and config.algorithm.clip_low > 0.01:
        _warn(
            f"algorithm.clip_low = {config.algorithm.clip_low:g} is for ratios of tokens; the ratio of a response, "
            "which gspo clips, seldom leaves it: its paper has clip_low = 3e-4 and clip_high = 4e-4",
        )
    if training and config.train.updates > 1 and config.train.mode in ("sync", "periodic"):
        _warn(
            f"train.updates = {config.train.updates}: the updates of a step after its first are off-policy, since the "
            "batch was sampled with the weights before the first (docs/modes.md, Several updates per batch)",
        )
    for sentence in without_effect(config) if training else ():
        _warn(sentence)
    config = with_local_model(config)
    if training:
        check_training(config)
        _check_device(config)
        if sampling and is_on_cpu(config):
            _warn(describe_duration(read_shape(find_file(config.model.path)), config), "time")
    else:
        check_memory(config, check_rollouts(config), training=False)
    with show_progress("check", since_now("encoding the prompts")):
        tokenizer, prompt = _check_encoding(config, problems, [one.problems for one in benchmarks])
    if prompt is not None and sampling:
        _try_on_problem(config, tokenizer, prompt)
    return config, prepared


def _check_prompts(config: Config, problems: int) -> None:
    """Warn if a step needs more prompts than there are problems."""
    wanted = config.train.prompts_per_step
    if wanted > problems:
        _warn(
            f"train.prompts_per_step = {wanted} is more than the {problems} problems of data.train: each step trains "
            "problems more than once"
        )


def _check_device(config: Config) -> None:
    """Raise BadInput unless this machine has a device of kind `platform.device` for each of its trainer ranks."""
    if config.platform.device in ("cuda", "npu"):
        from engine import platform  # imports torch, which takes seconds

        platform.get_platform(config.platform.device).device(config.parallel.ranks_per_node - 1)


def _check_encoding(
    config: Config, problems: Problems | None, benchmarks: Sequence[Problems]
) -> tuple[Tokenizer, Prompt | None]:
    """Return the tokenizer, and the first prompt of `problems`.

    Raise BadInput if the model has no tokenizer, if `rollout.stop` names an unknown token, if no token ends a response
    of a training, or if no prompt of a problem set fits the model.
    """
    model = find_file(config.model.path)
    data = config.data
    tokenizer = Tokenizer(model, config.rollout.stop, data.prompt_template, data.chat_template_kwargs)
    if problems is not None and not tokenizer.stop_ids and not end_of_sequence_ids(model):
        raise BadInput(
            f"model.path {model}: nothing ends a response: the tokenizer has no end-of-sequence token (eos_token), and "
            "neither generation_config.json nor config.json has eos_token_id; add it there, or name a token in "
            "rollout.stop"
        )
    if difference := tokenizer.compare_transformers():
        _warn(f"model.path {model}: {difference}; Metronome uses tokenizer.json, other programs may not")
    _warn_of_template(config, tokenizer)
    evaluated = with_evaluation_context(config).rollout.max_context
    first: Prompt | None = None
    sets = [(each, evaluated) for each in benchmarks]
    if problems is not None:
        sets.insert(0, (problems, config.rollout.max_context))
    for each, context in sets:
        typed: Counter[str] = Counter()
        for part in sorted({row.part for row in each.rows}):
            rows = tuple(row for row in each.rows if row.part == part)
            prompts = encode_problems(replace(each, rows=rows), tokenizer, data, context).prompts
            first = first or (prompts[0] if each is problems else None)
            if lost := tokenizer.lost_tokens(prompt.text for prompt in prompts):
                raise BadInput(
                    f"model.path {model}: prompts have the special token {lost[0]!r}, which tokenizer_config.json or "
                    "added_tokens.json adds, but tokenizer.json does not have it: add it there, with its id"
                )
            typed += count_typed_tokens(rows, prompts, tokenizer, data)
        if typed:
            _warn(
                f"{each.source}: {typed.total():,} of {len(each.rows):,} problems contain special tokens of the model, "
                f"such as {typed.most_common(1)[0][0]!r}, which the model reads as such"
            )
    for key in keys_without_effect([row for each, _ in sets for row in each.rows], tokenizer, data) if sets else ():
        _warn(f"{key} changes no prompt: the chat template does not read it, or prompts have the same anyway")
    return tokenizer, first


def _try_on_problem(config: Config, tokenizer: Tokenizer, prompt: Prompt) -> None:
    """Call a reward of the user's on a problem, once per process, because it may cost something."""
    key = f"{config.reward.model_dump_json()} {config.rollout.group_size} {prompt.id}"
    if any(":" in one.function for one in config.reward.named) and key not in _tried:
        with show_progress("check", since_now("calling the reward")):
            line = score_first_problem(config, tokenizer, prompt)
        say("reward", line)
        _tried.add(key)


def _warn_of_template(config: Config, tokenizer: Tokenizer) -> None:
    """Warn if the tokenizer has a chat template and the prompts have no turns (the template of the quickstart's model
    is for clients of `metronome serve`), or if they have turns and nothing that is known to end one ends a response."""
    model = config.model.path
    after = tokenizer.after_a_turn
    ends = {*tokenizer.stop_ids, *end_of_sequence_ids(find_file(model))}
    given = tokenizer.chat_template
    if not tokenizer.has_turns and given and given != (HOME / Model().path / "chat_template.jinja").read_text():
        _warn(
            f"model.path {model}: its tokenizer has a chat template, which data.prompt_template = "
            f'{config.data.prompt_template!r} does not use; for an instruct model set data.prompt_template = "chat"'
        )
    if tokenizer.has_turns and not (ends.intersection(tokenizer.encode(after)) if after else config.rollout.stop):
        _warn(
            f"model.path {model}: of what its chat template writes after an answer, {after!r}, no token ends a "
            "response: name the end of a turn in rollout.stop, or responses go on behind it"
        )


@cache
def _warn(message: str, what: str = "warning") -> None:
    """Print a message once per process, because a command checks the inputs and then its flow checks them again."""
    say(what, message)


def _check_checkpoint_path(place: str) -> None:
    """Raise BadInput unless `checkpoint.path` is empty, on S3, or a folder that exists or can be created."""
    scheme, separator, rest = place.partition("://")
    if separator and scheme not in ("s3", "file"):
        raise BadInput(f"checkpoint.path = {place!r}: expected a folder or s3://bucket/folder")
    if place and not (separator and scheme == "s3"):
        _check_writable("checkpoint.path", place, rest if separator else place)


def _check_writable(key: str, value: str, path: str) -> None:
    """Raise BadInput unless the path is a folder that exists or can be created."""
    folder = Path(path).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir():
        raise BadInput(f"{key} = {value!r}: {there} is a file, expected a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"{key} = {value!r}: this user may not write to {there}")


def _clips_gpg(config: Config) -> bool:
    """Whether the advantage "gpg" is used with a loss that may clip: any built-in loss except "gpg", at ratios other
    than 1."""
    algorithm = config.algorithm
    own = algorithm.loss == "gpg" or ":" in algorithm.loss
    return algorithm.advantage == "gpg" and not config.ratio_is_one and not own


def check_reward(config: Config) -> None:
    """Load the reward and the rollout program, each in a worker process as a run does, so that their import can neither
    end nor hang this process. Raises BadInput if one can't be loaded."""

    async def load(program: str = "") -> None:
        reward = config.reward.model_copy(update={"workers": 1})
        async with VerifierPool(reward, program=program):
            pass

    asyncio.run(load())
    if config.rollout.program:
        asyncio.run(load(config.rollout.program))


def with_model_folder(config: Config) -> Config:
    """The config with `model.path` as an absolute folder. Raises BadInput if there is no model."""
    folder = find_file(with_local_model(config).model.path)
    read_shape(folder)
    model = config.model.model_copy(update={"path": str(folder.resolve())})
    return config.model_copy(update={"model": model})


def with_local_model(config: Config) -> Config:
    """The config with `model.path` as a folder of this machine if it is a name on the Hugging Face hub or S3, else
    unchanged. Raises BadInput like `fetch_named`."""
    model = config.model.model_copy(update={"path": local_model(config.model.path, config.run.output)})
    return config.model_copy(update={"model": model})


def local_model(path: str, output: str) -> str:
    """The folder in the cache if a path is the name of a model on the Hugging Face hub, or an address on S3; the folder
    of a registered model (`registered_folder`) in `output`; else the path. Shows a download and raises BadInput
    like `fetch_named`."""
    check_made(path)
    if path.startswith("models:/"):
        from tasks.tracking.registered_policies import registered_folder  # MLflow takes seconds to load

        return registered_folder(path, output)
    if not is_named_model(path):
        return path
    began = time.time()
    is_on_s3 = path.startswith(SCHEME)  # the hub's library shows a download by itself
    with show_progress("download", since_now(path)) if is_on_s3 else nullcontext():
        folder = fetch_named(path)
    if folder.stat().st_mtime >= began:
        say("download", f"{path}: {format_size(folder_size(folder))} in {folder}")
    return str(folder)
