"""The configuration of a run: one typed tree, read from TOML. Each field says what its value is and its unit.

`engine.config.recipe.load_config(recipe, overrides)` reads it and turns every mistake into one `BadInput` that names
file, key and remedy.
"""

from __future__ import annotations

from pydantic import model_validator

from engine.config.inputs import Data, DryRun, Model, OnFault, Reward, Run
from engine.config.results import Evaluate, Tracking
from engine.config.rollouts import Queue, Rollout, Weights
from engine.config.rules import BATCH_SCOPE, BATCH_SCOPE_LOSSES, RULES
from engine.config.stages import Stage
from engine.config.training import Algorithm, Attention, Bapo, Checkpoint, Cluster, M2po, Parallel, Platform, Train
from engine.config.tree import WINDOW_PER_STAGE, WINDOWS_TOGETHER, Tree

__all__ = [
    "BATCH_SCOPE",
    "BATCH_SCOPE_LOSSES",
    "WINDOWS_TOGETHER",
    "WINDOW_PER_STAGE",
    "Algorithm",
    "Attention",
    "Bapo",
    "Checkpoint",
    "Cluster",
    "Config",
    "Data",
    "DryRun",
    "Evaluate",
    "M2po",
    "Model",
    "OnFault",
    "Parallel",
    "Platform",
    "Queue",
    "Reward",
    "Rollout",
    "Run",
    "Stage",
    "Tracking",
    "Train",
    "Weights",
]


class Config(Tree):
    """The configuration of a whole run, in which all rules between keys hold."""

    @model_validator(mode="after")
    def _check_rules(self) -> Config:
        for rule in RULES:
            rule(self)
        return self
