"""Whether the trainer's replica groups end a step together, and how long pipelines idle: `python benchmarks/balance.py`

Two rules of the ledger in arrival order are compared. "guided" is today's: towards the end of a step windows get
smaller, and under a pipeline they are equal parts of the replica groups' shares. "greedy" hands out as many groups as
fit into the budget until none are left. In this process the orchestrator uses them in turn: "greedy" in even steps,
"guided" in odd ones. The first step of each does not count.

* measured: a real run of two replicas, a core each, in mode "sync". A random model samples responses whose lengths have
  an exponential distribution, of 28 tokens in the mean. In the median of the steps: `imbalance` is how much longer the
  last replica computes than the replicas do in the mean, `tokens_per_s` the tokens that a second of the longer one
  trains. `speed_up`: the median ratio of an odd step's tokens per second to those of the even step before it.
* idle: real runs of a pipeline, a rank a stage. In even steps each window fills and drains it ("apart"), in odd ones
  all that wait ("together"). `idle`: the share of their windows in which the ranks computed nothing; `windows` of a
  step. Medians of the steps. Stages beyond the cores share them.
* simulated: the same ledger with the clock of `metronome plan`, more replica groups and pipelines; `imbalance` as
above,
  `step_s` the mean time from the last group's arrival to the end of the step, in seconds.

Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import statistics
import string
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import byte_tokenizer, random_qwen3, result

from engine.config import Config
from engine.config.recipe import load_config
from engine.orchestrator import steps as plane_steps
from engine.orchestrator.launch import launch_run
from engine.orchestrator.ledger import Ledger, Windows
from engine.run.trace import read_spans
from engine.tools.planner.costs import Costs
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.simulation import simulate_run

RULES = ("greedy", "guided")
"""The rule of even and of odd steps."""
WINDOWS = ("apart", "together")
"""The same for pipelines."""
STOPS = string.ascii_letters[:8]
"""Tokens that end a response: 9 of 260 with the end of a sequence."""
SIMULATED = ((2, 1), (4, 1), (16, 1), (32, 1), (2, 2), (4, 4), (4, 8))
"""Replica groups and pipeline stages."""


class AlternatingLedger(Ledger):
    """A ledger with the rule of its step."""

    rules = RULES
    """The rules of even and of odd steps."""
    coming = ""
    """The rule of the step that the table begins."""

    def __init__(self, expected: int, windows: Windows) -> None:
        super().__init__(expected, replace(windows, together=1) if self.coming == "apart" else windows)
        self._rule = self.coming

    def _largest(self, replica_group: int, budget: int, free: Sequence[int], mini_batch: int) -> int:
        return budget if self._rule == "greedy" else super()._largest(replica_group, budget, free, mini_batch)


def use_rules_in_turn() -> None:
    """Let the tables of this process begin their steps with the rules in turn."""
    begin = plane_steps.Steps.begin

    def begin_step(one: plane_steps.Steps, number: int, expected: int) -> plane_steps.Step:
        AlternatingLedger.coming = AlternatingLedger.rules[number % 2]
        return begin(one, number, expected)

    plane_steps.Steps.begin = begin_step  # type: ignore[method-assign]
    plane_steps.Ledger = AlternatingLedger  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="an even number")
    parser.add_argument("--prompts", type=int, default=48, help="of a step")
    parser.add_argument("--hidden", type=int, default=128, help="size of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 4], help="of the pipelines")
    parser.add_argument("--only-idle", action="store_true", help="measure the pipelines only")
    arguments = parser.parse_args()
    use_rules_in_turn()
    idle = {
        f"{stages} stages, {mode}": pipelined(arguments, stages, mode)
        for stages in arguments.stages
        for mode in ("sync", "periodic")
    }
    if arguments.only_idle:
        result({"idle": idle})
        return
    figures: dict[str, Any] = {"idle": idle, "measured": measured(arguments), "simulated": {}}
    for replica_groups, pipeline in SIMULATED:
        name = f"{replica_groups} replica groups" + (f", {pipeline} stages" if pipeline > 1 else "")
        figures["simulated"][name] = simulated(replica_groups, pipeline)
        print(name, figures["simulated"][name])
    result(figures)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of the real run, by rule, and the speed-up."""
    AlternatingLedger.rules = RULES
    spans = [span for span in trained(arguments, arguments.layers, {"parallel.data": 2}) if span["name"] == "train"]
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step in range(2, arguments.steps):
        mine = [span for span in spans if span["step"] == step]
        longest, mean = busy(mine, 2)
        found[RULES[step % 2]].append((longest / mean - 1, sum(span["tokens"] for span in mine) / longest))
        print(f"step {step}, {RULES[step % 2]}: imbalance, tokens per second {found[RULES[step % 2]][-1]}", flush=True)
    ratios = [guided[1] / greedy[1] for greedy, guided in zip(*(found[rule] for rule in RULES), strict=True)]
    return {
        **{
            rule: dict(zip(("imbalance", "tokens_per_s"), map(statistics.median, zip(*rows, strict=True)), strict=True))
            for rule, rows in found.items()
        },
        "speed_up": statistics.median(ratios),
    }


