"""The main job: prepare data → base model → convert → evaluate → train → publish → evaluate → register."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from engine.config import Config
from engine.data.problems import read_problems
from engine.model.shape import content_hash
from engine.recipe import load
from engine.run_folder import RunFolder
from flows import QUICKSTART
from tasks import console, summary, tracking
from tasks.base_model import base_model
from tasks.caching import code_hash
from tasks.console import stage
from tasks.convert import convert
from tasks.convert import describe as describe_conversion
from tasks.evaluate import evaluate
from tasks.inputs import check_inputs, check_run_folder
from tasks.prepare import describe, encode_prompts, prepare
from tasks.publish import publish
from tasks.register import register
from tasks.train import train


@flow(name="metronome", validate_parameters=False)
def pipeline(recipe: str = QUICKSTART, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Run every stage; returns the closing table. Raises BadInput before anything slow, MetronomeError later."""
    config = load(recipe, overrides)
    check_run_folder(config)
    check_inputs(config)
    folder = RunFolder(config.folder)
    folder.create(config, resume=False)
    with tracking.tracked(config):
        config = _before_training(config)
        with stage("train") as say:
            train(config)
            say(f"{config.train.steps} steps")
        with stage("publish") as say:
            say(published := publish(config))
        _evaluate(config, folder.policy, config.train.steps)
        with stage("register") as say:
            name = f"metronome-{Path(recipe).stem}"
            say(registered := f"{name} version {register(name, folder.policy)}")
    rows = summary.outcome(config, published, registered)
    console.table(f"Run {config.run.name}", rows)
    return rows


def _before_training(config: Config) -> Config:
    """Everything up to the accuracy of the untrained model."""
    data_hash = read_problems(config.data.train).content_hash
    with stage("prepare data") as say:
        say(describe(prepare(config.data.train, data_hash, code_hash("data")), "bytes"))
    with stage("base model") as say:
        config = base_model(config)
        say(config.model.path)
    model = Path(config.model.path)
    with stage("encode") as say:
        template, limit = config.data.prompt_template, config.rollout.max_context
        encoded = encode_prompts(config.data.train, str(model), template, limit, data_hash, code_hash("data"))
        say(describe(encoded, "tokens"))
    with stage("convert") as say:
        log = RunFolder(config.folder).logs / "convert.log"
        say(describe_conversion(convert(str(model), content_hash(model), code_hash("model", "platform"), log)))
    _evaluate(config, model, 0)
    return config


def _evaluate(config: Config, model: Path, weight_version: int) -> None:
    with stage("evaluate") as say:
        say("accuracy " + summary.accuracy(evaluate(config, model, weight_version)))
