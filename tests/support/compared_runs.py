"""Runs with figures that are given, for the comparison of runs."""

import math
import random

from engine.tools.comparison.run_figures import ComparedRun


def step(number, seconds=10.0, tokens=1000.0, reward=0.5, **more):
    return {
        "step": number,
        "step_s": seconds,
        "tokens_per_s_per_device": tokens / seconds,
        "reward_mean": reward,
        "sync_s": 1.0,
        "check_s": 0.3,
        "wait_s": 3.7,
        "train_s": 4.0,
        "update_s": 0.5,
        "rollout_s": 5.0,
        **more,
    }


def run(name="one", seconds=10.0, reward=0.5, noise=0.0, steps=40, seed=0, **more):
    chance = random.Random(seed)
    draws = [(chance.gauss(0, noise), chance.gauss(0, noise / 10)) for _ in range(steps)]
    rows = [step(n, seconds * math.exp(slow), reward=reward + better) for n, (slow, better) in enumerate(draws)]
    return ComparedRun(name, name, {"train.mode": name}, rows, **more)


def evaluation(value, low, high, **more):
    return {
        "step": 40,
        "weight_version": 40,
        "benchmark": "b",
        "problems": 100,
        "samples": 1,
        "avg_at_k": value,
        "ci_low": low,
        "ci_high": high,
        **more,
    }
