"""The trained side: gradients accumulate group by group, one update closes the step (Algorithm 1, lines 11–21)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from engine.algorithm.losses import LOSSES, Coefficients, Loss, Terms
from engine.algorithm.mismatch import mismatch
from engine.config import Config
from engine.errors import MetronomeError
from engine.model.build import logits
from engine.model.logprobs import token_logprobs
from engine.model.tri_model import TriModel, score
from engine.trainer.batch import MicroBatch, micro_batches
from engine.trainer.tally import Tally
from engine.types import Group


class Policy:
    """Policy, frozen copies, optimizer and schedule of one replica."""

    def __init__(self, config: Config, models: TriModel) -> None:
        self.config = config
        self.models = models
        self.tally = Tally()
        algorithm = config.algorithm
        self._loss = LOSSES[algorithm.loss]
        self._coefficients = Coefficients(
            algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef, algorithm.entropy_coef
        )
        self.ddp = DistributedDataParallel(
            models.policy.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            models.policy,
        )
        self.optimizer = _optimizer(config, self.ddp)
        self.scheduler = _scheduler(config, self.optimizer)

    def start_step(self) -> None:
        """Drop gradients and sums, also those of a half-done step."""
        self.tally = Tally()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def accumulate(self, window: Sequence[Group]) -> None:
        """Score the groups under all models and add their gradient; no optimizer step."""
        started = time.perf_counter()
        train = self.config.train
        shared = self.config.attention.shared_prompt
        batches = list(micro_batches(window, self.config.algorithm.advantage, train.micro_batch_tokens, shared))
        scored = [(batch, *self._frozen_scores(batch)) for batch in batches]
        self._forward_backward(iter(scored), len(scored))
        for group in window:
            self.tally.add_group(group)
        self.tally.train_s += time.perf_counter() - started

    def _frozen_scores(self, batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """Forward-only passes of old policy and reference over the micro-batch."""
        started = time.perf_counter()
        models, temperature = self.models, self.models.temperature
        old = score(models.old, batch.layout, temperature) if models.old is not None else None
        reference = score(models.reference, batch.layout, temperature) if models.reference is not None else None
        self.tally.score_s += time.perf_counter() - started
        return old, reference

    def _forward_backward(self, window: Iterator[tuple[MicroBatch, Tensor | None, Tensor | None]], count: int) -> None:
        """Megatron's schedule over a window's micro-batches: gradients added to the buffer, nothing finalised."""
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=window,
            model=[self.ddp],
            num_microbatches=count,
            seq_length=1,  # unused with variable_seq_lengths
            micro_batch_size=1,
            forward_only=False,
        )

    def _forward(
        self, window: Iterator[tuple[MicroBatch, Tensor | None, Tensor | None]], model: torch.nn.Module
    ) -> tuple[Tensor, partial[tuple[Tensor, Tensor, None]]]:
        """Megatron's forward step: the micro-batch's logits, and the function that makes its loss of them."""
        batch, old, reference = next(window)
        self.tally.computed_tokens += batch.layout.size
        return logits(model, batch.layout), partial(self._loss_of, batch, old, reference)

    def _loss_of(
        self, batch: MicroBatch, old: Tensor | None, reference: Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """The sum over responses of their losses; the count is 0, since the step's denominator is ours (contract 2)."""
        logprobs, entropy = token_logprobs(out, batch.layout.targets, self.models.temperature)
        if self.config.algorithm.old_policy == "behavior":
            old = logprobs.detach()
        elif self.config.algorithm.old_policy == "rollout":
            old = batch.rollout
        assert old is not None
        loss = self._loss(Terms(logprobs, old, reference, entropy, batch.advantages, batch.weights), self._coefficients)
        self._tell(batch, logprobs.detach(), old, loss)
        return loss.total, torch.zeros((), dtype=torch.int), None

    def _tell(self, batch: MicroBatch, logprobs: Tensor, old: Tensor, loss: Loss) -> None:
        """Add the micro-batch's figures to the step's tally."""
        tally = self.tally
        tally.loss += float(loss.total.detach())
        tally.kl += float(loss.kl)
        tally.entropy += float(loss.entropy)
        tally.clipped += float(loss.clipped)
        gap, divergence = mismatch(logprobs, batch.rollout)
        tally.worst_gap(gap)
        tally.mismatch_kl += divergence
        tally.scored_tokens += logprobs.numel()
        if logprobs.numel():
            tally.old_ratio_max = max(tally.old_ratio_max, float((logprobs - old).max().exp()))

    def reduce(self, denominator: int) -> None:
        """Divide the sums by the step's N·G and reduce over replicas, once. Raises MetronomeError if it is not finite."""
        self.ddp.scale_gradients(1.0 / denominator)
        self.ddp.start_grad_sync()
        self.ddp.finish_grad_sync()
        if not all(bool(torch.isfinite(buffer.grad_data).all()) for buffer in self.ddp.buffers):
            raise MetronomeError("the gradient of this step is not finite; the update was not made (weights are unchanged). "
                                 "Lower train.learning_rate or train.max_grad_norm")

    def update(self) -> tuple[float, float]:
        """Clip and step. Returns (gradient norm before clipping, learning rate used)."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return float(norm), rate


def _optimizer(config: Config, ddp: DistributedDataParallel) -> MegatronOptimizer:
    train = config.train
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.learning_rate,
            min_lr=0.0,
            weight_decay=train.weight_decay,
            adam_beta1=train.betas[0],
            adam_beta2=train.betas[1],
            clip_grad=train.max_grad_norm,
            use_distributed_optimizer=False,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )


def _scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Megatron's schedule: linear warm-up (the first of w steps trains at 1/w of the peak), then the chosen decay."""
    train = config.train
    peak, warmup = train.learning_rate, train.warmup_steps
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=peak / warmup if warmup else 0.0,
        max_lr=peak,
        min_lr=0.0,
        lr_warmup_steps=max(0, warmup - 1),
        lr_decay_steps=max(train.steps, warmup + 1),
        lr_decay_style=train.schedule,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=train.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,  # a resumed run takes its position from the checkpoint, its settings from here
        override_opt_param_scheduler=True,
    )
    scheduler.step(increment=0)
    return scheduler
