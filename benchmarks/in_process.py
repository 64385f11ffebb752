"""The trainer's loop with an embedded engine in the same process: no orchestrator, no HTTP, one core, no start-up for
each run.

The loop, the policy, the losses and the engine are those of `metronome train`; only their connection is direct. A batch
is generated when the loop starts it, with the weights that were just published, so batch t has version max(0, t − s)
(train.exact_lag).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine import platform
from engine.config import Config
from engine.data.loader import PromptLoader, sampling_seed
from engine.data.prompts import prompt_id
from engine.errors import MetronomeError
from engine.instance.embedded.engine import Engine, Result, SamplingRequest
from engine.instance.embedded.rollout_model import RolloutModel
from engine.instance.protocol import Sampling
from engine.reward.verifiers import exact
from engine.trainer.loop import Loop, Trainer
from engine.trainer.policy import Policy
from engine.types import Group, Prompt, Response, Score


class InProcess:
    """Rollouts (engine.trainer.rollouts) of an engine in this process, scored by the verifier "exact"."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self._model = RolloutModel(config.model.path, config.rollout.max_context)
        self._engine = Engine(self._model, config.slots, config.rollout.max_context)
        self._loader = PromptLoader(
            self.prompts(config.data.sets[0].path), config.run.seed, config.train.prompts_per_step
        )
        self._ready: dict[int, list[Group]] = {}
        self.sent_bytes = 0
        """Always 0, because the engine takes the policy's own tensors."""

    def prompts(self, path: str) -> list[Prompt]:
        """The problems of a file as prompts, in the config's template."""
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        texts = [self._config.data.prompt_template.replace("{problem}", row["problem"]) for row in rows]
        ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            Prompt(prompt_id(row["problem"], row["answer"]), row["problem"], row["answer"], tuple(tokens))
            for row, tokens in zip(rows, ids, strict=True)
        ]

    def begin(self, start: int) -> None:
        """Does nothing, because nobody else takes part."""

    def publish(self, model: Trainer, version: int) -> float:
        """Load the policy's weights into the engine."""
        self._engine.pause(abort=False, done=lambda: None)
        self._engine.start_update()
        self._engine.update(list(model.tensors()))
        self._engine.finish_update(version)
        self._engine.resume()
        return 0.0

    def verify(self, model: Trainer, version: int) -> None:
        """Does nothing, because the engine got the policy's own tensors in this process."""

    def start(self, step: int) -> None:
        """Generate the step's batch at once."""
        prompts = self._loader.batch(step)
        size = self._config.rollout.group_size
        seeds = [
            sampling_seed(self._config.run.seed, self._loader.epoch_of(step, index), prompt.id, number)
            for index, prompt in enumerate(prompts)
            for number in range(size)
        ]
        scored = self.scored([prompt for prompt in prompts for _ in range(size)], seeds)
        self._ready[step] = [
            Group(step, index, prompt, *zip(*scored[index * size : (index + 1) * size], strict=True))
            for index, prompt in enumerate(prompts)
        ]

    def scored(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[tuple[Response, Score]]:
        """One scored response to each prompt, at the config's temperature."""
        results: dict[int, Result] = {}
        rollout = self._config.rollout
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            sampling = Sampling(
                rollout.max_new_tokens, rollout.temperature, seed=seed, stop_ids=frozenset(self._model.stop_ids)
            )
            self._engine.submit(SamplingRequest(prompt.token_ids, sampling, partial(results.__setitem__, number)))
        while self._engine.busy:
            self._engine.step()
        found = []
        for number, prompt in enumerate(prompts):
            result = results[number]
            ids = tuple(result.token_ids)
            response = Response(
                token_ids=ids,
                logprobs=tuple(result.logprobs),
                versions=((0, result.version),),
                loss_mask=(True,) * len(ids),
                finish_reason=result.finish_reason,
                text=self._tokenizer.decode(ids, skip_special_tokens=True),
                seed=seeds[number],
                instance="in-process",
            )
            found.append((response, exact(prompt, response)))
        return found

    def heartbeat(self) -> None:
        """Does nothing, because no process waits for signs of life."""

    def windows(self, step: int, prepare: object) -> Iterator[list[Group]]:
        """The whole batch as one window."""
        yield self._ready.pop(step)

    def failed(self, error: MetronomeError) -> None:
        """Does nothing, because the loop raises the error in this process."""


def train(config: Config) -> tuple[list[dict[str, Any]], float]:
    """Run the loop. Returns the figures of its steps, and the mean reward of the final policy on the held-out problems
    (one response each).

    Call it inside `common.one_rank`.
    """
    rollouts = InProcess(config)
    figures = []
    policy = Policy(config, platform.get_platform("cpu"))
    Loop(
        config=config,
        trainer=policy,
        rollouts=rollouts,
        report=lambda step, line: figures.append(line),
    ).run(0)
    rollouts.publish(policy, config.train.steps)
    heldout = rollouts.prompts(config.data.heldout)[: config.evaluate.problems]
    scores = rollouts.scored(heldout, [sampling_seed(config.run.seed, 0, prompt.id, 0) for prompt in heldout])
    return figures, sum(score.value for _, score in scores) / len(scores)
