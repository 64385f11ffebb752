"""What makes a run's numbers besides its settings and its prompts: the base model's weights, its tokenizer, and the
files that the config names as the user's own code. The run folder and each checkpoint have their hashes, and the run
folder a copy of the code, which all processes of the run load.

A resume compares them; an evaluation and a registration compare the model. A difference is refused by name, unless
run.accept names it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from engine.config import Config
from engine.config.marks import Mark, marked_keys, name_code, value_of
from engine.errors import BadInput
from engine.model.shape import content_hash
from engine.run.checkpoint_files import all_complete
from engine.run.files import put_in_place
from engine.run.run_file import InputPart, read_run, update_run
from engine.run.served_model import EXPORTED
from engine.run.user_code import copy_of, find_code

CODE = "code"
"""Folder in the run folder with a copy of the user's code, one folder for each part and hash."""
PARTS = {
    "weights": "the weights or the config.json of the base model (model.path)",
    "tokenizer": "the tokenizer of model.path, its chat template or its end-of-sequence tokens",
    "reward": "the code of the reward or of the program",
    "algorithms": "the code of the advantage, the loss or the gradient control",
}
"""What each part is, for messages."""
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "chat_template.jinja", "generation_config.json"),
)
"""Files of a Hugging Face folder that decide which tokens a text has, and where a response ends."""


Inputs = Mapping[str, InputPart]
"""The inputs of a run, by the names of `PARTS`."""


def find_inputs(config: Config, model: Path, parts: Collection[str] = tuple(PARTS)) -> Inputs:
    """The present inputs: the code that the config names, and the files of `model`, a Hugging Face folder. Reads all
    weights, unless `parts` leaves them out."""
    found: dict[str, InputPart] = {}
    path = str(model.resolve())
    for part in parts:
        if part == "weights":
            found[part] = {"named": "", "hash": content_hash(model), "path": path}
        elif part == "tokenizer":
            found[part] = {"named": "", "hash": _hash([model / name for name in sorted(TOKENIZER)]), "path": path}
        else:
            specs = _specs(config, part)
            found[part] = {"named": " ".join(map(name_code, specs)), "hash": _hash(_code(specs)), "path": ""}
    return found


def record_inputs(config: Config) -> None:
    """Write the inputs to the run's run.json, and copy the user's code to its folder. Only for the process that holds
    the folder's lock. Raises BadInput if they differ from those of an earlier attempt (`check_inputs_kept`), unless
    that one has left no checkpoint: then the run begins again, as after a reward that failed in step 0 and was mended.
    """
    folder = config.folder
    now = find_inputs(config, Path(config.model.path))
    if all_complete(folder / "checkpoints"):
        check_inputs_kept(config, now, read_run(folder).inputs)
    update_run(folder, inputs=dict(now))
    for part in now.keys() - {"weights", "tokenizer"}:
        kept_code(folder, config, part)


def code_of(folder: Path, config: Config, part: str) -> InputPart:
    """The code of a part with which all processes in a run folder work: that of the run's start, or the present one if
    no run has begun there that names the same functions."""
    now = find_inputs(config, Path(), [part])[part]
    before = read_run(folder).inputs.get(part, now)
    return before if before["named"] == now["named"] else now


def kept_code(folder: Path, config: Config, part: str) -> Path | None:
    """The folder of copies of `code_of`, from which a process loads it; None if there is no code. Copies the present
    files to it if they are that code."""
    one = code_of(folder, config, part)
    copies = _copies(folder, part, one)
    files = _code(_specs(config, part))
    missing = [file for file in files if not copy_of(copies, file).exists()]
    for file in missing if one["hash"] == _hash(files) else ():
        copy = copy_of(copies, file)
        copy.parent.mkdir(parents=True, exist_ok=True)
        put_in_place(Path(shutil.copy(file, copy.with_suffix(".partial"))), copy)
    return copies if one["hash"] else None


def _copies(folder: Path, part: str, one: InputPart) -> Path:
    return folder.resolve() / CODE / f"{part}-{one['hash'][:12]}"


def check_model(folder: Path, config: Config, model: Path) -> None:
    """Raise BadInput, as `check_inputs_kept` does, if an evaluation or a registration in a run folder would take a
    changed base model for the run's, or a policy with a changed tokenizer for its policy or for that of one of its
    checkpoints."""
    before = read_run(folder).inputs
    path = str(model.resolve())
    of_base = {"weights", "tokenizer"} if before and before["weights"]["path"] == path else set()
    policies = (folder / "policy", folder / EXPORTED / model.name)
    of_policy = {"tokenizer"} if model.resolve() in [place.resolve() for place in policies] else set()
    parts = [part for part in before if part in of_base | of_policy]
    check_inputs_kept(config, find_inputs(config, model, parts), before)


def check_inputs_kept(config: Config, now: Inputs, before: Inputs) -> None:
    """Raise BadInput if the inputs have changed (`describe_change`)."""
    if change := describe_change(config, now, before):
        raise BadInput(f"run {config.run.name}: {change}")


def describe_change(config: Config, now: Inputs, before: Inputs) -> str:
    """A sentence that names each part of the inputs that has changed, unless run.accept allows it; "" if there is none.
    Parts that are not in both are not compared, nor is code that the config now names otherwise."""
    changed = [
        part
        for part in now
        if part in before and now[part]["named"] == before[part]["named"] and now[part]["hash"] != before[part]["hash"]
    ]
    refused = [part for part in changed if part not in config.run.accept]
    if not refused:
        return ""
    copies = [_copies(config.folder, part, before[part]) for part in refused if before[part]["named"]]
    there = [str(copy) for copy in copies if copy.exists()]
    return (
        f"{' and '.join(PARTS[part] for part in refused)} changed since the run was trained with it; put it back"
        f"{f' (a copy is in {there[0]})' if there else ''}, start a new run with another run.name, or accept "
        f"the change with --set 'run.accept={json.dumps(refused)}'"
    )


def _specs(config: Config, part: str) -> list[str]:
    """The functions of one's own that belong to a part, by the marks of their keys."""
    tables = config.model_dump(mode="json")
    named = [value_of(tables, key) for key, marks in marked_keys(Config, Mark) if marks[-1].part == part]
    each = [one for value in named for one in (value if isinstance(value, list) else [value])]
    specs = [one["function"] if isinstance(one, dict) else one for one in each]
    return [spec for spec in specs if ":" in spec]


def _code(specs: Collection[str]) -> list[Path]:
    return list(dict.fromkeys(file for spec in specs for file in find_code(spec)))


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    there = [file for file in files if file.is_file()]
    for file in there:
        digest.update(f"{file.name}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest() if there else ""
