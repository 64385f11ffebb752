"""Rows in the published schema of each problem set that a shipped recipe names, and recipes made small."""

import json

import pyarrow
import pyarrow.parquet

from engine.config.recipe import load_config
from engine.data.benchmark_files import FORMATS
from support.runs import ROOT

RECIPES = ROOT / "infra/recipes"
SHIPPED = [RECIPES / f"{name}.toml" for name in ("quickstart", "aime")]
SHIPPED += [path for path in sorted((RECIPES / "papers").glob("*.toml")) if not path.stem.endswith("-paper")]
"""Those that train. A recipe NAME-paper differs in its layout only; data/smollm2 has to be made first."""
SUMS = [(a, a * 7 % 41) for a in range(900)]  # so many that the smallest held-out share has rows


def _deepscaler(a, b):
    answer = str(a + b)
    return {"problem": f"Find ${a}+{b}$.", "answer": answer, "solution": f"It is $\\boxed{{{answer}}}$."}


def _dapo(a, b):
    asked = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\nFind ${a}+{b}$.\n\nRemember to put "
        'your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": asked, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(a + b), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{a}-{b}"},
    }


def _usual(a, b):
    return {"id": a, "problem": f"What is ${a}$ and ${b}$ together?", "answer": str(a + b)}


def _question(a, b):
    return {"id": a, "question": f"What is ${a}$ and ${b}$ together?", "answer": float(a + b), "url": ""}


def _olympiad(a, b):
    asked = {"id": a, "question": f"What is ${a}$ and ${b}$ together?"}
    return {**asked, "solution": ["…"], "final_answer": [str(a + b)], "unit": None, "is_multiple_answer": False}


def _minerva(a, b):
    return {"problem": f"What is ${a}$ and ${b}$ together?", "solution": f"So $\\boxed{{{a + b}}}$.", "idx": a}


SCHEMAS = {
    "agentica-org/DeepScaleR-Preview-Dataset": _deepscaler,
    "BytedTsinghua-SIA/DAPO-Math-17k": _dapo,
    "BytedTsinghua-SIA/AIME-2024": _dapo,
    "deepscaler_aime_1983_2023.json": _deepscaler,
    "minerva": _minerva,
    "olympiadbench": _olympiad,
    "amc": _question,
    "amc24": _question,
    **dict.fromkeys(("aime24", "aime25", "math500"), _usual),
}
"""By the name in the recipe: makes a row of two numbers."""


def fixture(name, folder, rows=SUMS):
    """A file with rows of this set: Parquet if they are of verl's form, as verl writes them."""
    made = [SCHEMAS[name](*one) for one in rows]
    path = folder / name.rpartition("/")[2]
    if SCHEMAS[name] is _dapo:
        path = path.with_suffix(".parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), path)
    else:
        path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def with_data(recipe, folder):
    """Overrides that put `fixture` in the place of each set that is not in the repository."""
    config = load_config(recipe)
    found = {}
    if not (ROOT / config.data.train).is_file():
        found["data.train"] = fixture(config.data.train, folder)
    other = [(5000 + a, b) for a, b in SUMS[:9]]  # other problems than those trained on
    names = [name if name in FORMATS or "/" in name else "aime24" for name in config.evaluate.benchmarks]
    if names:
        found["evaluate.benchmark"] = ",".join(str(fixture(name, folder, other)) for name in names)
    return found


def small(recipe, folder, model):
    """Overrides with which a recipe trains one step of a tiny model on a CPU. The keys of its algorithm, mode, data and
    sampling stay."""
    config = load_config(recipe)
    cut = {"algorithm.overlong_buffer": 4} if config.algorithm.overlong_buffer else {}
    for table in ("parallel", "platform", "dry_run"):
        own = getattr(config, table)
        cut |= {f"{table}.{key}": json.dumps(getattr(type(own)(), key)) for key in own.model_fields_set}
    return with_data(recipe, folder) | cut | {
        "run.name": "small", "run.output": folder, "model.path": model, "model.dtype": "float32",
        "platform.device": "cpu", "rollout.listen": "127.0.0.1:0",
        "rollout.engine": "embedded", "rollout.instances": 1, "rollout.tensor": 1, "rollout.devices": "[]",
        "rollout.concurrency": 2, "rollout.group_size": 2, "rollout.max_context": 480, "rollout.max_new_tokens": 8,
        "rollout.timeout_s": 60, "train.timeout_s": 60, "train.steps": 1, "train.dtype": "float32",
        "train.updates": min(2, config.train.updates), "train.warmup_steps": min(1, config.train.warmup_steps),
        "train.prompts_per_step": 4, "train.micro_batch_tokens": 1024, "weights.transport": "file",
        "weights.staged": "false", "evaluate.every": 0, "evaluate.max_new_tokens": 8, "evaluate.max_context": 0,
        "reward.workers": 1,
    }  # fmt: skip
