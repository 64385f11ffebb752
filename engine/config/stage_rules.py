"""The rules of [stages.NAME]: names, the keys of each kind of stage, and the columns that stages give each other."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter

from engine.config.stages import OWN_COLUMNS, OWN_STAGES, REFERENCE_COLUMN, REFERENCE_STAGE, ROUTES_COLUMN, Stage
from engine.config.tree import Tree

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
                f"[stages.{name}]: the name of a stage is a small letter, then small letters, digits and underscores"
            )
        if name in OWN_STAGES:
            raise ValueError(
                f"[stages.{name}]: every run has a stage of this name ({', '.join(OWN_STAGES)}): take another"
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
            "has none: set algorithm.kl_coef above 0, or leave the stage out"
        )
    for key in (*ONLY_PROGRAMS, "needs"):
        if _is_set(stage, key):
            raise ValueError(
                f"stages.reference.{key} can't be changed: the reference needs prompt and responses, gives "
                f"{REFERENCE_COLUMN}, and has no reward. Leave the key out, or give a program's stage another name"
            )


def _check_program_stage(name: str, stage: Stage) -> None:
    for key in ONLY_REFERENCE:
        if _is_set(stage, key):
            raise ValueError(
                f"stages.{name}.{key} is read for [stages.reference] only; how many processes a program of yours has, "
                "and where, is up to whoever starts it. Leave the key out"
            )
    for key, example in (("needs", "responses"), ("gives", name)):
        if not getattr(stage, key):
            raise ValueError(f'stages.{name}.{key} must name at least one column, for example {key} = ["{example}"]')
    for column in stage.gives:
        if not SMALL_NAME.fullmatch(column):
            raise ValueError(
                f"stages.{name}.gives: {column!r}: the name of a column is a small letter, then small letters, digits "
                "and underscores"
            )
        if column in (*OWN_COLUMNS, REFERENCE_COLUMN, ROUTES_COLUMN):
            raise ValueError(f"stages.{name}.gives: {column} is a column of Metronome's own stages: take another name")
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
                    f"the column {column} is given twice, by stages.{giver[column]} and stages.{name}: take another "
                    "name for one"
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
            f"[stages] wait for each other in a circle: {circle} (each needs a column that the next gives). Take one "
            "of these columns out of needs"
        ) from None
