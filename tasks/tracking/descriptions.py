"""The descriptions of runs and registered policies on MLflow's pages: what each one is, its source, its result, and the
commands that repeat and compare it."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path

import mlflow
from mlflow.entities import RunTag

from engine.config import Config
from engine.data.named_models import model_name
from engine.errors import counted
from engine.run.folder import RunFolder
from engine.run.run_file import read_run
from tasks.tracking import evaluation_texts
from tasks.tracking.artifact_cells import code_span, markdown_table, markdown_text
from tasks.tracking.code_version import code_version

NOTE = "mlflow.note.content"
"""Tag of a run that MLflow's UI shows as its description, in Markdown."""
OWN = "metronome.description"
"""Tag of a run with the hash of the description that Metronome wrote. A description that a person has changed is
kept.
"""


def describe_run(client: mlflow.MlflowClient, run_id: str, text: str) -> None:
    """Update the description of a run, unless a person has changed it."""
    tags = client.get_run(run_id).data.tags
    there = tags.get(NOTE, "")
    if there and tags.get(OWN) != _hash(there):
        return
    if text != there:
        client.log_batch(run_id, tags=[RunTag(NOTE, text), RunTag(OWN, _hash(text))])


def of_evaluation(config: Config) -> str:
    """The description of a run folder that `metronome evaluate` made, as Markdown. `config` has the evaluated model."""
    folder = RunFolder(config.folder)
    what = f"Evaluates {code_span(config.model.path)}; nothing is trained here."
    name = f"run.name={config.run.name}-again"
    again = shlex.join(["metronome", "evaluate", str(folder.config), "--model", config.model.path, "--set", name])
    return _page([what, *_result(folder), *_commands({"Repeat": again}), f"Code: {code_version()}"])


def of_run(config: Config) -> str:
    """The description of a run that trains, as Markdown. It uses the run's own config, because `config` may name the
    model of an evaluation."""
    folder = RunFolder(config.folder)
    if folder.config.exists():
        config = folder.read_config()
    name = config.run.name
    command = "run" if read_run(folder.path).flow_run else "train"
    again = shlex.join(["metronome", command, str(folder.config), "--set", f"run.name={name}-again"])
    commands = _commands({"Repeat": again, "Compare": _compare(folder)})
    told = folder.last_failure()
    ended = [f"**It ended with an error:** {markdown_text(told[1])}"] if told is not None else []
    return _page([_what(config), *ended, *_result(folder), *commands, f"Code: {code_version()}"])


def of_policy(folder: RunFolder, config: Config, verdict: str) -> str:
    """The description of a registered version, as Markdown. `verdict`: whether it is the champion, and why."""
    steps = config.train.steps
    return _page(
        [
            f"The policy of run {config.run.name} after {counted(steps, 'step')}. {_what(config)}",
            *_result(folder),
            verdict,
            *_commands(
                {
                    "Evaluate it again": shlex.join(
                        ["metronome", "evaluate", str(folder.config), "--model", str(folder.policy)]
                    ),
                    "Compare its run": _compare(folder),
                    "Talk to it": f"metronome serve --model {shlex.quote(str(folder.path))} --port 8000",
                }
            ),
        ]
    )


def _what(config: Config) -> str:
    train = config.train
    losses = f"advantage {code_span(config.algorithm.advantage)}, loss {code_span(config.algorithm.loss)}"
    start = read_run(config.folder).start
    data = ", ".join(code_span(one.path) for one in config.data.sets)
    source = code_span(start.continued_from or model_name(Path(config.model.path)))
    recipe = f", recipe {code_span(start.recipe)}" if start.recipe else ""
    return (
        f"Trains {source} on {data} with the reward {code_span(config.reward.label)}: "
        f"{counted(train.steps, 'step')} of {counted(train.prompts_per_step, 'prompt')} x "
        f"{counted(config.rollout.group_size, 'response')}, {losses}, "
        f"mode `{train.mode}`{recipe}."
    )


def _result(folder: RunFolder) -> list[str]:
    rows = evaluation_texts.gain_rows(folder)
    return [markdown_table(["result", ""], [*rows.items()])] if rows else []


def _commands(commands: dict[str, str]) -> list[str]:
    return [f"{what}:\n\n    {command}" for what, command in commands.items()]


def _compare(folder: RunFolder) -> str:
    return f"metronome compare {shlex.quote(str(folder.path))} OTHER_RUN"


def _page(parts: list[str]) -> str:
    return "\n\n".join(parts) + "\n"


def _hash(text: str) -> str:
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16]
