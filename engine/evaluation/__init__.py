"""Evaluation: benchmarks, avg@k, pass@k, maj@k with intervals by problem, paired comparisons, evaluation inside a run."""

from engine.evaluation.figures import accuracy as accuracy
from engine.evaluation.run import evaluate as evaluate
