"""`run.dry`: the papers' recipes can run, impossible ones are refused with the reason;
all without devices or weights."""

import json

import pytest
from typer.testing import CliRunner

from engine.config.recipe import HOME, load_config
from engine.config.training import Parallel
from engine.errors import BadInput
from engine.platform import PLATFORMS
from engine.run import limits
from engine.run.memory import GIB, rank_parameters, total_parameters
from engine.tools.dry_run import evaluation_sections, plan_run, plan_sections
from engine.tools.dry_run.model_shape import PUBLISHED, shape_of
from support.paper_recipes import DEVICES

PAPERS = "infra/recipes/papers"
EMBEDDING = 151_936 * 4096 * 2
"""Bytes of the largest tensor of Qwen3-8B in bf16."""
ROOM = 3 * GIB
"""Memory that a recipe leaves for what the plan can't count (docs/hardware.md)."""
PARAMETERS = {  # as transformers counts them in the published models, tied output layers once
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-Math-7B-32k": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
}


def recipe(name, *overrides):
    return load_config(f"{PAPERS}/{name}.toml", overrides)


def test_every_paper_recipe_is_known_here():
    assert {path.stem for path in (HOME / PAPERS).glob("*.toml")} == set(DEVICES)


@pytest.mark.parametrize("name", DEVICES)
def test_paper_recipes_can_run(name):
    made = plan_run(recipe(name))
    training, rollouts = DEVICES[name]
    assert made.config.parallel.ranks == training
    assert made.instances * made.config.rollout.tensor == rollouts
    assert made.devices == made.config.platform.devices
    assert made.trainer.available - made.trainer.total > ROOM
    assert made.instance.available - made.instance.total > ROOM
    assert made.cache.tokens >= made.config.rollout.max_context


@pytest.mark.parametrize("name", ["quickstart", "aime"])
def test_the_other_recipes_can_run(name):
    assert plan_run(load_config(f"infra/recipes/{name}.toml")).trainer.fits


def test_parameters_are_those_of_the_published_models():
    assert {name: total_parameters(shape_of(name)[0]) for name in json.loads(PUBLISHED.read_text())} == PARAMETERS


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen2.5-32B", "Llama-3.2-3B-Instruct"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 4), (8, 1), (4, 2)])
def test_ranks_hold_the_model_together(name, tensor, pipeline):
    """Over all ranks: the model, its norms once more per further tensor rank, and a tied output layer's copy."""
    shape, _ = shape_of(name)
    layout = Parallel(tensor=tensor, pipeline=pipeline)
    held = tensor * sum(rank_parameters(shape, layout, stage).total for stage in range(pipeline))
    per_layer = 2 * shape.hidden + (256 if name.startswith("Qwen3") else 0)
    norms = shape.layers * per_layer + shape.hidden
    copy = shape.vocabulary * shape.hidden if shape.tied and pipeline > 1 else 0
    assert held == total_parameters(shape) + (tensor - 1) * norms + copy


BASE = "periodic-qwen3-8b-16npu-paper"
LARGE = "periodic-r1-distill-32b-48npu-paper"
NODE = "gac-qwen3-8b"


IMPOSSIBLE = """
base platform.memory_gib=32 -> too little memory on a trainer rank & weights 1.9 GiB + gradients 3.8 GiB & 32.0 GiB
base parallel.tensor=2; platform.devices=0 -> too little memory on a trainer rank & activations
base parallel.sequence=false; platform.memory_gib=48 -> too little memory
base parallel.tensor=3 -> parallel.tensor = 3 does not divide its 32 attention heads
base parallel.pipeline=5 -> parallel.pipeline = 5 does not divide its 36 layers
base parallel.data=2 -> = 24 devices, and platform.devices gives 16
base dry_run.joining=5 -> rollouts 5 × 2 = 18 devices & gives 16
base train.micro_batch_tokens=8192 -> train.micro_batch_tokens = 8,192 is below the longest sequence & 16,384
base rollout.max_context=65536; train.micro_batch_tokens=65536 -> 65,536 is more than the 40,960 positions
base rollout.tensor=16; dry_run.joining=1; platform.devices=0 -> rollout.tensor = 16 is more than a node
large parallel.nodes=2 -> parallel.nodes = 2 puts 16 trainer ranks on each node, which has 8 devices
base evaluate.max_context=50000 -> evaluate.max_context = 50,000 is more than the 40,960 positions
base rollout.tensor=3; dry_run.joining=2 -> rollout.tensor = 3 does not divide the model's 32
base parallel.data=4; train.prompts_per_step=2; platform.devices=0 -> 4 replicas & some would never train
base model.path=Qwen/Qwen9-900B -> model Qwen/Qwen9-900B: & hub & Qwen3-8B
base rollout.instances=4; dry_run.joining=0 -> takes devices from 0 on & rollout.instances = 0 & joining = 4
node rollout.devices=[] -> rollout.devices is empty & 4 instances & set rollout.devices = [4, 5, 6, 7]
node rollout.devices=[3,4,5,6] -> includes [3], which the trainer ranks use; they use [0, 1, 2, 3]
node rollout.devices=[4,5,6,6] -> rollout.devices names [6] more than once
node rollout.devices=[5,6,7,8] -> rollout.devices names [8], and a node has 0 to 7
node rollout.tensor=2; rollout.instances=2; rollout.devices=[4,5] -> names 2 devices, 2 instances & take 4
large rollout.tensor=1 -> too little memory on a rollout device & weights 61.0 GiB
large train.recompute=false; platform.memory_gib=48 -> too little memory & activations
base rollout.listen=127.0.0.1:0 -> dry_run.joining = 4: instances join & rollout.listen = '127.0.0.1:0' & auto:7000
base rollout.listen=[::1]:7000; dry_run.joining=0 -> rollout.instances = 0: instances join from other nodes
verl rollout.listen=localhost:7000 -> dry_run.joining = 1 & METRONOME_TOKEN on all nodes
verl rollout.max_context=40000; train.micro_batch_tokens=40000 -> 32,768 positions
"""
"""Recipe, overrides, and what the refusal has in it."""
RECIPES = {"base": BASE, "large": LARGE, "node": NODE, "verl": "one-step-off-qwen2.5-math-7b"}


