"""The tables of what a run starts from: name, model, problems, reward."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from engine.config.marks import CONTENT, FIXED, FIXED_FILES, FIXED_SETS, PLACE, REWARD_CODE, ReadIf
from engine.config.table import Table

NAME = re.compile("([A-Za-z0-9_-][A-Za-z0-9._-]*)?")
FUNCTION_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}(?<!_std)")


Accepted = Literal["weights", "tokenizer", "prompts", "reward", "algorithms"]


class Run(Table):
    """The run as a whole."""

    name: Annotated[str, PLACE] = ""
    """Name of the run folder in `output`. Empty: the recipe's name and the start time, so that two runs never share a
    folder."""
    seed: Annotated[int, FIXED] = Field(default=0, ge=0)
    """Seed of the prompts' order, of sampling, and of the trainer's random streams."""
    output: Annotated[str, PLACE] = "runs"
    """Folder that holds run folders, policies from the registry, caches and the MLflow store."""
    resumes: int = Field(default=3, ge=0)
    """Largest number of resumes in a row without a new checkpoint or a finished stage between them. Three survive the
    replacement of a node."""
    accept: tuple[Accepted, ...] = ()
    """Changes that a resume, an evaluation or a registration of this command accepts, since the run was trained with
    something else: "weights" and "tokenizer" of `model.path`; in a resume also "prompts", and the code of the "reward"
    or of the "algorithms". A later `--resume` does not keep it."""
    dry: bool = False
    """Check layout, memory per device and batch arithmetic, print them and stop. This needs no device, no weights and
    no data."""

    @model_validator(mode="after")
    def _check_name(self) -> Run:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"run.name = {self.name!r}: expected letters, digits, dots, hyphens and underscores, not starting "
                "with a dot"
            )
        return self


class DryRun(Table):
    """Settings of the dry run (`run.dry`)."""

    joining: int = Field(default=0, ge=0)
    """Number of instances that will be started for the run on other nodes and join it (docs/operate.md). The dry
    run, and the check of how many files the orchestrator may open, add them to the run's own."""


class Model(Table):
    """The base model."""

    path: Annotated[str, CONTENT] = "data/quickstart_model"
    """Hugging Face folder with config.json, tokenizer files and safetensors, here or on s3://, or a model of the hub,
    owner/name or owner/name@revision. It is downloaded once, into HF_HOME (docs/data.md). The default is the tiny Qwen3
    that comes with Metronome."""
    dtype: Annotated[Literal["float32", "bfloat16"], FIXED] = "float32"
    """Type of the weights in the rollout instances; the trainer's is train.dtype. With "bfloat16" ratio_gap_limit must
    be 0 or at least 0.2, and the embedded engine needs a processor with AVX512_BF16 or AMX. Give both sides the same
    type, else small updates are lost in the rounding (docs/rollouts.md)."""
    head_dtype: Annotated[Literal["model", "float32"], FIXED] = "model"
    """Type of the logits, in trainer and instances. With "float32" those of a bfloat16 model are not rounded to
    bfloat16, so that both sides agree better (docs/rollouts.md, Weight sync). vLLM has it from release 0.32 on, so not
    yet on NPUs."""
    convert: Literal["check", "skip"] = "check"
    """What the stage `convert` does. "check": compare with Hugging Face, in fp32 on the host. "skip": read
    config.json and the tokenizer."""


TAKEN = frozenset({"messages", "documents", "add_generation_prompt", "strftime_now"})
"""Variables of a chat template that are never the user's."""


class TrainingSet(Table):
    """One of several problem sets to train on."""

    path: str
    weight: PositiveFloat | None = None
    """Share of the set's prompts among those of an epoch, relative to the other sets' weights."""


class DataColumns(Table):
    """The columns of problem and answer, if the rows are of no known format (docs/data.md, Formats of rows). A dot
    leads into an object or a list: "reward_model.ground_truth", "prompt.0.content". A set without such a column is read
    by its known names."""

    problem: str = ""
    """Column with the problem: a text, or a list of messages."""
    answer: str = ""
    """Column with the answer."""


