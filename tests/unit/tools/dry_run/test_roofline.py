"""The estimated MFU: the table of a first look at H100 and 910C, and what must hold for any layout."""

import re

import pytest

from engine.config.recipe import HOME, load_config
from engine.config.training import Parallel
from engine.tools.dry_run import plan_run, plan_sections
from engine.tools.dry_run.known_models import KNOWN
from engine.tools.dry_run.roofline import DEVICES, estimate_run, estimate_training
from support.paper_recipes import DEVICES as RECIPES

WIDE = Parallel(tensor=4, sequence=True)
PAIRS = Parallel(tensor=2, data=2, sequence=True)
NODE = Parallel(tensor=8, sequence=True)
MANY = Parallel(tensor=2, data=4, sequence=True)
GAC = {"visible": 1024, "scoring": 1}
PERIODIC = {"visible": 4500, "scoring": 2}


@pytest.mark.parametrize(
    ("device", "parallel", "keys", "alone", "with_scoring"),
    [  # per cent; Qwen3-8B
        ("h100", WIDE, GAC | {"rows": 16384, "recompute": True}, 28, 22),
        ("h100", WIDE, GAC | {"rows": 16384}, 37, 27),
        ("h100", PAIRS, GAC | {"rows": 8192}, 42, 32),
        ("910c", NODE, PERIODIC | {"rows": 16384}, 30, 18),
        ("910c", MANY, PERIODIC | {"rows": 8192}, 42, 26),
    ],
)
def test_the_first_estimates_are_met(device, parallel, keys, alone, with_scoring):
    """To 2 points: the elementwise passes are counted more coarsely here, the gradients' traffic is counted too."""
    found = estimate_training(KNOWN["Qwen3-8B"], parallel, DEVICES[device], **keys)
    assert 100 * found.mfu == pytest.approx(alone, abs=2)
    assert 100 * found.mfu_with_scoring == pytest.approx(with_scoring, abs=2)


def test_recomputation_costs_what_it_makes_again():
    """A quarter of the layers costs a quarter of all; elementwise outputs cost their bytes: the norms' 2 · 4,096 values
    and SwiGLU's 12,288 are read and written, over all 36 layers and 4 ranks, at 0.78 · 3.35 TB/s."""
    settings = (False, "selective", 9, True)
    none, selective, part, whole = (
        estimate_training(KNOWN["Qwen3-8B"], WIDE, DEVICES["h100"], rows=16384, recompute=setting, **GAC).ns
        for setting in settings
    )
    assert selective - none == pytest.approx(36 * 2 * 3 * 20480 / 4 / (0.78 * 3350), rel=1e-3)
    assert part - none == pytest.approx((whole - none) / 4)
    assert none < selective < part < whole


def test_frozen_models_on_the_host_are_copied_for_each_row():
    """4.1e9 bf16 weights of two models in each row of 8,192 tokens, at 8 GB/s."""
    here, there = (
        estimate_training(KNOWN["Qwen3-8B"], MANY, DEVICES["910c"], rows=8192, offload=offload, **PERIODIC)
        for offload in (False, True)
    )
    assert there.mfu == here.mfu
    assert there.scoring_ns - here.scoring_ns == pytest.approx(2 * 2 * 8.19e9 / 2 / 8e9 / 8192 * 1e9, rel=0.01)


def test_a_mesh_gives_a_pair_of_ranks_one_of_its_links():
    """Eight 910B are joined pairwise: two tensor ranks have a seventh of the bandwidth of eight."""
    mesh, switched = (
        [
            estimate_training(KNOWN["Qwen3-8B"], layout, DEVICES[name], rows=16384, **PERIODIC).mfu
            for layout in (NODE, MANY)
        ]
        for name in ("910b", "910c")
    )
    assert mesh[0] == pytest.approx(switched[0], rel=0.01)
    assert mesh[1] < 0.85 * switched[1]


def test_a_pipeline_waits_while_it_fills():
    """Sixteen micro-batches a stage: (16p + p − 1) / 16p of the time of the fullest stage."""
    whole = estimate_training(KNOWN["Qwen2.5-32B"], Parallel(), DEVICES["h100"], rows=16384, visible=1024)
    split = estimate_training(KNOWN["Qwen2.5-32B"], Parallel(pipeline=2), DEVICES["h100"], rows=16384, visible=1024)
    assert 33 / 32 < whole.mfu / split.mfu < 1.25


def test_every_recipe_says_its_estimate_and_fits():
    """Beside its layout, to the point."""
    folder = HOME / "infra/recipes/papers"
    for name in RECIPES:
        made = plan_run(load_config(folder / f"{name}.toml"))
        text = (folder / f"{name}.toml").read_text()
        said = {device: f"{one} %, {other} %" for device, one, other in SAID.findall(text)}
        assert said, name
        assert {DEVICES[device].memory_gib for device in said} == {made.config.platform.memory_gib}, name
        found = {device: estimate_run(made.shape, made.config, DEVICES[device]) for device in said}
        assert said == {
            device: f"{100 * one.mfu:.0f} %, {100 * one.mfu_with_scoring:.0f} %" for device, one in found.items()
        }, name


SAID = re.compile(r"(\w+): (\d+) %, (\d+) % with scoring")


def test_the_dry_run_prints_it():
    shown = plan_sections(plan_run(load_config("infra/recipes/papers/gac-qwen3-8b.toml")))[
        "Estimated MFU, not measured"
    ]
    assert set(shown) == {"a100", "h100", "h20", "h200"}
    assert re.fullmatch(
        r"\d+ % of 989 TFLOP/s, \d+ % with the scoring passes \(1\); [\d.]+ µs a token of a replica", shown["h100"]
    )


def test_a_layout_of_our_own_is_at_least_as_fast_as_the_papers():
    for name in (one for one in RECIPES if one.endswith("-paper")):
        ours, papers = (
            plan_run(load_config(f"infra/recipes/papers/{one}.toml")) for one in (name.removesuffix("-paper"), name)
        )
        for device in (one for one in DEVICES.values() if one.platform == ours.config.platform.device):
            faster, slower = (estimate_run(made.shape, made.config, device) for made in (ours, papers))
            assert faster.mfu_with_scoring > 0.99 * slower.mfu_with_scoring, (name, device.name)


def test_a_cpu_has_none():
    assert "Estimated MFU, not measured" not in plan_sections(plan_run(load_config("infra/recipes/quickstart.toml")))