@pytest.mark.parametrize("line", IMPOSSIBLE.strip().splitlines())
def test_impossible_ones_are_refused_with_the_reason(line):
    given, said = line.split(" -> ")
    name, overrides = given.split(" ", 1)
    with pytest.raises(BadInput) as caught:
        plan_run(recipe(RECIPES[name], *overrides.split("; ")))
    for part in said.split(" & "):
        assert part in str(caught.value)


def test_all_reasons_are_given_at_once():
    with pytest.raises(BadInput) as caught:
        plan_run(recipe(BASE, "train.micro_batch_tokens=8192", "platform.devices=8"))
    assert "micro_batch_tokens" in str(caught.value)
    assert "platform.devices" in str(caught.value)


def test_recomputation_offload_and_shared_states_need_less():
    def trainer(*overrides):
        return plan_run(recipe("periodic-qwen3-8b-32npu-paper", "platform.memory_gib=640", *overrides)).trainer.total

    plain = trainer("train.distributed_optimizer=false")
    assert trainer() < plain
    needs = [trainer("train.distributed_optimizer=false", f"train.recompute={one}") for one in ("true", "selective")]
    assert needs[0] < trainer("train.distributed_optimizer=false", "train.recompute=18") < needs[1] < plain
    offloaded = trainer("train.distributed_optimizer=false", "train.offload=true")
    weights = rank_parameters(shape_of("Qwen3-8B")[0], Parallel(tensor=8), 0).total * 2
    assert plain - offloaded == weights, "two frozen models become one"


def test_a_folder_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260, "rms_norm_eps": 1e-6,'
        ' "max_position_embeddings": 512, "tie_word_embeddings": true}'
    )
    shape, source = shape_of(str(tmp_path))
    assert (shape.layers, source) == (2, "config.json")


@pytest.mark.parametrize("command", ["run", "train"])
def test_the_command_prints_the_plan_and_starts_nothing(command, tmp_path, monkeypatch):
    from flows.cli import app

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command, f"{PAPERS}/{BASE}.toml", "--set", "run.dry=true"])
    assert done.exit_code == 0, done.output
    assert "8,190,735,360 parameters" in done.output
    assert "128 prompts × 8 responses = 1,024 responses" in done.output
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_with_2(tmp_path, monkeypatch):
    from flows.cli import app

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["run", f"{PAPERS}/{BASE}.toml", "--set", "run.dry=true", "--set", "platform.memory_gib=16"]
    )
    assert done.exit_code == 2
    assert "too little memory on a trainer rank" in done.output


@pytest.mark.parametrize(
    ("name", "training", "rollouts"),
    [(BASE, 1, 1), ("periodic-qwen3-8b-64npu", 4, 4), (LARGE, 4, 2), ("asyncflow-qwen2.5-32b-512npu", 16, 16)],
)
def test_nodes_are_counted(name, training, rollouts):
    nodes = plan_sections(plan_run(recipe(name)))["Devices"]["nodes"]
    assert f"{training} for training" in nodes
    assert f"{rollouts} for rollouts" in nodes


def test_places_are_said():
    assert plan_sections(plan_run(recipe(BASE)))["Devices"]["places"] == (
        "trainer ranks on devices 0 to 7 of their nodes; 4 instances that join on other nodes"
    )
    assert (
        "own instances on devices [4, 5, 6, 7] of the first node"
        in plan_sections(plan_run(recipe(NODE)))["Devices"]["places"]
    )
    assert "places" not in plan_sections(plan_run(load_config("infra/recipes/quickstart.toml")))["Devices"]


def test_nothing_that_trains_takes_a_dry_run():
    """The flows of deployments check their inputs first, and must not train on what was meant to be printed."""
    from tasks.stages.input_checks import check_inputs

    with pytest.raises(BadInput, match="metronome run RECIPE --set run.dry=true"):
        check_inputs(recipe(BASE, "run.dry=true"))