class Data(Table):
    """The problem sets, with rows as DeepScaleR, GSM8K, TRL, verl or OpenAI have them (docs/data.md, Formats of rows).
    A set is a .json, .jsonl or .parquet file or a folder of them, on disk or s3://, or a dataset of the Hugging Face
    hub (owner/name, owner/name:split or owner/name:config/split@revision)."""

    train: Annotated[str | list[str | TrainingSet], FIXED_SETS] = "data/addition_train.jsonl"
    """Problem set to train on. A relative path is tried from the current folder, then from Metronome's own. A list of
    sets is trained on as one set; if each is a table `{path = "…", weight = 2.0}`, an epoch has prompts of each set in
    proportion to its weight."""
    columns: Annotated[DataColumns, FIXED] = DataColumns()
    heldout: str = "data/addition_heldout.jsonl"
    """Problem set that is never trained on, and that is evaluated where `evaluate.benchmark` is empty. Empty:
    `heldout_fraction` of `train` is held out instead."""
    heldout_fraction: Annotated[float, FIXED] = Field(default=0.0, ge=0, lt=1)
    """Share of `train` to hold out. A problem's own text decides whether it is held out, so the choice stays when rows
    come or go. Set it only with `heldout` empty or not given; 0: the problems of `heldout`."""
    decontaminate: Annotated[list[str], FIXED_FILES] = Field(default_factory=lambda: ["benchmark"])
    """Problem sets whose problems are left out of the training. "benchmark" stands for the held-out problems and those
    of `evaluate.benchmark`. Empty: nothing is left out."""
    prompt_template: Annotated[str, FIXED] = "{problem}"
    """Prompt of a problem: a text with `{problem}` in it, or "chat" for the tokenizer's chat template around the row's
    messages, or around the problem as one user message. `{NAME}` in a text stands for another column of the row, unless
    it is the argument of a LaTeX command; `{{NAME}}` stands for the text {NAME}. With rollout.program any text that its
    conversations begin with."""
    system: Annotated[str, FIXED] = ""
    """System message put before a row's messages that have none, in training and evaluation. Needs "chat"."""
    instruction: Annotated[str, FIXED] = ""
    """Text after the user's last message, on a line of its own unless it begins with white space. Needs "chat"."""
    chat_template_kwargs: Annotated[dict[str, Any], FIXED] = {}
    """Variables of the tokenizer's chat template: `enable_thinking = false` in [data.chat_template_kwargs]. `tools` is
    a list of tables, the tools that every prompt describes (docs/programs.md). Needs "chat"."""

    @field_validator("train", mode="before")
    @classmethod
    def _check_train(cls, given: Any) -> Any:  # noqa: ANN401
        for one in given if isinstance(given, list) else [given]:
            keys = one.keys() if isinstance(one, dict) and isinstance(given, list) else ()
            if not isinstance(one, str | TrainingSet) and ("path" not in keys or set(keys) - {"path", "weight"}):
                raise ValueError(
                    f"data.train = {given!r}: expected a path, or a list of paths or of tables such as "
                    '{path = "math.jsonl", weight = 2.0}'
                )
        return given

    @model_validator(mode="before")
    @classmethod
    def _no_default_heldout(cls, given: Any) -> Any:  # noqa: ANN401
        """A fraction without a file means no file, not the default one."""
        if isinstance(given, dict) and given.get("heldout_fraction") and "heldout" not in given:
            return {**given, "heldout": ""}
        return given

    @model_validator(mode="after")
    def _check_heldout(self) -> Data:
        if bool(self.heldout) == bool(self.heldout_fraction):
            raise ValueError(
                f"data.heldout = {self.heldout!r} and data.heldout_fraction = {self.heldout_fraction:g}: give either "
                "data.heldout (a problem set) or, with data.heldout empty, data.heldout_fraction (a share of "
                "data.train above 0)"
            )
        return self

    @model_validator(mode="after")
    def _check_template(self) -> Data:
        for key in ("system", "instruction", "chat_template_kwargs"):
            if getattr(self, key) and self.prompt_template != "chat":
                raise ValueError(
                    f'data.{key} needs data.prompt_template = "chat"; with a template of your own, remove data.{key} '
                    "and put what it says into that template"
                )
        _check_plain(self.chat_template_kwargs)
        if taken := sorted(TAKEN & self.chat_template_kwargs.keys()):
            raise ValueError(f"data.chat_template_kwargs.{taken[0]}: Metronome itself gives this variable")
        tools = self.chat_template_kwargs.get("tools", [])
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError(
                f"data.chat_template_kwargs.tools = {tools!r:.200}: expected a list of tables, each a function's "
                "JSON schema, as OpenAI's API has it"
            )
        return self

    @model_validator(mode="after")
    def _check_sets(self) -> Data:
        if not self.sets:
            raise ValueError("data.train = []: expected at least one problem set")
        weighted = [one for one in self.sets if one.weight is not None]
        if weighted and len(weighted) < len(self.sets):
            raise ValueError("data.train: give each of its sets a weight, or none")
        return self

    @property
    def sets(self) -> tuple[TrainingSet, ...]:
        """The problem sets to train on."""
        given = [self.train] if isinstance(self.train, str) else self.train
        return tuple(one if isinstance(one, TrainingSet) else TrainingSet(path=one) for one in given)


