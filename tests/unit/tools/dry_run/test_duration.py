"""The estimated time of a step on this machine's cores."""

import pytest

from engine.config.recipe import load_config
from engine.tools.dry_run import duration, plan_run, plan_sections
from engine.tools.dry_run.model_shape import shape_of

RECIPE = "infra/recipes/quickstart.toml"


@pytest.fixture(autouse=True)
def speed(monkeypatch):
    """100 GFLOP/s."""
    monkeypatch.setattr(duration, "product_speeds", lambda hidden, inner, *rows: [1e11 for _ in rows])


@pytest.mark.parametrize(
    ("keys", "times"),
    [
        (["train.prompts_per_step=64"], 2.0),
        (["rollout.group_size=16"], 2.0),
        (["algorithm.kl_coef=0"], 0.83),  # the reference's pass of six
        (["rollout.instances=4"], 0.9),
    ],
)
def test_an_estimate_grows_with_the_work(keys, times):
    shape, _ = shape_of(load_config(RECIPE).model.path)
    before, after = (duration.step_seconds(shape, load_config(RECIPE, some), 24) for some in ([], keys))
    assert after / before == pytest.approx(times, rel=0.15)


def test_a_step_takes_what_its_operations_take_at_the_measured_speed():
    """The papers' count: 6 operations for each parameter and trained token, 2 for each sampled one and frozen pass."""
    config = load_config(RECIPE, ["model.path=Qwen/Qwen3-1.7B", "algorithm.kl_coef=0", "algorithm.old_policy=behavior"])
    shape, _ = shape_of(config.model.path)
    tokens = 32 * 8 * 24
    assert duration.step_seconds(shape, config, 24) == pytest.approx(
        8 * 1.72e9 * tokens / 1e11 / duration.SHARE, rel=0.1
    )


@pytest.mark.parametrize(("device", "shown"), [("cpu", True), ("npu", False)])
def test_a_dry_run_tells_it_on_a_cpu(device, shown):
    keys = (
        ["platform.device=cpu"]
        if device == "cpu"
        else ["platform.device=npu", "rollout.engine=vllm", "rollout.devices=[1]"]
    )
    step = plan_sections(plan_run(load_config(RECIPE, keys)))["A step"]
    assert ("time here" in step) == shown
    if shown:
        assert "a step" in step["time here"]
        assert "if responses have 24 tokens" in step["time here"]


def test_this_machine_is_measured_once(monkeypatch):
    monkeypatch.undo()
    found = duration.product_speeds(256, 512, 64, 512)
    assert len(found) == 2
    assert all(1e8 < speed < 1e13 for speed in found)
    assert duration.product_speeds(256, 512, 64, 512) is found
