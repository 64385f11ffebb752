"""The tables of the stages beside generate, reward and train (docs/concepts.md)."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from engine.config.table import Table

REFERENCE_STAGE = "reference"
"""The stage of the reference model on devices of its own."""
REFERENCE_COLUMN = "reference_logprobs"
"""The column that it gives."""
OWN_COLUMNS = ("prompt", "responses", "logprobs", "scores")
"""The columns that every row gets from the stages generate and reward."""
ROUTES_COLUMN = "routes"
"""The column of the experts of each token, with algorithm.routing_replay."""
OWN_STAGES = ("generate", "reward", "train")
"""The stages of every run. A recipe has no tables for them."""


class Stage(Table):
    """A stage of the plane, [stages.NAME]. NAME "reference" is the reference model on separate devices: it gives the
    column reference_logprobs and needs algorithm.kl_coef above 0. Any other name is that of your own program, which
    leases rows and writes columns (docs/service.md)."""

    needs: list[str] = ["prompt", "responses"]
    """Columns that a row must have to be ready for the stage: prompt, responses, logprobs, scores, reference_logprobs
    (with [stages.reference]), routes (with algorithm.routing_replay), and what other stages give. "reference" has the
    default."""
    gives: list[str] = []
    """Names of the columns that the program writes, at least one: small letters, digits and underscores. The trainer
    waits for them. Only for programs."""
    reward_weight: float = 0.0
    """Weight with which the stage's column is added to the reward. The stage then gives exactly one column, with one
    number for each response. 0: it does not enter the reward. Only for programs."""
    lease_s: PositiveFloat = 60.0
    """Seconds that the stage has for a window before the window is leased again."""
    wait_s: PositiveFloat = 600.0
    """Seconds that rows of a step wait for a stage that makes no progress. After that the run fails and names the
    stage."""
    budget: int = Field(default=0, ge=0)
    """Largest number of tokens of a window of the stage. 0: as many as in a window of the trainer."""
    tensor: PositiveInt = 1
    """Ranks that share each layer's matrices. Only for "reference", as are the keys that follow."""
    pipeline: PositiveInt = 1
    """Pipeline stages that share the model's layers."""
    context: PositiveInt = 1
    """Ranks that share the tokens of a micro-batch."""
    data: PositiveInt = 1
    """Replicas of the model, each of which takes windows on its own."""
    devices: list[int] = []
    """Numbers of the CPU cores that its ranks share evenly, or of the accelerators of its ranks. Empty: the operating
    system places the ranks, or they take the accelerators after the trainer's."""
    restarts: int = Field(default=2, ge=0)
    """Number of times in a row that its ranks are restarted after they died or hung, without progress in between."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.context * self.data
