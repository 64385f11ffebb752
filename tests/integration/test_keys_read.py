"""Every key that nothing reads is told to the user: whole runs record what their processes read, and each key of the
tree is then set alone to another value."""

import os
import shutil
import subprocess
import sys
from typing import get_args

import pytest

from engine.config import Config
from engine.config.keys import nest_keys
from engine.config.no_effect import without_effect
from engine.config.table import is_value, tables_in
from support.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = {
    f"{table}.{name}": (kind, name)
    for table, kind in tables_in(Config)
    for name, field in kind.model_fields.items()
    if is_value(field.annotation) and ".NAME" not in table
}
"""Dotted key → its table and its name in it; those of tables that the recipe names are refused without one."""
PLAIN = {
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 8,
    "rollout.max_context": 64,
    "train.steps": 2,
    "train.prompts_per_step": 4,
    "evaluate.problems": 4,
}
"""Most conditions of keys do not hold."""
FULL = PLAIN | {
    "reward.function": f"{ROOT / 'tests/support/rewards.py'}:even",
    "rollout.program": f"{ROOT / 'tests/support/programs.py'}:doubling",
    "weights.transport": "gloo",
    "train.mode": "sync",
    "train.steps": 4,
    "train.schedule": "linear",
    "checkpoint.every": 1,
    "evaluate.every": 1,
    "algorithm.loss": "bapo",
    "algorithm.old_policy": "previous",
    "algorithm.kl_coef": 0.01,
    "algorithm.mismatch": "truncate",
    "algorithm.mismatch_reject": "token",
    "algorithm.overlong_buffer": 4,
    "algorithm.gradient_control": "gac",
}
"""Most conditions of keys hold."""
ELSEWHERE = {
    "run.resumes": "a run dies",
    "run.accept": "a run is resumed",
    "model.convert": "`metronome run`",
    "reward.on_timeout": "a reward takes too long",
    "reward.on_error": "a reward fails",
    "rollout.restarts": "an instance dies",
    "evaluate.max_wait_s": "training waits for an evaluation",
    "evaluate.folder": "a benchmark is given by name",
    "platform.network_gbps": "`metronome plan`",
    "platform.memory_gib": "there are accelerators",
}
"""Keys that a run reads when something happens, and those of other commands."""
COPIED = {
    "algorithm.clip_low": "clips ratios that are all 1",
    "algorithm.clip_high": "clips ratios that are all 1",
    "algorithm.dual_clip": "bounds ratios that are all 1",
    "algorithm.gac_low": "for a row of the summary about cosines, if there are any",
    "train.min_learning_rate": "given to Megatron, whose constant rate does not use it",
    "reward.memory_gb": "given to the verifier, whose built-in rewards have a limit of their own",
    "reward.environment": "given to the verifier, whose built-in rewards do not use it",
    "weights.interface": "given to every transport",
    "checkpoint.keep_best": "read where a checkpoint would be kept, and none is evaluated",
    "cluster.most_instances": "given to every pool",
}
"""Keys that PLAIN reads, although they have no effect."""


def recorded(folder, settings):
    """The keys that a training, an evaluation and a dry run read: "table.key"."""
    recorder = folder / "recorder"
    recorder.mkdir()
    shutil.copy(ROOT / "tests/support/recorded_reads.py", recorder / "sitecustomize.py")
    given = settings | {"run.output": folder, "run.name": "run"}
    sets = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    environment = os.environ | {"PYTHONPATH": f"{recorder}{os.pathsep}{ROOT}"}
    for command in (["train"], ["evaluate", "--set", "run.name=other"], ["run", "--set", "run.dry=true"]):
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", command[0], *sets, *command[1:]],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    seen = {line for file in (recorder / "reads").iterdir() for line in file.read_text().splitlines()}
    return {key for key, (table, name) in KEYS.items() if f"{table.__name__}.{name}" in seen}


def choices(annotation):
    """The values of all Literals in an annotation."""
    for part in get_args(annotation):
        yield from [part] if isinstance(part, str) else choices(part)


def others(field):
    """Values that the key may take beside its default; which of them are of its type, its table says."""
    default = field.get_default(call_default_factory=True)
    named = list(choices(field.annotation))
    numbers = [1e-9, 0.25, 0.5, 1, 2, 3, 64]
    lists = [*([one] for one in named), [0], ["x"], [0, 1], [0.5, 0.6], [1.5, 2.5], [{"function": "math"}]]
    texts = ["x", "file.py:function", "127.0.0.1:1"]
    candidates = [not default] if isinstance(default, bool) else [*named, *numbers, *texts, *lists, {"x": 1}]
    return [one for one in candidates if one != default]


def verdict(key, field, settings):
    """What becomes of the key if it is set alone: "told", "taken", or "refused" with every value."""
    for value in others(field):
        try:
            config = Config.model_validate(nest_keys({**settings, key: value}, "here"))
        except ValueError:
            continue
        return "told" if any(line.startswith(f"{key} = ") for line in without_effect(config)) else "taken"
    return "refused"


@pytest.mark.parametrize(("settings", "copied"), [(PLAIN, set(COPIED)), (FULL, {"cluster.most_instances"})])
def test_a_key_that_nothing_reads_is_told_or_refused(settings, copied, tiny_model, problems, tmp_path):
    settings = settings | {"model.path": str(tiny_model), "data.train": str(problems), "data.heldout": str(problems)}
    read = recorded(tmp_path, settings)
    assert len(read) > 100
    set_alone = {key: table.model_fields[name] for key, (table, name) in KEYS.items() if key not in settings}
    found = {key: verdict(key, field, settings) for key, field in set_alone.items()}
    assert {key for key, one in found.items() if one == "taken"} - read <= set(ELSEWHERE)
    assert read & set(ELSEWHERE) <= {"evaluate.max_wait_s"}, "these need no excuse"
    assert {key for key, one in found.items() if one == "told"} & read == copied
