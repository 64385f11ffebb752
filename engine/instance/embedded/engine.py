"""Continuous batching: requests wait in order of arrival, run in slots, and every step decodes one token of each.

This module knows nothing about HTTP or threads; the thread that owns the engine calls it between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.errors import BadInput
from engine.instance.embedded.cache import BLOCK, ConversationCache, KeyValueCache, Prefill, PromptCache
from engine.instance.embedded.rollout_model import RolloutModel
from engine.instance.embedded.sampling import draw_uniforms, sample_tokens
from engine.instance.embedded.weight_load import Named, WeightLoad
from engine.instance.protocol import Sampling
from engine.instance.refusals import Conflict
from engine.instance.replies import FinishReason, Result
from engine.run.memory import PROMPTS_KEPT, decoded_slots, kept_slots

PIECE = 64
"""Number of tokens of a conversation that are computed, and kept, together."""


@dataclass(eq=False)
class SamplingRequest:
    """A prompt to continue, and the response so far."""

    prompt: tuple[int, ...]
    sampling: Sampling
    reply: Callable[[Result], None]
    """Called once with the result, in the engine's thread, unless the request is cancelled."""
    score_prompt: bool = False
    """Whether to compute the prompt's log-probabilities."""
    on_token: Callable[[int, float], object] | None = None
    """Called with each sampled token and its log-probability, in the engine's thread, before `reply`."""
    prompt_logprobs: list[float] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)
    """One random number in [0, 1) for each token that may be sampled."""

    def add_token(self, token: int, logprob: float) -> FinishReason | None:
        """Append a sampled token. Return the finish reason if the token ends the response, else None."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.on_token is not None:
            self.on_token(token, logprob)
        if logprob != logprob:
            return "error"
        if token in self.sampling.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) == self.sampling.max_tokens else None


class Engine:
    """The state of a rollout instance: slots, queue, pause, weight version. Slot i holds `running[i]`."""

    def __init__(
        self,
        model: RolloutModel,
        slots: int,
        max_context: int,
        deterministic: bool = False,
        conversations: bool = False,
    ) -> None:
        """With `deterministic`, every step decodes all slots at full length, so that no tensor shape depends on the
        load. `conversations`: each prompt may come again with more tokens, so as many as there are slots are kept."""
        self.model = model
        self.slots = slots
        self.max_context = max_context
        self.deterministic = deterministic
        capacity = max_context if deterministic else min(4 * BLOCK, max_context)
        # kernels divide rows between threads: with odd numbers of rows, a row's bits would depend on its slot
        self.rows = decoded_slots(slots, deterministic)
        self.cache = KeyValueCache(
            layers=len(model.layers),
            slots=self.rows,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            capacity=capacity,
        )
        kept = kept_slots(slots, conversations) * max_context
        self.conversations: ConversationCache | None = None
        """The prompt cache, if it keeps what responses have computed."""
        if conversations and not deterministic:
            self.prompts: PromptCache = ConversationCache(model.prefill, kept)
            self.conversations = self.prompts
        else:
            self.prompts = PromptCache(model.prefill, kept, PIECE if conversations else 0)
        self.waiting: deque[SamplingRequest] = deque()
        self.running: list[SamplingRequest] = []
        self.version = 0
        self.generated_tokens = 0
        """Tokens sampled since the start."""
        self.paused = False
        self._load: WeightLoad | None = None
        """The weight update in progress; None between updates."""
        self._mixed = False
        """Whether some weights are new but finish_update has not given them a version."""
        self._on_idle: list[Callable[[], None]] = []

    @property
    def busy(self) -> bool:
        """Whether a step would sample a token."""
        return bool(self.running or (self.waiting and not self.paused))

    # requests -------------------------------------------------------------------------------------

    def submit(self, request: SamplingRequest) -> None:
        """Queue a request. The caller has checked that prompt and max_tokens together fit into the context.

        Raise Conflict after a weight update that failed half-way.
        """
        if self._mixed and self._load is None:
            raise Conflict(
                "a weight update failed half-way: this instance's weights are incomplete until another update succeeds"
            )
        self.waiting.append(request)

    def cancel(self, request: SamplingRequest) -> None:
        """Drop a request without a reply and free its slot. Do nothing if it has ended."""
        if request in self.running:
            self._free_slot(self.running.index(request))
        elif request in self.waiting:
            self.waiting.remove(request)

    def step(self) -> None:
        """Sample the next token of every running response, and the first token of each newly admitted request."""
        decoded = [self._decode()] if self.running else []
        first = [] if self.paused else self._admit()  # after decoding, which also writes to unused slots
        logits = torch.cat([*decoded, *first]) if first else decoded[0]
        uniforms = [request.uniforms[len(request.token_ids)] for request in self.running]
        tokens, logprobs = sample_tokens(logits, [request.sampling for request in self.running], uniforms)
        self._record_tokens(tokens, logprobs)

    def _admit(self) -> list[Tensor]:
        """Move waiting requests into free slots. Return the logits [1, vocabulary] of each request's first token."""
        logits = []
        while admitted := self._take_waiting():
            found = iter(self.prompts.get_prefills([one.prompt for one in admitted if not one.score_prompt]))
            for request in admitted:
                pieces = [self._scored_prefill(request)] if request.score_prompt else next(found)
                self.cache.reserve(len(request.prompt) + 1, self.max_context)
                self.cache.fill(len(self.running), pieces)
                request.uniforms = draw_uniforms(request.sampling)
                self.running.append(request)
                after = pieces[-1].logits
                assert after is not None, "the last piece of a prompt has the logits after it"
                logits.append(after[None])
        return logits

    def _take_waiting(self) -> list[SamplingRequest]:
        """Take the next waiting requests for which there are slots: one, or as many as have together no more prompt
        tokens than `PROMPTS_KEPT` full slots. What is computed of them is in memory at once."""
        taken: list[SamplingRequest] = []
        left = PROMPTS_KEPT * self.max_context
        while self.waiting and len(self.running) + len(taken) < self.slots:
            left -= len(self.waiting[0].prompt)
            if taken and left < 0:
                break
            taken.append(self.waiting.popleft())
        return taken

    def _scored_prefill(self, request: SamplingRequest) -> Prefill:
        """Compute the prompt and its log-probabilities. The cache is not used, because they must come from the current
        weights."""
        computed, request.prompt_logprobs = self.model.scored_prefill(list(request.prompt))
        return computed

    def _decode(self) -> Tensor:
        """Return the logits [running, vocabulary] after the last token of each response."""
        tokens = [request.token_ids[-1] for request in self.running]
        positions = [len(request.prompt) + len(request.token_ids) - 1 for request in self.running]
        if self.deterministic:
            # unused slots take part, at a position that the next prompt overwrites
            spare = [0] * (self.rows - len(tokens))
            return self._forward(tokens + spare, positions + spare, self.max_context)[: len(tokens)]
        length = min(-(-(max(positions) + 1) // BLOCK) * BLOCK, self.max_context)
        self.cache.reserve(length, self.max_context)
        return self._forward(tokens, positions, length)

    def _forward(self, tokens: list[int], positions: list[int], length: int) -> Tensor:
        return self.model.decode(torch.tensor(tokens), torch.tensor(positions), self.cache, length)

    def _record_tokens(self, tokens: list[int], logprobs: list[float]) -> None:
        self.generated_tokens += len(tokens)
        reasons = [
            request.add_token(token, logprob)
            for request, token, logprob in zip(self.running, tokens, logprobs, strict=True)
        ]
        for slot, reason in reversed(list(enumerate(reasons))):  # from the end: _free_slot moves the last response down
            if reason is not None:
                if self.conversations is not None and reason != "error":
                    self._keep_response(self.conversations, slot)
                self._send_result(self.running[slot], reason)
                self._free_slot(slot)

    def _keep_response(self, conversations: ConversationCache, slot: int) -> None:
        """Keep what a slot has of its response: all but the last token, which was not decoded."""
        request = self.running[slot]
        decoded = request.token_ids[:-1]
        computed = self.cache.read(slot, len(request.prompt) + len(decoded))
        conversations.keep_response(request.prompt, decoded, computed)

    def _send_result(self, request: SamplingRequest, reason: FinishReason) -> None:
        request.reply(
            Result(
                token_ids=request.token_ids,
                logprobs=request.logprobs,
                finish_reason=reason,
                version=self.version,
                prompt_logprobs=request.prompt_logprobs,
            )
        )

    def _free_slot(self, slot: int) -> None:
        """Free a slot. The last response moves into it, so that running responses occupy the first slots."""
        last = self.running.pop()
        if slot < len(self.running):
            self.cache.move(len(self.running), slot, len(last.prompt) + len(last.token_ids))
            self.running[slot] = last
        if not self.running:
            self._call_idle()

    def _call_idle(self) -> None:
        waiters = self._on_idle
        self._on_idle = []
        for waiter in waiters:
            waiter()

    # control --------------------------------------------------------------------------------------

    def pause(self, abort: bool, done: Callable[[], None]) -> None:
        """Stop admitting requests; call `done` once nothing runs.

        With `abort` every request, including waiting ones, ends at once with the tokens it has; otherwise the running
        ones finish.
        """
        self.paused = True
        if abort:
            for request in [*self.running, *self.waiting]:
                self._send_result(request, "abort")
            self.running.clear()
            self.waiting.clear()
        self._on_idle.append(done)
        if not self.running:
            self._call_idle()

    def resume(self) -> None:
        """Admit requests again. Raise Conflict while responses drain, during a weight update, and after one that failed
        half-way."""
        if self._on_idle:
            raise Conflict(f"{len(self.running)} responses are still draining; resume when /pause has answered")
        if self._load is not None or self._mixed:
            raise Conflict("a weight update is unfinished; send /finish_weight_update, or, if it failed, start again")
        self.paused = False

    def start_update(self) -> None:
        """Begin a weight update, or restart it. Raise Conflict unless paused and drained."""
        if not self.paused or self.running:
            raise Conflict(f"{len(self.running)} responses are running, paused: {self.paused}; begin the update again")
        self._load = WeightLoad(self.model.hf)

    def check_updating(self) -> None:
        """Raise Conflict unless a weight update is in progress."""
        if self._load is None:
            raise Conflict("no weight update was started; send /begin_weight_update first")

    def lend(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return WeightLoad.lend_parameters. Raise Conflict unless a weight update is in progress."""
        self.check_updating()
        assert self._load is not None
        return self._load.lend_parameters(names)

    def update(self, tensors: Sequence[Named], cast: bool = False) -> None:
        """Copy a bucket of new weights into the parameters; with `cast`, from any dtype.

        Raise Conflict unless a weight update is in progress. Raise BadInput for tensors that do not fit, and end the
        update.
        """
        self.check_updating()
        assert self._load is not None
        try:
            self._load.add_tensors(tensors, cast)
        except BadInput:
            self.fail_update()
            raise
        self._mixed = self._mixed or self._load.touched

    def fail_update(self) -> None:
        """End the update unsuccessfully. If some weights are already new, requests are refused until another update
        succeeds, and waiting ones are aborted."""
        self._load = None
        if self._mixed:
            for request in self.waiting:
                self._send_result(request, "abort")
            self.waiting.clear()

    def finish_update(self, version: int) -> None:
        """Give the new weights their version. Raise Conflict if none were loaded since start_update, BadInput if some
        are missing."""
        if self._load is None or not self._load.touched:
            raise Conflict("no new weights were loaded; send /begin_weight_update and /update_weights first")
        self._load.check_whole()
        self.model.refresh()
        self.prompts.drop_prompts()
        self.cache.clear_slots()
        self.version = version
        self._load = None
        self._mixed = False

    def load(self) -> dict[str, int]:
        """Return the numbers of running and waiting requests, of prompts computed and tokens sampled since the start,
        and the weight version."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "prefills": self.prompts.computed,
            "generated_tokens": self.generated_tokens,
            "weight_version": self.version,
        }
