"""Keys that a recipe sets, and that nothing reads because of another key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from engine.config import Config
from engine.config.keys import flatten_keys
from engine.config.rules import ratio_is_one

UNCLIPPED = ("gpg", "m2po", "bapo")
"""Built-in losses that do not read clip_low and clip_high."""
_DEFAULTS = flatten_keys(Config().model_dump())


def without_effect(config: Config) -> Iterator[str]:
    """A sentence for each key that is not at its default and has no effect."""
    values = flatten_keys(config.model_dump())
    for keys, reason in _reasons(config):
        for key in keys:
            if values[key] != _DEFAULTS[key]:
                yield f"{key} = {_shown(values[key])} has no effect: {reason}"


def _reasons(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys that nothing reads, with the reason."""
    algorithm = config.algorithm
    clip = ("algorithm.clip_low", "algorithm.clip_high")
    if algorithm.loss in UNCLIPPED:
        yield clip, f'algorithm.loss = "{algorithm.loss}" does not clip the ratio this way'
    elif ratio_is_one(config) and ":" not in algorithm.loss:
        yield (
            (*clip, "algorithm.dual_clip"),
            'every ratio is 1, since algorithm.old_policy = "behavior" and train.updates = 1 (docs/modes.md, Which '
            "gradient)",
        )
    if not algorithm.kl_coef:
        yield ("algorithm.kl_estimator",), "algorithm.kl_coef = 0, so no KL term is computed"
    if algorithm.gradient_control != "gac" and ":" not in algorithm.gradient_control:
        yield (
            ("algorithm.gac_low", "algorithm.gac_high", "algorithm.gac_skips"),
            f'algorithm.gradient_control = "{algorithm.gradient_control}", and only "gac" reads it',
        )
    if config.cluster.engine != "ray":
        engine = config.cluster.engine
        keys = ("cluster.address", "cluster.wait_s", "cluster.least_nodes", "cluster.most_instances")
        yield keys, f'cluster.engine = "{engine}", and only "ray" reads it'
    if config.queue.store == "orchestrator":
        yield (
            ("queue.address", "queue.unauthenticated"),
            'queue.store = "orchestrator", and only "transferqueue" reads it',
        )
    if not 0 < math.lcm(config.checkpoint.every, config.evaluate.every) < config.train.steps - 1:
        yield (
            ("checkpoint.keep_best",),
            "no checkpoint would be evaluated; set evaluate.every and checkpoint.every so that one divides the other, "
            "both below train.steps - 1",
        )
    if not algorithm.overlong_buffer:
        yield ("algorithm.overlong_penalty",), "algorithm.overlong_buffer = 0, so no response is penalised"


def _shown(value: Any) -> str:  # noqa: ANN401
    return f'"{value}"' if isinstance(value, str) else str(value)
