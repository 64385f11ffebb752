"""One typed tree for a run, read from TOML. Every field says its unit and why its default is what it is.

`engine.config.recipe.load(recipe, overrides)` is the only way in; it turns every mistake into one `BadInput` that names
file, key and remedy.
"""

from __future__ import annotations

from pydantic import model_validator

from engine.config.inputs import Data, DryRun, Model, Reward, Run
from engine.config.results import Evaluate, Tracking
from engine.config.rollouts import Rollout, Weights
from engine.config.rules import BATCH_SCOPE, BATCH_SCOPE_LOSSES, RULES
from engine.config.training import Algorithm, Attention, Bapo, Checkpoint, M2po, Parallel, Platform, Train
from engine.config.tree import WINDOW_PER_STAGE, Tree

__all__ = [
    "BATCH_SCOPE",
    "BATCH_SCOPE_LOSSES",
    "WINDOW_PER_STAGE",
    "Algorithm",
    "Attention",
    "Bapo",
    "Checkpoint",
    "Config",
    "Data",
    "DryRun",
    "Evaluate",
    "M2po",
    "Model",
    "Parallel",
    "Platform",
    "Reward",
    "Rollout",
    "Run",
    "Tracking",
    "Train",
    "Weights",
]


class Config(Tree):
    """A whole run."""

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        for rule in RULES:
            rule(self)
        return self
