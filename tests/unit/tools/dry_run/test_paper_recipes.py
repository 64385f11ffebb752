"""The recipes hold what the papers state, value by value; each table says where it stands."""

import subprocess

import pytest

from engine.config.recipe import load_config
from engine.tools.dry_run import plan_run
from support.paper_recipes import DEVICES
from support.runs import ROOT

# §6.1, §6.2: "evaluated 8 times", "temperature = 0.7, top_p = 0.95, and top_k = 20", "limit of 32k"; shared prompts are
# off (the revision's §6.2); KL term, schedule and AdamW are those of the authors' release, EasyLLM 5.0.5
PERIODIC = """
evaluate.benchmark=aime24; evaluate.problems=0; evaluate.samples=8; evaluate.temperature=0.7; evaluate.top_p=0.95;
evaluate.top_k=20; evaluate.max_new_tokens=32768; reward.function=math; train.mode=periodic; rollout.engine=vllm;
rollout.max_context=16384; attention.shared_prompt=false; data.train=agentica-org/DeepScaleR-Preview-Dataset;
algorithm.advantage=grpo; algorithm.loss=grpo; algorithm.old_policy=previous; algorithm.kl_coef=0.02;
train.schedule=cosine; train.weight_decay=0.0; train.betas=[0.9, 0.95]; rollout.instances=0; platform.device=npu;
platform.devices_per_node=8; platform.memory_gib=60.9; """
QWEN3_8B = PERIODIC + "model.path=Qwen/Qwen3-8B; rollout.tensor=2; "  # §6.2: inference instances with TP = 2
# Table 2 and C.1; AdamW is verl's default, and gac_low what the shares of Table 3 imply
GAC = """
train.prompts_per_step=256; rollout.group_size=8; rollout.temperature=0.6; rollout.top_p=0.95; rollout.engine=vllm;
rollout.max_context=2048; algorithm.clip_low=0.2; algorithm.clip_high=0.2; algorithm.entropy_coef=0.001;
algorithm.kl_coef=0.001; algorithm.kl_estimator=k3; algorithm.gradient_control=gac; algorithm.gac_low=0.1;
algorithm.advantage=grpo; algorithm.loss=grpo; train.mode=bounded; train.betas=[0.9, 0.999]; train.weight_decay=0.01;
train.learning_rate=1e-06; evaluate.benchmark=minerva; platform.device=cuda; platform.devices=8;
platform.memory_gib=79.1; model.path="""
ASYNCFLOW = """
train.mode=one_step_off; rollout.engine=vllm; data.train=agentica-org/DeepScaleR-Preview-Dataset; weights.staged=true;
algorithm.advantage=grpo; algorithm.loss=grpo; platform.device=npu; platform.devices_per_node=16; model.path="""
# verl's page, and what it leaves to dapo_7b_math_megatron_4_12.sh; overlong_penalty is 1.0 there, of rewards -1 and 1
ONE_STEP_OFF = """
model.path=Qwen2.5-Math-7B-32k; train.mode=one_step_off; rollout.engine=vllm; rollout.max_new_tokens=8192;
algorithm.loss=dapo; algorithm.dynamic_sampling=false; algorithm.old_policy=behavior; algorithm.clip_low=0.2;
algorithm.clip_high=0.28; algorithm.dual_clip=10.0; algorithm.overlong_buffer=4096; algorithm.overlong_penalty=0.5;
algorithm.kl_coef=0; rollout.group_size=12; rollout.max_context=10240; train.prompts_per_step=512; train.steps=100;
train.learning_rate=1e-06; train.warmup_steps=160; train.updates=16; train.weight_decay=0.1; train.betas=[0.9, 0.999];
parallel.nodes=2; rollout.tensor=2; rollout.devices=[6, 7]; dry_run.joining=1; evaluate.samples=32; evaluate.top_p=0.7;
platform.device=cuda; platform.devices=16; platform.devices_per_node=8; weights.transport=nccl"""
STATED = {
    # §6.2 and Table 1; Table 3; §6.2: 32 NPUs train, 16 generate with TP = 4
    "periodic-qwen3-8b-16npu": QWEN3_8B + "dry_run.joining=4; platform.devices=16; train.steps=100",
    "periodic-qwen3-8b-32npu": QWEN3_8B + "dry_run.joining=8; platform.devices=32; train.steps=20",
    "periodic-qwen3-8b-64npu": QWEN3_8B + "dry_run.joining=16; platform.devices=64; train.steps=20",
    "periodic-r1-distill-32b-48npu": PERIODIC + "model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-32B; "
    "dry_run.joining=4; rollout.tensor=4; platform.devices=48; train.steps=20",
    "one-step-off-qwen2.5-math-7b": ONE_STEP_OFF,
    "gac-qwen3-1.7b": GAC + "Qwen/Qwen3-1.7B",
    "gac-qwen3-4b": GAC + "Qwen/Qwen3-4B",
    "gac-qwen3-8b": GAC + "Qwen/Qwen3-8B",
    "gac-llama-3.2-3b": GAC + "meta-llama/Llama-3.2-3B-Instruct",
    "asyncflow-qwen2.5-7b-32npu": ASYNCFLOW + "Qwen/Qwen2.5-7B; platform.devices=32",
    "asyncflow-qwen2.5-32b-512npu": ASYNCFLOW + "Qwen/Qwen2.5-32B; platform.devices=512",
}
LAYOUTS = {  # §6.2: TP = 8 and PP = 1, or 4; Table 3: training instances; DEVICES: 12 GPUs train and 4 generate
    "periodic-qwen3-8b-16npu": (8, 1, 1),
    "periodic-qwen3-8b-32npu": (8, 1, 2),
    "periodic-qwen3-8b-64npu": (8, 1, 4),
    "periodic-r1-distill-32b-48npu": (8, 4, 1),
    "one-step-off-qwen2.5-math-7b": (2, 2, 3),
}
STATED |= {
    f"{name}-paper": f"{STATED[name]}; parallel.tensor={tensor}; parallel.pipeline={pipeline}; parallel.data={data}"
    for name, (tensor, pipeline, data) in LAYOUTS.items()
}


@pytest.mark.parametrize("name", STATED)
def test_what_a_paper_states_is_what_its_recipe_says(name):
    recipe = f"infra/recipes/papers/{name}.toml"
    stated = [one.strip() for one in STATED[name].split(";")]
    assert load_config(recipe, ["run.name=x", *stated]) == load_config(recipe, ["run.name=x"])


def test_the_table_has_every_paper_recipe():
    assert set(STATED) == set(DEVICES)


LINES = [line for line in (ROOT / "docs/papers.md").read_text().splitlines() if "metronome run $P" in line]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_the_commands_of_a_papers_rows_pass_the_dry_run(line, tmp_path):
    """As a shell expands them."""
    echo = line.replace("metronome run", "echo run")
    told = subprocess.run(["bash", "-euc", f"P=infra/recipes/papers\n{echo}"], capture_output=True, text=True)
    commands = told.stdout.splitlines()
    assert len(commands) == (len(line.partition("; do")[0].split()) - 3 if line.startswith("for") else 1)
    for command in commands:
        keys = [part for part in command.split() if "=" in part]
        plan_run(load_config(command.split()[1], [*keys, f"run.output={tmp_path}", "run.dry=true"]))
