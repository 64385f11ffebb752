"""Makes vLLM report one quantity on every device: log softmax(logits / temperature), before top-k and top-p, as the
embedded engine and the trainer have it.

vLLM's "processed_logprobs" are those after top-k and top-p. vllm-ascend (0.23) ignores --logprobs-mode and reports
those before the temperature. `logprob_check` asks every instance at its start.
"""

from __future__ import annotations

from typing import Any

PROCESSED = "processed_logprobs"
"""vLLM's name of log-probabilities after the temperature (--logprobs-mode)."""
GREEDY = 1e-5
"""vLLM takes the most likely token at a temperature below this, and does not apply the temperature."""


def report_unrestricted() -> None:
    """Change vLLM's samplers in this process. vllm-ascend's is a subclass of the first; CUDA uses the second (0.32)."""
    from vllm import __version__
    from vllm.platforms import current_platform
    from vllm.v1.sample.sampler import Sampler

    change_sampler(Sampler)
    if current_platform.is_cuda() and not __version__.startswith("0.23."):  # whose second is another
        from vllm.v1.worker.gpu.sample.sampler import Sampler as SecondSampler

        change_second_sampler(SecondSampler)


def change_sampler(sampler: Any) -> None:  # noqa: ANN401
    """Change the class of vLLM's first model runner, whose `sample` returns tokens and rows of log-probabilities."""
    sample = sampler.sample

    def sample_unrestricted(self: Any, logits: Any, metadata: Any, *others: Any, **named: Any) -> Any:  # noqa: ANN401
        """logits [requests, vocabulary] → token ids [requests], log-probabilities [requests, vocabulary]."""
        own = metadata.top_k is None and metadata.top_p is None and self.logprobs_mode == PROCESSED
        if own or metadata.all_greedy or metadata.max_num_logprobs is None:
            return sample(self, logits, metadata, *others, **named)
        temperature = metadata.temperature.masked_fill(metadata.temperature < GREEDY, 1.0)[:, None]
        logprobs = self.compute_logprobs(logits / temperature)
        return sample(self, logits, metadata, *others, **named)[0], logprobs

    sampler.sample = sample_unrestricted


def change_second_sampler(sampler: Any) -> None:  # noqa: ANN401
    """Change the class of vLLM's second model runner, whose `_sample_random` returns the tokens and the logits from
    which the log-probabilities are computed."""
    sample = sampler._sample_random

    def sample_unrestricted(self: Any, logits: Any, *others: Any) -> Any:  # noqa: ANN401
        """logits [rows, vocabulary] after the temperature → token ids [rows], these logits."""
        *_, top_k, top_p, _ = others
        own = top_k is None and top_p is None
        unrestricted = logits if own else logits.clone()  # top-k and top-p may overwrite the logits
        return sample(self, logits, *others)[0], unrestricted

    sampler._sample_random = sample_unrestricted