def _check_plain(variables: dict[str, Any]) -> None:
    for name, value in variables.items():
        try:
            json.dumps(value)
        except TypeError:  # a date or a time, which a checkpoint cannot hold
            raise ValueError(
                f"data.chat_template_kwargs.{name} = {value}: must be a text, a number, true or false, or a list or a "
                "table of these"
            ) from None


OnFault = Literal["stop", "zero", "exclude"]
"""What follows when a response's reward is not known."""


class WeightedReward(Table):
    """One of several functions of a reward."""

    function: str
    """As reward.function."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """What its values are multiplied with in the score. 0: they are only logged."""
    name: str = ""
    """Name of its figures. Empty: the name of the function."""


OWN_CODE = ReadIf(
    lambda config: config.rollout.program or any(":" in one.function for one in config.reward.named),
    "with a reward of your own or rollout.program",
)


class Reward(Table):
    """How a response is scored."""

    function: Annotated[str, REWARD_CODE] = "exact"
    """The reward: "math" or "exact" (built in), or a function of your own, "file.py:function" or
    "package.module:function"."""
    functions: Annotated[list[WeightedReward], REWARD_CODE] = []
    """Several rewards instead of reward.function: [{function = "math", weight = 1.0}, {function = "file.py:function",
    weight = 0.2, name = "format"}]. The score is the weighted sum; the mean of each is logged as reward/NAME."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that one call may take. After that its process is killed. math-verify needs milliseconds."""
    on_timeout: OnFault = "zero"
    """What follows when a call takes longer. "stop": the run stops after a checkpoint. "zero": the responses score 0.
    "exclude": they are left out of the training, and the advantages of their group are those of the other responses.
    All are counted. If all scores of the first step time out, the run stops after it in any case."""
    on_error: OnFault = "stop"
    """What follows when a reward of your own raises, or returns anything but one finite number per response; the values
    are those of `on_timeout`. A built-in reward never stops a run: with "stop" it scores 0."""
    workers: PositiveInt = 1
    """Number of verifier processes. One keeps up with a small model; raise it when verifying is slow."""
    memory_gb: Annotated[float, OWN_CODE] = Field(default=16.0, ge=0)
    """Limit in GiB of the memory (RLIMIT_DATA) of each process of a reward of your own: beyond it, it gets a
    MemoryError. A built-in reward has 0.5 GiB. 0: no limit."""
    environment: Annotated[list[str], OWN_CODE] = []
    """Names of further environment variables that a reward may see, for example the key of a judge. It sees PATH, HOME,
    locale, caches, devices and Python's own, but neither METRONOME_TOKEN nor keys of S3 or MLflow."""

    @model_validator(mode="before")
    @classmethod
    def _replace_default(cls, values: Any) -> Any:  # noqa: ANN401
        given = isinstance(values, dict) and values.get("functions") and "function" not in values
        return {**values, "function": ""} if given else values

    @model_validator(mode="after")
    def _check_functions(self) -> Reward:
        if self.functions and self.function:
            raise ValueError(
                f'reward.functions does not go with reward.function = "{self.function}": give one of them; beside a '
                'recipe that has reward.function, set reward.function = ""'
            )
        names = [one.name for one in self.named]
        for name in names if self.functions else ():
            if not FUNCTION_NAME.fullmatch(name):
                raise ValueError(
                    f"reward.functions: name = {name!r}: a name has 1 to 100 letters, digits and _ - ., and "
                    "does not end in _std"
                )
            if names.count(name) > 1:
                raise ValueError(f'reward.functions: two functions are called {name!r}: give each a name = "..."')
        return self

    @property
    def named(self) -> list[WeightedReward]:
        """All functions, each of `functions` with a name; that of `function` has none."""
        if not self.functions:
            return [WeightedReward(function=self.function)]
        return [one.model_copy(update={"name": one.name or one.function.rpartition(":")[2]}) for one in self.functions]

    @property
    def label(self) -> str:
        """The reward in one text: the function, or "1 * math + 0.2 * file.py:function"."""
        return self.function or " + ".join(f"{one.weight:g} * {one.function}" for one in self.functions)

    @property
    def uses_math(self) -> bool:
        """Whether the built-in reward "math" grades answers."""
        return any(one.function == "math" for one in self.named)

    @property
    def is_own(self) -> bool:
        """Whether every function is the user's own, so that no built-in reward reads an answer."""
        return all(":" in one.function for one in self.named)