def pipelined(arguments: argparse.Namespace, stages: int, mode: str) -> dict[str, dict[str, float]]:
    """The idle share and the number of windows of a step under a pipeline, by rule."""
    AlternatingLedger.rules = WINDOWS
    changed = {"parallel.pipeline": stages, "train.mode": mode, "train.micro_batch_tokens": 256}
    devices = {"train.devices": [0, 1] if stages == 2 else []}
    spans = trained(arguments, max(arguments.layers, stages), changed | devices)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step in range(2, arguments.steps):
        mine = [span for span in spans if span.get("step") == step]
        idle, train = ([one for one in mine if one["name"] == name] for name in ("bubble", "train"))
        found[WINDOWS[step % 2]].append((seconds(idle) / seconds(train), len(train) / stages))
        print(f"{stages} stages, {mode}, {WINDOWS[step % 2]}: {found[WINDOWS[step % 2]][-1]}", flush=True)
    return {
        rule: dict(zip(("idle", "windows"), map(statistics.median, zip(*rows, strict=True)), strict=True))
        for rule, rows in found.items()
    }


def seconds(spans: Iterable[Mapping[str, Any]]) -> float:
    """The sum of the spans' lengths."""
    return sum(span["end"] - span["start"] for span in spans)


def trained(arguments: argparse.Namespace, layers: int, changed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The spans of a real run of a random model of so many layers, with other keys."""
    with tempfile.TemporaryDirectory() as folder:
        model = random_qwen3(
            Path(folder) / "model",
            hidden=arguments.hidden,
            layers=layers,
            vocabulary=260,
            context=512,
        )
        byte_tokenizer(512).save_pretrained(model)
        settings = {
            "model.path": model,
            "run.output": folder,
            "run.name": "balance",
            "rollout.concurrency": 8,
            "rollout.stop": list(STOPS),
            "rollout.max_new_tokens": 256,
            "rollout.max_context": 512,
            "train.mode": "sync",
            "train.steps": arguments.steps,
            "train.prompts_per_step": arguments.prompts,
            "train.devices": [0, 1],
            "train.learning_rate": 1e-9,
            "checkpoint.every": 0,
        }
        settings |= changed
        run = launch_run(load_config(None, [f"{key}={value}" for key, value in settings.items()]))
        return list(read_spans(run.trace))


def busy(spans: Iterable[Mapping[str, Any]], replica_groups: int) -> tuple[float, float]:
    """Seconds from the step's first window to the last end of a replica group, and to the end of each replica group in
    the mean."""
    begun = min(span["start"] for span in spans)
    ends: dict[str, float] = defaultdict(float)
    for span in spans:
        ends[span["lane"]] = max(ends[span["lane"]], span["end"] - begun)
    return max(ends.values()), sum(ends.values()) / replica_groups


def simulated(replica_groups: int, pipeline: int, steps: int = 12) -> dict[str, dict[str, float]]:
    """The figures of simulated steps of 64 groups a replica group, by rule."""
    config = Config(
        parallel={"data": replica_groups, "pipeline": pipeline},
        train={"mode": "sync", "prompts_per_step": 64 * replica_groups, "micro_batch_tokens": 8192},
        rollout={"instances": replica_groups, "concurrency": 16, "max_new_tokens": 2048, "max_context": 4096},
    )
    costs = Costs(
        decode_step=1e-3,
        decode_response=1e-5,
        decode_context=0.0,
        prefill_token=0.0,
        window=0.003,
        micro_batch=0.01 * pipeline,
        token=1e-4 * pipeline,
        square=0.0,
        update=0.0,
        sync=0.0,
    )
    done = simulate_run(config, costs, Lengths.drawn(mean=200, p99=900, prompt=100, longest=2048), steps=steps)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step in range(2, steps):
        spans = [span for span in done.spans if span["name"] == "train" and span["step"] == step]
        longest, mean = busy(spans, replica_groups)
        found[RULES[step % 2]].append((longest / mean - 1, longest))
    return {
        rule: dict(zip(("imbalance", "step_s"), map(statistics.fmean, zip(*rows, strict=True)), strict=True))
        for rule, rows in found.items()
    }


if __name__ == "__main__":
    main()