def test_tables_name_every_term():
    tables = plan_sections(plan_run(recipe("gac-qwen3-8b")))
    memory = tables["Memory of a trainer rank of stage 1 of 1"]
    assert set(memory) >= {
        "weights",
        "gradients",
        "optimizer",
        "frozen",
        "last gradient",
        "activations",
        "reserve",
        "sum",
    }
    assert memory["sum"].endswith("of 79.1 GiB")


@pytest.mark.parametrize(
    ("transport", "bucket_mb", "bucket"),
    [("nccl", 0, EMBEDDING), ("nccl", 256, EMBEDDING), ("nccl", 2048, 2**31), ("gloo", 0, 0)],
)
def test_a_tensor_that_is_larger_than_a_bucket_is_one(transport, bucket_mb, bucket):
    """Three in the trainer's memory; two in the instance's, beside the share that vLLM takes."""
    keys = [f"weights.transport={transport}", f"weights.bucket_mb={bucket_mb}"]
    made = plan_run(recipe("gac-qwen3-8b", *keys, "rollout.vllm.gpu_memory_utilization=0.99"))
    assert sum(term.bytes for term in made.trainer.terms if term.name == "sync buckets") == 3 * bucket
    assert made.instance.available == pytest.approx(min(0.99 * 79.1 * GIB, 79.1 * GIB - 2 * bucket))


def test_what_this_machine_has_too_little_of_is_refused_as_by_the_orchestrator(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "reachable_limit", lambda: 64)
    config = load_config("infra/recipes/quickstart.toml", [f"run.output={tmp_path}"])
    with pytest.raises(BadInput) as orchestrator:
        limits.check_limits(config, 0)
    with pytest.raises(BadInput) as dry:
        plan_run(config)
    assert str(dry.value) == f"this can't run as it stands: {orchestrator.value}"
    assert "open files: the run needs" in str(dry.value)


def test_a_plan_for_devices_that_are_not_here_only_shows_the_limits_of_this_machine(monkeypatch):
    monkeypatch.setattr(limits, "reachable_limit", lambda: 64)
    monkeypatch.setattr(PLATFORMS["npu"], "present", lambda: False, raising=False)
    shown = plan_sections(plan_run(recipe(BASE)))["Limits of this machine"]["open files"]
    assert shown.endswith("there are 64: TOO LITTLE if the run were here")
    monkeypatch.setattr(PLATFORMS["npu"], "present", lambda: True, raising=False)
    with pytest.raises(BadInput, match="open files: the run needs"):
        plan_run(recipe(BASE))


EVALUATED = [
    "rollout.engine=vllm",
    "rollout.tensor=2",
    "platform.device=npu",
    "model.path=Qwen/Qwen3-8B",
]


@pytest.mark.parametrize(
    ("name", "responses"),
    [
        ("aime24", "8 for each problem, of at most 32,768 tokens"),
        ("gac_benchmarks", "1 for each problem, of at most 1,536"),
    ],
)
def test_an_evaluation_has_a_plan_without_a_trainer(name, responses):
    """A trainer of this size would need 170 GiB."""
    config = load_config(f"infra/recipes/{name}.toml", EVALUATED)
    tables = evaluation_sections(config)
    assert tables["Evaluation"]["responses"].startswith(responses)
    assert tables["Devices"]["in all"] == "rollouts 1 × 2 = 2"
    assert f"{config.evaluate.max_context:,} tokens" in tables["Memory of a rollout device"]["key-value cache"]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("evaluate.max_context=50000", "rollout.max_context = 50,000 is more than the 40,960"),
        ("platform.memory_gib=24", "too little memory on a rollout device: weights 15.3 GiB"),
        ("platform.devices=1", "rollouts 1 × 2 = 2 devices, and platform.devices gives 1"),
        ("rollout.tensor=16", "rollout.tensor = 16 is more than a node has"),
    ],
)
def test_an_evaluation_that_can_not_run_is_refused(key, said):
    with pytest.raises(BadInput, match=said):
        evaluation_sections(load_config("infra/recipes/aime24.toml", [*EVALUATED, key]))


def test_the_command_plans_an_evaluation_of_a_model_that_is_not_here():
    from flows.cli import app

    sets = [part for key in [*EVALUATED[:3], "run.dry=true"] for part in ("--set", key)]
    done = CliRunner().invoke(app, ["evaluate", "infra/recipes/aime24.toml", "--model", "Qwen/Qwen3-8B", *sets])
    assert (done.exit_code, "published config.json" in done.output) == (0, True), done.output


@pytest.mark.parametrize(("command", "dry"), [("run", "true"), ("train", "false"), ("evaluate", "false")])
def test_a_recipe_of_smollm2_says_how_its_model_is_made(monkeypatch, tmp_path, command, dry):
    from flows.cli import app

    monkeypatch.setattr("engine.config.recipe.find_file", lambda path: tmp_path / path)
    sets = ["--set", f"run.output={tmp_path}", "--set", f"run.dry={dry}"]
    done = CliRunner().invoke(app, [command, f"{HOME}/infra/recipes/smollm2.toml", *sets])
    assert (done.exit_code, "`make smollm2` makes it" in done.output) == (2, True), done.output
