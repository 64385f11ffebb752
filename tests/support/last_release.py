"""Run folders as the last release left them: other names of keys, and in config.toml how the run began."""

import tomli_w

from engine.config.keys import RENAMED, flatten, nest


def old_keys(config):
    """The config's keys under the names of then."""
    then = {new: old for old, new in RENAMED.items()}
    return {then.get(key, key): value for key, value in flatten(config.model_dump(mode="json")).items()}


def write_old_config(config, file, start="base", continued_from=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {"model.start": start, "model.continued_from": continued_from}
    file.write_text(tomli_w.dumps(nest(old_keys(config) | state, "")))
