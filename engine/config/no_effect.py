"""Keys that a recipe sets, and that nothing reads because of another key."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import Config
from engine.config.keys import flatten_keys
from engine.config.marks import ReadIf, marked_keys

_CONDITIONS = dict(marked_keys(Config, ReadIf))
_DEFAULTS = flatten_keys(Config().model_dump())


def without_effect(config: Config) -> Iterator[str]:
    """A sentence for each key that is not at its default and has no effect."""
    values = flatten_keys(config.model_dump())
    for key, conditions in _CONDITIONS.items():
        lacking = next((one for one in conditions if not one.condition(config)), None)
        if values[key] != _DEFAULTS[key] and lacking is not None:
            shown = f'"{values[key]}"' if isinstance(values[key], str) else values[key]
            yield f"{key} = {shown} has no effect: it is only read {lacking.words}"
