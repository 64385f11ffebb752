"""Every error that Metronome raises on purpose. Each message says what was wrong, where, and what would be right."""


class MetronomeError(Exception):
    """Base of all errors below; the command line prints its message and exits with 1."""


class BadInput(MetronomeError):
    """The user's input (file, key, value, model, reward) can't be used; the command line exits with 2."""


class StaleRolloutError(MetronomeError):
    """A response was sampled from another weight version than the step's mode accepts
    (docs/architecture.md, On-policy is checked)."""


class RatioGapError(MetronomeError):
    """Trainer and rollout instance disagree on the log-probabilities of the same tokens by more than the limit."""


class Stopped(MetronomeError):
    """The run was told to end, by a signal."""


class DeadlineError(MetronomeError):
    """A wait ran into its deadline; the message names what was waited for."""


class RewardError(MetronomeError):
    """A reward function raised, or returned something that is no score for each response."""


class CheckpointError(MetronomeError):
    """A checkpoint could not be written, published, read or deleted; the message names it, its place and the reason."""


class ProcessDied(MetronomeError):
    """A process of the run ended when it should not have."""


class TransferError(MetronomeError):
    """Weights did not come whole from the trainer: a member of the transfer died or was closed.
    It may be tried again."""


class WeightSyncError(MetronomeError):
    """An instance does not hold what the trainer sent; the message names the instance and the tensor or the figures."""
