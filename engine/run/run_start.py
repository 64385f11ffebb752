"""How a run began. The flow writes this into the run folder, for the model registry and for a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from engine.config.table import Table
from engine.errors import BadInput
from engine.run.files import write_atomically

FILE = "start.json"
ContinueFrom = Literal["base", "nightly", "latest", "champion"]


class RunStart(Table):
    """The content of start.json in a run folder."""

    start: ContinueFrom = "base"
    """The parameter `continue_from` of the flow."""
    continued_from: str = ""
    """The registered policy from which the run started, as models:/NAME/VERSION; "" if `model.path` is not a registered
    one."""
    recipe: str = ""
    """The recipe, as the command named it; "" if unknown."""
    registered: str = ""
    """Name of the registered model to which the run's policy belongs; "" if unknown."""

    def write(self, folder: Path) -> None:
        """Write it to a run folder. Call this before the first config.toml is written: a folder with a config but no
        start.json counts as the folder of an evaluation."""
        write_atomically(folder / FILE, self.model_dump_json(indent=1) + "\n")


def read_start(folder: Path) -> RunStart:
    """How the run in a folder began; "base" if unknown.

    Raises BadInput for a damaged file.
    """
    file = folder / FILE
    try:
        return RunStart.model_validate(json.loads(file.read_text())) if file.exists() else RunStart()
    except ValueError as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise BadInput(
            f"{file}: how the run began can't be read ({what}); expected {FILE} as in "
            '{"start": "nightly", "continued_from": "models:/NAME/VERSION"}'
        ) from None
