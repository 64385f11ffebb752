"""Training on one rank: gradients add up group by group, one update ends the step (Algorithm 1, lines 11–21)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from engine.algorithm.batch_statistics import BatchLossSettings
from engine.algorithm.losses import Coefficients, Loss, Terms
from engine.algorithm.mismatch import mismatch
from engine.config import Config
from engine.errors import MetronomeError
from engine.model.build import logits, row_multiple
from engine.model.logprobs import token_logprobs
from engine.model.tri_model import TriModel, score
from engine.platform import Platform
from engine.run.user_algorithms import advantage_of, loss_of
from engine.trainer.credit import Credit
from engine.trainer.early_scoring import EarlyScores
from engine.trainer.gradient_control import GradientControl
from engine.trainer.held_windows import HeldWindows, Scored, hold_windows
from engine.trainer.micro_batches import MicroBatch, Packing
from engine.trainer.models import computation, open_models
from engine.trainer.optimizer import optimizer_of, scheduler_of
from engine.trainer.pipeline_bubble import ComputeTimer
from engine.trainer.rank_group import RankGroup
from engine.trainer.step_metrics import LossCounts, RankMetrics, StepMetrics
from engine.types import Group, Landed, TrainingFigures


class Policy:
    """Policy, frozen copies, optimizer and schedule of one rank."""

    def __init__(self, config: Config, platform: Platform, ranks: RankGroup | None = None) -> None:
        """Built by every rank at once, inside a `session` of the platform."""
        self.config = config
        self.platform = platform
        self.ranks = ranks or RankGroup(config.parallel.lockstep)
        self.models: TriModel = open_models(config, platform)
        self.metrics = StepMetrics()
        self.packing = self._packing()
        self.early = EarlyScores(self.models, self.packing)
        algorithm = config.algorithm
        advantage_of(algorithm.advantage)  # raises now if a user's own advantage has a mistake
        self._loss = loss_of(algorithm.loss)
        self._coefficients = Coefficients(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl=algorithm.kl_coef,
            entropy=algorithm.entropy_coef,
            kl_estimator=algorithm.kl_estimator,
            mismatch=algorithm.mismatch,
            mismatch_limit=algorithm.mismatch_limit,
            limits=BatchLossSettings(
                algorithm.m2po.threshold, algorithm.bapo.share, algorithm.bapo.low, algorithm.bapo.high
            ),
        )
        self._held = hold_windows(
            spec=algorithm.loss,
            loss=self._loss,
            limits=self._coefficients.limits,
            ranks=self.ranks,
            mode=config.train.mode,
        )
        self._statistics: tuple[float, ...] = ()
        sharded = config.train.distributed_optimizer
        self.ddp = DistributedDataParallel(
            self.models.policy.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=sharded
            ),
            self.models.policy,
        )
        self._pipelined = config.parallel.pipeline > 1
        self._busy = ComputeTimer()
        self.models.policy.config.timers = self._busy if self._pipelined else None
        self.optimizer = optimizer_of(config, self.ddp)
        self.control = (
            GradientControl(config, self.ddp, self.optimizer) if algorithm.gradient_control != "none" else None
        )
        self._decided: bool | None = None
        self._denominator: float | None = None
        """Denominator of the step that was reduced last."""
        self.scheduler = scheduler_of(config, self.optimizer)

    def _packing(self) -> Packing:
        config = self.config
        ranks = self.ranks
        return Packing(
            credit=Credit.of(config),
            budget=config.train.micro_batch_tokens,
            shared_prompt=config.attention.shared_prompt,
            multiple=row_multiple(computation(config, self.platform)),
            context=(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()),
            share=(ranks.share, ranks.lockstep),
            device=self.models.device,
        )

    def start_step(self) -> None:
        """Set gradients and metrics back, also those of a step that was not finished."""
        self.metrics = StepMetrics()
        self._decided = None
        self.early.clear()
        if self._held is not None:
            self._held.clear()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def accumulate(self, window: Sequence[Group]) -> float | None:
        """Score the groups under the frozen models and add their gradient; no optimizer step. A collective of the unit.

        A loss of batch scope holds them: `reduce` adds their gradient once the whole batch is there.
        Returns the seconds of the schedule in which this pipeline stage computed nothing; None without a pipeline, or
        for a window that is held.
        """
        started = time.perf_counter()
        batches = self.packing.micro_batches(window)
        scored = self._frozen_scores(batches)
        idle = None
        if self._held is None:
            idle = self._forward_backward(iter(scored), len(scored))
        else:
            self._hold_window(self._held, scored)
        if self.ranks.leader:
            for group in window:
                self.metrics.add_group(group, self.packing.credit.tokens(group), self.packing.credit.unequal(group))
        self.metrics.train_s += time.perf_counter() - started
        return idle

    def score_early(self, landed: Sequence[Landed]) -> None:
        """Score responses under the frozen models before their group is complete. A collective of the unit."""
        started = time.perf_counter()
        self.early.add(landed)
        self.metrics.score_s += time.perf_counter() - started

    def worst_gap(self) -> float:
        """The step's largest ratio gap so far in the unit. A collective of the unit."""
        return self.ranks.worst(self.metrics.max_ratio_gap)

    def _frozen_scores(self, batches: Sequence[MicroBatch]) -> list[Scored]:
        """Return the window's micro-batches with their log-probabilities under old policy and reference.

        The forward-only passes run before the pipeline's schedule (1F1B) of the window.
        """
        started = time.perf_counter()
        old, reference = (self.early.scores(name, batches) for name in ("old", "reference"))
        self.metrics.score_s += time.perf_counter() - started
        return list(zip(batches, old, reference, strict=True))

    def _hold_window(self, held: HeldWindows, window: Sequence[Scored]) -> None:
        """Hold a window with its log-ratios of policy to old policy (engine.trainer.held_windows)."""
        models = self.models
        found = score(
            models.policy, [batch.layout for batch, _, _ in window], models.temperature, models.shape.vocabulary
        )
        log_ratios: list[Tensor | None] = []
        for (batch, old, _), logprobs in zip(window, found, strict=True):
            if logprobs is not None:
                # the ratio gap is checked after each window, so it is measured now and not in `reduce`
                self.metrics.worst_gap(mismatch(logprobs, batch.rollout)[0])
            log_ratios.append(None if logprobs is None else logprobs - self._old_logprobs(batch, logprobs, old))
        held.add(window, log_ratios)

    def _train_held(self, trained: Callable[[float, float], None]) -> None:
        """Train the held windows one by one, with the statistics over all of them. A collective of all ranks."""
        if self._held is None:
            return
        windows, self._statistics = self._held.take()
        for window in windows:
            started = time.time()
            self._forward_backward(iter(window), len(window))
            ended = time.time()
            self.metrics.train_s += ended - started
            trained(started, ended)

    def _forward_backward(self, window: Iterator[Scored], count: int) -> float | None:
        """Run Megatron's schedule over a window's micro-batches; it adds their gradients to the buffers.

        Returns the seconds in which this pipeline stage computed nothing, None without a pipeline.
        """
        started = time.perf_counter()
        self._busy.seconds = 0.0
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=window,
            model=[self.ddp],
            num_microbatches=count,
            seq_length=1,  # unused with variable_seq_lengths
            micro_batch_size=1,
            forward_only=False,
        )
        return time.perf_counter() - started - self._busy.seconds if self._pipelined else None

    def _forward(
        self, window: Iterator[Scored], model: torch.nn.Module
    ) -> tuple[Tensor, partial[tuple[Tensor, Tensor, None]]]:
        """Megatron's forward step. Return the micro-batch's logits, and the function from them to its loss."""
        batch, old, reference = next(window)
        if self.ranks.feeds:
            self.metrics.computed_tokens += batch.layout.size
        return logits(model, batch.layout), partial(self._loss_of, batch, old, reference)

    def _loss_of(
        self, batch: MicroBatch, old: Tensor | None, reference: Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """Return the sum of the responses' losses, and 0 as Megatron's token count: `reduce` divides instead."""
        shape = self.models.shape
        logprobs, entropy = token_logprobs(out, batch.layout.targets, self.models.temperature, shape.vocabulary)
        old = self._old_logprobs(batch, logprobs, old)
        terms = Terms(
            logprobs=logprobs,
            old=old,
            reference=reference,
            entropy=entropy,
            advantages=batch.advantages,
            weights=batch.weights,
            rollout=batch.rollout,
            response=batch.response,
            responses=len(batch.members),
            whole=_sum_over_context,
            statistics=self._statistics,
            sampled=self._sampled_logprobs(batch, logprobs.detach(), old),
        )
        loss = self._loss(terms, self._coefficients)
        self._add_metrics(batch, logprobs.detach(), old, loss)
        return loss.total, torch.zeros((), dtype=torch.int, device=out.device), None

    def _old_logprobs(self, batch: MicroBatch, logprobs: Tensor, old: Tensor | None) -> Tensor:
        """[T] log-probabilities in the denominator of the ratio, by `algorithm.old_policy`; `old`: the old policy's."""
        if self.config.algorithm.old_policy == "behavior":
            return logprobs.detach()
        if self.config.algorithm.old_policy == "rollout":
            return batch.rollout
        assert old is not None
        return old

    def _sampled_logprobs(self, batch: MicroBatch, logprobs: Tensor, old: Tensor) -> Tensor:
        """[T] the trainer's log-probabilities under the weights that sampled each token.

        Those are the policy's weights, or for tokens that are one update old the old policy's. The config refuses
        `algorithm.mismatch` where older tokens occur.
        """
        return torch.where(batch.behind, old, logprobs) if self.config.algorithm.old_policy == "previous" else logprobs

    def _add_metrics(self, batch: MicroBatch, logprobs: Tensor, old: Tensor, loss: Loss) -> None:
        """Add the micro-batch's figures to the step's metrics."""
        metrics = self.metrics
        gap, divergence = mismatch(logprobs, batch.rollout)
        metrics.worst_gap(gap)
        if not self.ranks.judges:
            return
        metrics.loss += float(loss.total.detach())
        metrics.kl += float(loss.kl)
        metrics.entropy += float(loss.entropy)
        metrics.clipped += float(loss.clipped)
        metrics.mismatch_kl += divergence
        metrics.scored_tokens += logprobs.numel()
        if logprobs.numel():
            metrics.old_ratio_max = max(metrics.old_ratio_max, float((logprobs - old).max().exp()))

    def reduce(self, responses: int, trained: Callable[[float, float], None] = lambda started, ended: None) -> None:
        """Divide the gradient by the step's denominator and reduce it over replicas, once.

        `responses`: those of the step, prompts times group size. Held windows are trained first; `trained` is called
        after each with the times at which it began and ended (seconds since the epoch). A collective of all ranks, also
        of those that got no group; they wait for each other on the host first. Raises MetronomeError if the gradient is
        not finite.
        """
        self._train_held(trained)
        denominator = self._denominator = self._step_denominator(responses)
        self.ddp.scale_gradients(1.0 / denominator)
        finalize_model_grads([self.ddp], None)
        buffers = self.ddp.buffers + self.ddp.expert_parallel_buffers
        finite = all(bool(torch.isfinite(buffer.grad_data).all()) for buffer in buffers)
        if self.ranks.worst(0.0 if finite else 1.0, everyone=True):
            raise MetronomeError(
                "the gradient of this step is not finite; the update was not made (weights are unchanged). "
                "Lower train.learning_rate or train.max_grad_norm"
            )

    def _step_denominator(self, responses: int) -> float:
        """Return what the summed gradient is divided by.

        The loss's aggregation gives it. With an advantage of `only_unequal` it is multiplied by the share of unequal
        groups.
        """
        metrics = self.metrics
        counts = self.ranks.gather(LossCounts(metrics.loss_tokens, metrics.groups, metrics.unequal))
        tokens = sum(count.tokens for count in counts)
        unequal = sum(count.unequal for count in counts)
        divisor = self._loss.denominator(responses, tokens, self.config.rollout.max_new_tokens)
        only_unequal = advantage_of(self.config.algorithm.advantage).only_unequal
        return divisor * unequal / sum(count.groups for count in counts) if only_unequal and unequal else divisor

    def decide(self) -> None:
        """Let gradient control change the gradient or skip the update. Raises BadInput if a user's control fails."""
        self._decided = self.control is None or self.control.act()

    def update(self) -> tuple[float, float]:
        """Clip the gradient and make the optimizer's step. Returns (gradient norm before clipping, learning rate used).

        Calls `decide` if it was not called. If gradient control skips the update, nothing changes.
        """
        if self._decided is None:
            self.decide()
        rate = float(self.optimizer.param_groups[0]["lr"])
        if not self._decided:
            return float(self.optimizer.get_grad_norm()), rate
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return float(norm), rate

    def figures(self) -> TrainingFigures:
        """Return the step's figures over all ranks, by the keys of steps.jsonl; after `reduce`.

        A collective of all ranks.
        """
        assert self._denominator is not None
        ranks = self.ranks.gather(RankMetrics(self.metrics, self.ranks.leader, self.platform.peak_bytes()))
        merged = StepMetrics.merged(ranks, self._denominator, self._loss.aggregation == "response")
        return {**merged, **self.control.figures()} if self.control is not None else merged


def _sum_over_context(sums: Tensor) -> Tensor:
    """Sums over this context rank's tokens → sums over the tokens of the whole row."""
    if sums.numel() and parallel_state.get_context_parallel_world_size() > 1:  # these ranks hold equally many sums
        dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    return sums
