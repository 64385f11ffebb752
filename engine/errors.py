"""The errors that Metronome raises on purpose. Each message says what was wrong, where, and what would be right."""


class MetronomeError(Exception):
    """Base of all errors below; the command line prints its message and exits with 1."""


class BadInput(MetronomeError):
    """The user's input (file, key, value, model, reward) cannot be used; the command line exits with 2."""


class StaleRolloutError(MetronomeError):
    """A response was sampled from a weight version that the mode does not accept for the step
    (docs/architecture.md, On-policy is checked)."""


class RatioGapError(MetronomeError):
    """Trainer and rollout instance disagree on the log-probabilities of the same tokens by more than the limit."""


class Stopped(MetronomeError):
    """A signal has ended the run."""


class TakenOver(MetronomeError):
    """Another orchestrator, or another flow, writes the run folder now, so this one stops."""


class DeadlineError(MetronomeError):
    """A wait reached its deadline; the message names what it waited for."""


class TooManyFiles(MetronomeError):
    """This process cannot open another file or connection; the message names its limit."""


class RewardError(MetronomeError):
    """A reward function raised, or did not return a score for each response."""


class CheckpointError(MetronomeError):
    """A checkpoint could not be written, published, read or deleted; the message names it, its place and the reason."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint do not match its marker; an older checkpoint may be intact."""


class DiskError(MetronomeError):
    """The disk of the run folder is full or broken."""


class DeviceMemoryError(MetronomeError):
    """A device ran out of memory. The message compares what was in use with the dry run's sum, and names the keys to
    change."""


class ProcessDied(MetronomeError):
    """A process of the run ended unexpectedly."""


class TransferError(MetronomeError):
    """Weights or groups did not arrive intact. Weights: a member of the transfer died or was closed, and the transfer
    may be retried. A group: its bytes differ from those that were packed."""


class ServiceConflict(MetronomeError):
    """A request of an outside program conflicts with the state of the service: another group at the same place, a step
    that is over, or a lease whose groups were leased again."""


class ServiceFull(MetronomeError):
    """The service has reached its limit of stored bytes or of responses being sampled; it can take more later."""


class StoreError(MetronomeError):
    """The store of groups (queue.store) does not answer; the message names the part of the store and the request."""


class WeightSyncError(MetronomeError):
    """An instance does not have the weights that the trainer sent. The message names the instance and the tensor, or
    the figures that differ."""
