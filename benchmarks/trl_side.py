"""TRL's side of against_trl.py: runs GRPOTrainer in TRL's own environment and prints one line `TRL {json}` with the
times of its steps.

Nothing of Metronome is imported here. against_trl.py describes what was tuned.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rewards import letters_for_trl
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """TRL's trainer, which also adds up the seconds of generation and of forward-only passes."""

    generate_s = 0.0
    score_s = 0.0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        started = time.perf_counter()
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.generate_s += time.perf_counter() - started

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        started = time.perf_counter()
        try:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        finally:
            if not torch.is_grad_enabled():
                self.score_s += time.perf_counter() - started


class Clock(TrainerCallback):
    """Records the time at the end of each update, and the sums of `Timed` at that time."""

    def __init__(self) -> None:
        self.trainer: Timed
        self.marks: list[tuple[float, float, float]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Record the start of the first step."""
        self._mark()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Record the end of an update."""
        self._mark()

    def _mark(self) -> None:
        self.marks.append((time.perf_counter(), self.trainer.generate_s, self.trainer.score_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--problems", type=Path, required=True, help="JSON lines with the key problem")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="per step")
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--kl-coef", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="responses per forward and backward")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the computation")
    parser.add_argument("--cache", help="cache_implementation of generate()")
    parser.add_argument("--continuous", action="store_true", help="transformers' continuous batching")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as output:
        print("TRL " + json.dumps(run(arguments, output)))


def run(arguments: argparse.Namespace, output: str) -> dict[str, Any]:
    """Train. Returns for each step the seconds (all, generation, forward-only passes) and the mean response length."""
    clock = Clock()
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
        reward_funcs=letters_for_trl,
        args=settings(arguments, output),
        train_dataset=Dataset.from_list(rows(arguments.problems)),
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.train()
    logged = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    steps = [
        [after - before for before, after in zip(first, last, strict=True)]
        for first, last in zip(clock.marks, clock.marks[1:], strict=False)
    ]
    return {
        "steps": [dict(zip(("step_s", "generate_s", "score_s"), step, strict=True)) for step in steps],
        "lengths": [line["completions/mean_length"] for line in logged],
        "kl": [line["kl"] for line in logged],
        "grad_norm": [line["grad_norm"] for line in logged],
    }


def rows(problems: Path) -> list[dict[str, str]]:
    """TRL's data set."""
    return [{"prompt": json.loads(line)["problem"]} for line in problems.read_text().splitlines()]


def settings(arguments: argparse.Namespace, output: str) -> GRPOConfig:
    """The same algorithm as Metronome's, with the settings of TRL that are fast here."""
    responses = arguments.prompts * arguments.group_size
    return GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=arguments.dtype == "bfloat16",
        gradient_checkpointing=False,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=responses // arguments.micro_batch,
        num_generations=arguments.group_size,
        num_iterations=1,
        max_completion_length=arguments.new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="grpo",
        beta=arguments.kl_coef,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        cache_implementation=arguments.cache,
        use_transformers_continuous_batching=arguments.continuous,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
