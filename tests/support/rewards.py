"""Rewards that tests give to runs as users would: by file."""

import os
import time

from engine.types import Score


def even(prompt, responses):
    """Share of even token ids."""
    return [sum(token % 2 == 0 for token in r.token_ids) / max(1, len(r.token_ids)) for r in responses]


def even_or_not_known(prompt, responses):
    """`even`, but for one response of four, by its seed, the reward is not known."""
    scores = zip(responses, even(prompt, responses), strict=True)
    return [Score(None, excluded=True) if one.seed % 4 == 0 else value for one, value in scores]


def hangs_on_one(prompt, responses):
    if prompt.problem.startswith("3+"):
        time.sleep(1000)
    return equal(prompt, responses)


def raises(prompt, responses):
    if prompt.problem.startswith("3+"):
        raise RuntimeError("no score for this one")
    return even(prompt, responses)


def too_few(prompt, responses):
    return [0.0]


def _slow(seconds):
    def reward(prompt, responses):
        time.sleep(seconds)
        return even(prompt, responses)

    return reward


after_100_ms = _slow(0.1)
after_500_ms = _slow(0.5)
after_3_s = _slow(3)
after_30_s = _slow(30)


def even_of_odd(prompt, responses):
    """`even` for problems that begin with an odd number, else all equal: nothing to learn."""
    odd = int(prompt.problem.partition("+")[0]) % 2
    return even(prompt, responses) if odd else [0.0] * len(responses)


def equal(prompt, responses):
    return [1.0] * len(responses)


def sees_its_key_only(prompt, responses):
    """As `even`; raises unless the environment has the judge's key and none of the run's own secrets."""
    own = [
        "METRONOME_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "MLFLOW_TRACKING_PASSWORD",
        "PREFECT_API_AUTH_STRING",
        "HF_TOKEN",
    ]
    if "JUDGE_KEY" not in os.environ or any(name in os.environ for name in own):
        raise RuntimeError(f"the environment has {sorted(os.environ)}")
    return even(prompt, responses)
