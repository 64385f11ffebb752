"""How a run began: state that the flow writes into the run folder, for the model registry and for a resume."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from engine.config.keys import STATE, flatten
from engine.config.table import Table
from engine.errors import BadInput
from engine.run.files import write_atomically

FILE = "start.json"
ContinueFrom = Literal["base", "nightly", "latest", "champion"]


class RunStart(Table):
    """What start.json of a run folder holds."""

    start: ContinueFrom = "base"
    """The parameter `continue_from` of the flow."""
    continued_from: str = ""
    """The registered policy that `model.path` is, as models:/NAME/VERSION; "" where it is none."""
    recipe: str = ""
    """The recipe, as the command named it; "" where an older release began the run."""
    registered: str = ""
    """Name of the registered model to which the run's policy belongs; "" likewise."""

    def write(self, folder: Path) -> None:
        """Keep it in a run folder. To be called before a first config.toml is written: a folder with a config and no
        start.json is taken for one of the last release, or of an evaluation."""
        write_atomically(folder / FILE, self.model_dump_json(indent=1) + "\n")


def read_start(folder: Path) -> RunStart:
    """How the run in a folder began; "base" where nothing says so. The last release kept it in config.toml.

    Raises BadInput for a damaged file.
    """
    file = folder / FILE
    try:
        if file.exists():
            return RunStart.model_validate(json.loads(file.read_text()))
        file = folder / "config.toml"
        config = flatten(tomllib.loads(file.read_text())) if file.exists() else {}
        return RunStart.model_validate({name: config[key] for key, name in STATE.items() if key in config})
    except ValueError as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise BadInput(
            f"{file}: how the run began can't be read ({what}); expected {FILE} as in "
            '{"start": "nightly", "continued_from": "models:/NAME/VERSION"}'
        ) from None
