"""The stage that checks the conversion of the model: what it leaves out, and how long it may take."""

import pytest

from engine.config import Config
from engine.errors import BadInput
from tasks.stages.convert import conversion_limit_s, convert_model, describe_report


def test_a_check_that_is_skipped_reads_the_configuration_and_the_tokenizer_only(tiny_model, tmp_path):
    config = Config(model={"path": str(tiny_model), "convert": "skip"}, run={"output": str(tmp_path)})
    report = convert_model(config)
    assert report["parameters"] > 0
    assert describe_report(report).endswith('parameters; not compared with Hugging Face (model.convert = "skip")')
    assert not list(tmp_path.rglob("convert.log"))
    copy = tmp_path / "no-tokenizer"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((tiny_model / name).read_bytes())
    with pytest.raises(BadInput, match="can't load a tokenizer there"):
        convert_model(Config(model={"path": str(copy), "convert": "skip"}))


def test_the_time_limit_of_the_check_follows_the_models_size(tmp_path):
    assert conversion_limit_s(tmp_path) == 1800
    for number in (1, 2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(32 * 2**30)  # a sparse file: together the 64 GiB of a model of 32B parameters
    assert conversion_limit_s(tmp_path) == 1800 + 64 * 60
