"""Wall time and tokens/s/device of every mode on the same work with long-tailed response lengths.

`python benchmarks/modes.py`

A random Qwen3 (hidden 128, 4 layers, vocabulary 512) stops at any of a few tokens, so response lengths are geometric
with a long tail, cut at `--longest`. The learning rate is too small to change that. Trainer and instance have a core
each, and the modes take turns. Each mode is printed beside its bound from the times of the sync runs: I rollout, T
training, w weight sync and update, which do not overlap with anything.

* sync: I + T + w. periodic: max(I, T) + w.
* one_step_off, bounded: max(I, T) + w; with staged weights max(I, T). "partial" cuts responses at a weight boundary.
* staggered: two instances share the instance's core and swap one after the other. The bound is that of staged.

Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import byte_tokenizer, random_qwen3, result, run_orchestrator

from engine.config.recipe import HOME
from engine.run.files import read_lines

WARM_UP = 3
"""Number of first steps of a run that do not count: until then, some modes have not filled their batches in flight."""
STOP = ["a", "b", "c", "d"]
"""Tokens that end a response; about one token in a hundred is one of them."""
MODES: dict[str, dict[str, Any]] = {
    "sync": {"train.mode": "sync"},
    "periodic": {"train.mode": "periodic"},
    "one_step_off": {"train.mode": "one_step_off"},
    "one_step_off partial": {"train.mode": "one_step_off", "rollout.partial": "true"},
    "one_step_off staged": {"train.mode": "one_step_off", "weights.staged": "true"},
    "bounded 2": {"train.mode": "bounded", "train.max_staleness": 2},
    "bounded 2 partial": {"train.mode": "bounded", "train.max_staleness": 2, "rollout.partial": "true"},
    "bounded 2 staged": {"train.mode": "bounded", "train.max_staleness": 2, "weights.staged": "true"},
    "bounded 2 staggered": {
        "train.mode": "bounded",
        "train.max_staleness": 2,
        "weights.staged": "true",
        "rollout.instances": 2,
        "rollout.devices": [1, 1],
        "rollout.concurrency": 2,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--longest", type=int, default=384)
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="sync always runs, for the bounds"
    )
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES if mode in ("sync", *arguments.modes)}
    with tempfile.TemporaryDirectory() as folder:
        model = random_qwen3(Path(folder) / "model", 128, 4, 512, context=1024)
        byte_tokenizer(512).save_pretrained(model)
        for number in range(arguments.rounds):
            for mode in found:
                found[mode] += steps_of(mode=mode, number=number, model=model, folder=Path(folder), arguments=arguments)
    report(found)


def steps_of(mode: str, number: int, model: Path, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The measured steps of one run."""
    settings = {
        "run.output": folder,
        "run.name": f"{mode.replace(' ', '-')}-{number}",
        "run.seed": number,
        "model.path": model,
        "data.train": HOME / "data/addition_train.jsonl",
        "reward.function": f"{HOME}/benchmarks/rewards.py:letters",
        "train.steps": arguments.steps + WARM_UP,
        "train.prompts_per_step": arguments.prompts,
        "train.learning_rate": 1e-12,
        "train.micro_batch_tokens": 2048,
        "train.devices": [0],
        "rollout.devices": [1],
        "rollout.group_size": 8,
        "rollout.concurrency": 3,
        "rollout.max_new_tokens": arguments.longest,
        "rollout.max_context": arguments.longest + 64,
        "rollout.stop": STOP,
        "algorithm.old_policy": "behavior",
        "checkpoint.every": 0,
        **MODES[mode],
    }
    config = run_orchestrator({key: _toml(value) for key, value in settings.items()})
    lines = list(read_lines(config.folder / "steps.jsonl"))[WARM_UP:]
    last = lines[-1]
    print(
        f"{mode} {number}: {statistics.median(line['step_s'] for line in lines):.2f} s a step, I "
        f"{last['rollout_s']:.2f} s, T {last['train_s']:.2f} s, responses of {last['response_length_mean']:.0f} tokens "
        "on average",
        flush=True,
    )
    return lines


def _toml(value: Any) -> str:  # noqa: ANN401
    return str(value).replace("'", '"')


def report(found: dict[str, list[dict[str, Any]]]) -> None:
    """Print a table of medians over steps, beside the bounds."""

    def median(mode: str, key: str) -> float:
        return statistics.median(line[key] for line in found[mode])

    rollout = median("sync", "rollout_s")
    train = median("sync", "train_s")
    fixed = median("sync", "sync_s") + median("sync", "update_s")
    print(f"sync: I {rollout:.2f} s, T {train:.2f} s, w {fixed:.2f} s")
    figures: dict[str, dict[str, float]] = {}
    for mode, lines in found.items():
        exposed = 0 if "weights.staged" in MODES[mode] else fixed
        bound = rollout + train + fixed if mode == "sync" else max(rollout, train) + exposed
        rate = sum(line["trained_tokens"] for line in lines) / sum(line["step_s"] for line in lines) / 2
        figures[mode] = {
            "step_s": median(mode, "step_s"),
            "bound_s": bound,
            "tokens_per_s_per_device": rate,
            "ratio_to_sync": rate / figures["sync"]["tokens_per_s_per_device"] if figures else 1.0,
            "staleness_mean": statistics.fmean(line["staleness_mean"] for line in lines),
        }
        print(
            f"{mode:20} {figures[mode]['step_s']:6.2f} s a step (bound {bound:.2f}), {rate:6.0f} tokens/s/device, "
            f"{figures[mode]['ratio_to_sync']:.2f} times sync, staleness {figures[mode]['staleness_mean']:.2f}"
        )
    result(figures)


if __name__ == "__main__":
    main()
