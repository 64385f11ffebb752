"""Each rule between keys refuses what can't be, in one line that names a key to change."""

import datetime

import pytest

from engine.config import Config
from engine.config.inputs import Reward, WeightedReward
from engine.config.no_effect import without_effect
from engine.config.recipe import HOME, load_config
from engine.errors import BadInput

REFUSED = """
parallel.sequence=true -> parallel.tensor
parallel.expert=2; parallel.tensor=2; parallel.data=2 -> parallel.sequence = true
parallel.expert=3; parallel.context=2; parallel.data=3 -> parallel.expert (3)
parallel.expert=4; parallel.data=2 -> parallel.expert (4)
train.dtype=bfloat16 -> also set model.dtype = "bfloat16"
model.dtype=bfloat16; rollout.engine=vllm -> also set train.dtype = "bfloat16"
model.dtype=bfloat16; train.dtype=bfloat16 -> set train.ratio_gap_limit = 0
train.router_dtype=bfloat16 -> train.dtype = "bfloat16"
rollout.tensor=2 -> rollout.engine = "vllm"
algorithm.routing_replay=true -> rollout.engine = "vllm"
weights.transport=nccl -> rollout.engine = "vllm"
rollout.vllm.enforce_eager=true -> rollout.engine = "vllm"
rollout.engine=vllm; rollout.vllm.max_model_len=4096 -> set rollout.max_context
rollout.engine=vllm; rollout.vllm.tensor_parallel_size=2 -> set rollout.tensor
rollout.engine=vllm; rollout.vllm.logprobs_mode=raw_logits -> rollout.vllm.logprobs_mode can't be set
rollout.engine=vllm; rollout.vllm.quantization=fp8 -> rollout.vllm.quantization can't be set
rollout.engine=vllm; rollout.vllm.no_skip_tokenizer_init=true -> rollout.vllm.no_skip_tokenizer_init can't be set
rollout.engine=vllm; rollout.vllm.data_parallel_size_local=2 -> rollout.vllm.data_parallel_size_local can't be set
rollout.engine=vllm; rollout.vllm.nnodes=2 -> rollout.vllm.nnodes can't be set
rollout.engine=vllm; rollout.vllm.allowed_media_domains=["x", "--y"] -> rollout.vllm.allowed_media_domains
rollout.engine=vllm; rollout.vllm.hf_overrides=x -> rollout.vllm.hf_overrides
rollout.engine=vllm; rollout.vllm.ssl_keyfile=key.pem -> rollout.vllm.ssl_keyfile can't be set
rollout.engine=vllm; rollout.vllm.enforce-eager=true -> rollout.vllm.enforce-eager
rollout.engine=vllm; rollout.vllm.seed=3 -> rollout.vllm.seed can't be set
rollout.engine=vllm; rollout.vllm.revision=2026-11-26 -> rollout.vllm.revision
rollout.engine=vllm; rollout.vllm.gpu_memory_utilization=nan -> rollout.vllm.gpu_memory_utilization = nan
rollout.engine=vllm; rollout.vllm=3 -> rollout.vllm = 3: must be a table
rollout.engine=vllm; rollout.deterministic=true; weights.transport=nccl -> weights.transport = "nccl"
rollout.engine=vllm; rollout.tensor=2; weights.transport=hccl; weights.staged=true -> needs rollout.tensor = 1
rollout.instances=0; rollout.devices=[0] -> rollout.devices
rollout.instances=2; rollout.devices=[0, 1, 2] -> rollout.devices
train.devices=[4096] -> train.devices names cores [4096]
rollout.devices=[4096] -> rollout.devices names cores [4096]
rollout.partial=true -> train.mode = "periodic"
rollout.partial=true; train.mode=sync -> train.mode = "sync"
rollout.partial=true; rollout.program=a.py:f -> rollout.program
rollout.partial=true; train.mode=bounded; train.exact_lag=true -> train.exact_lag
rollout.group_size=1 -> rollout.group_size
rollout.max_new_tokens=4096 -> rollout.max_context
data.prompt_template=hello -> data.prompt_template
algorithm.dynamic_sampling=true; algorithm.advantage=reinforce_plus_plus; train.mode=sync; rollout.group_size=1 -> equal
algorithm.dynamic_sampling=true; stages.judge={gives=["quality"], reward_weight=1} -> stages.judge.reward_weight
algorithm.dual_clip=1.0 -> algorithm.dual_clip = 1 must be above 1
algorithm.dual_clip=-3.0 -> algorithm.dual_clip = -3 must be above 1
algorithm.dual_clip=3.0; algorithm.loss=gspo -> one of grpo, dapo, dr_grpo
algorithm.mismatch=truncate; algorithm.old_policy=rollout -> algorithm.old_policy = "rollout"
algorithm.mismatch_reject=token; algorithm.old_policy=previous; train.mode=bounded; train.max_staleness=2 -> _reject
algorithm.mismatch=truncate; algorithm.old_policy=previous; train.mode=bounded; train.max_staleness=2 -> old_policy
algorithm.gradient_control=gac; algorithm.gac_low=auto; train.mode=one_step_off -> train.mode = "one_step_off"
algorithm.gac_low=0.3; algorithm.gac_high=0.3 -> algorithm.gac_high
train.warmup_steps=61 -> train.warmup_steps (61) must be at most train.steps x train.updates (60)
train.warmup_steps=120; train.updates=2; train.schedule=linear -> train.warmup_steps (120) must be below
train.warmup_steps=60; train.schedule=cosine -> train.warmup_steps (60) must be below
train.min_learning_rate=1e-3 -> train.learning_rate (1e-06)
train.steps=6; train.profile=[1] -> train.profile
train.steps=6; train.profile=[3, 2] -> train.profile
train.steps=6; train.profile=[5, 6] -> train.profile
train.profile=[-1, 2] -> train.profile
queue.store=transferqueue -> queue.unauthenticated = true
queue.store=transferqueue; queue.address=auto -> anyone who can reach the Ray cluster's nodes
reward.functions=[{function="a.py:f"}, {function="b.py:f"}] -> two functions are called 'f'
reward.functions=[{function="math", name="a b"}] -> name = 'a b'
reward.functions=[{function="math", name="a_std"}] -> name = 'a_std'
reward.functions=[{function="math", weights=2}] -> unknown key reward.functions.0.weights
reward.functions=[{weight=2}] -> reward.functions.0.function
reward.functions=math -> reward.functions = 'math': must be a list
reward.functions=[{function="math"}]; reward.function=exact -> set reward.function = ""
stages.Judge={gives=["quality"]} -> [stages.Judge]: a stage name
stages.reward={gives=["quality"]} -> [stages.reward]
stages.judge={} -> stages.judge.gives must name at least one column, for example gives = ["judge"]
stages.judge={gives=["quality"], needs=[]} -> stages.judge.needs
stages.judge={gives=["Quality"]} -> stages.judge.gives: 'Quality'
stages.judge={gives=["scores"]} -> stages.judge.gives: scores
stages.judge={gives=["reference_logprobs"]} -> stages.judge.gives: reference_logprobs
stages.judge={gives=["a", "b"], reward_weight=1} -> stages.judge.reward_weight
stages.judge={gives=["quality"], tensor=2} -> stages.judge.tensor only applies to [stages.reference]
stages.judge={gives=["quality"], restarts=0} -> stages.judge.restarts only applies to [stages.reference]
stages.a={gives=["quality"]}; stages.b={gives=["quality"]} -> quality is given twice, by stages.a and stages.b
stages.a={gives=["x", "x"]} -> x is given twice, by stages.a and stages.a
stages.judge={gives=["quality"], needs=["text"]} -> there are prompt, responses, logprobs, scores, quality
stages.judge={gives=["quality"], needs=["reference_logprobs"]} -> needs a table [stages.reference]
stages.a={gives=["x"], needs=["y"]}; stages.b={gives=["y"], needs=["scores", "x"]} -> in a cycle: a
stages.a={gives=["x"], needs=["x"]} -> in a cycle: a → a
stages.reference={} -> set algorithm.kl_coef above 0, or remove the stage
algorithm.kl_coef=0.1; stages.reference={gives=["quality"]} -> stages.reference.gives can't be changed
algorithm.kl_coef=0.1; stages.reference={reward_weight=1} -> stages.reference.reward_weight can't be changed
algorithm.kl_coef=0.1; stages.reference={needs=["responses"]} -> stages.reference.needs can't be changed
algorithm.kl_coef=0.1; stages.reference={devices=[4096]} -> stages.reference.devices names cores [4096]
algorithm.kl_coef=0.1; stages.reference={devices=[0], data=2} -> stages.reference.devices
algorithm.loss=m2po; algorithm.old_policy=behavior; train.mode=sync -> algorithm.old_policy = "rollout"
algorithm.loss=bapo; algorithm.old_policy=behavior; train.mode=one_step_off -> algorithm.old_policy = "rollout"
algorithm.loss=bapo; algorithm.old_policy=previous; train.mode=bounded; train.max_staleness=2 -> "previous" is not that
algorithm.loss=m2po; algorithm.old_policy=rollout -> train.mode = "sync"
data.heldout= -> data.heldout_fraction
data.heldout=a.json; data.heldout_fraction=0.1 -> data.heldout_fraction
data.system=You add. -> data.system needs data.prompt_template = "chat"
data.prompt_template=chat; data.chat_template_kwargs.messages=1 -> data.chat_template_kwargs.messages: Metronome
data.prompt_template=chat; data.chat_template_kwargs.tools=add -> data.chat_template_kwargs.tools = 'add'
data.prompt_template=chat; data.chat_template_kwargs.day=2026-11-26 -> data.chat_template_kwargs.day
data.prompt_template=chat; data.chat_template_kwargs=3 -> data.chat_template_kwargs = 3: must be a table
data.columns.answr=x -> did you mean data.columns.answer?
data.train=[] -> data.train
data.train=[{path = "a", weight = 1}, "b"] -> data.train: give each of its sets a weight, or none
data.train=[{path = "a", weight = -1}] -> data.train
data.train=[{path = "a", wieght = 1}] -> a path, or a list of paths or of tables such as
data.train=3 -> data.train = 3: expected a path
algorithm.bapo.low=[0.5, 2] -> algorithm.bapo.low.1 = 2
algorithm.bapo.share=2 -> algorithm.bapo.share = 2
"""
"""Overrides, and what their refusal has in it."""
TAKEN = """
train.warmup_steps=60
train.warmup_steps=59; train.schedule=linear
algorithm.mismatch=mask; algorithm.old_policy=previous
algorithm.mismatch=mask; algorithm.old_policy=previous; train.mode=one_step_off
algorithm.mismatch=mask; algorithm.old_policy=previous; train.mode=bounded
algorithm.mismatch=mask; algorithm.mismatch_level=sequence; train.mode=bounded; train.max_staleness=2
algorithm.mismatch_reject=geometric; algorithm.old_policy=behavior; train.mode=bounded; train.max_staleness=2
algorithm.mismatch_reject=geometric; algorithm.old_policy=rollout; train.mode=bounded; train.max_staleness=2
algorithm.mismatch=truncate; algorithm.gradient_control=gac; algorithm.gac_high=auto; train.mode=sync
algorithm.loss=bapo; algorithm.old_policy=rollout; train.mode=bounded; train.max_staleness=2
algorithm.loss=m2po; algorithm.old_policy=previous; train.mode=one_step_off
algorithm.dynamic_sampling=true; stages.judge={gives=["quality"]}
algorithm.kl_coef=0.1; stages.reference={devices=[0]}
"""
NO_EFFECT = """
algorithm.clip_high=0.28 -> algorithm.clip_high = 0.28
algorithm.loss=gpg; algorithm.clip_low=0.1 -> algorithm.clip_low = 0.1
algorithm.kl_estimator=k1 -> algorithm.kl_estimator = "k1"
algorithm.gac_high=0.5 -> algorithm.gac_high = 0.5
algorithm.overlong_penalty=0.5 -> algorithm.overlong_penalty = 0.5
cluster.wait_s=5 -> cluster.wait_s = 5.0
queue.address=auto -> queue.address = "auto"
algorithm.m2po.threshold=0.1 -> algorithm.m2po.threshold = 0.1
algorithm.bapo.share=0.4 -> algorithm.bapo.share = 0.4
algorithm.mismatch_level=sequence -> algorithm.mismatch_level = "sequence"
algorithm.mismatch_limit=5 -> algorithm.mismatch_limit = 5.0
algorithm.mismatch=mask; algorithm.mismatch_reject_limit=3 -> algorithm.mismatch_reject_limit = 3.0
train.min_learning_rate=1e-7 -> train.min_learning_rate = 1e-07
rollout.program_timeout_s=5 -> rollout.program_timeout_s = 5.0
rollout.max_turns=3 -> rollout.max_turns = 3
reward.memory_gb=2 -> reward.memory_gb = 2.0
reward.environment=["JUDGE_KEY"] -> reward.environment = ['JUDGE_KEY']
weights.interface=eth0 -> weights.interface = "eth0"
evaluate.max_wait_s=3 -> evaluate.max_wait_s = 3.0
algorithm.gradient_control=measure; algorithm.gac_high=0.5 -> algorithm.gac_high = 0.5
algorithm.gradient_control=measure; algorithm.gac_low=0.2 ->
algorithm.loss=mine.py:loss; algorithm.m2po.threshold=0.1 ->
algorithm.mismatch_limit=5; algorithm.mismatch=truncate ->
train.min_learning_rate=1e-7; train.schedule=cosine ->
rollout.max_turns=3; rollout.program=mine.py:talk ->
reward.memory_gb=2; reward.function=mine.py:score ->
reward.environment=["JUDGE_KEY"]; rollout.program=mine.py:talk ->
weights.interface=eth0; weights.transport=gloo ->
evaluate.max_wait_s=3; evaluate.every=2 ->
algorithm.clip_high=0.28; algorithm.old_policy=previous ->
algorithm.clip_high=0.28; train.updates=2; train.prompts_per_step=2 ->
algorithm.clip_high=0.28; algorithm.loss=mine.py:loss ->
algorithm.kl_estimator=k1; algorithm.kl_coef=0.1 ->
algorithm.gac_high=0.5; algorithm.gradient_control=gac ->
algorithm.overlong_penalty=0.5; algorithm.overlong_buffer=4 ->
cluster.engine=ray; cluster.wait_s=5 ->
queue.store=transferqueue; queue.unauthenticated=true ->
stages.judge={gives=["quality"], reward_weight=0.5} ->
"""
"""Overrides, and the key that nothing reads then."""


def lines(table):
    return table.strip().splitlines()


@pytest.mark.parametrize("line", lines(REFUSED))
def test_a_combination_that_can_not_be_is_refused_by_key(line):
    given, named = line.split(" -> ")
    with pytest.raises(BadInput) as refused:
        load_config(None, given.split("; "))
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("line", lines(TAKEN))
def test_its_neighbour_is_taken(line):
    load_config(None, line.split("; "))


@pytest.mark.parametrize("line", lines(NO_EFFECT))
def test_a_key_that_nothing_reads_is_named(line):
    given, _, named = line.partition(" ->")
    found = list(without_effect(load_config(None, given.split("; "))))
    assert (len(found) == 1 and f"{named.strip()} has no effect" in found[0]) if named else found == []


def test_the_recipes_that_ship_have_no_key_without_effect():
    for path in (HOME / "infra/recipes").rglob("*.toml"):
        assert list(without_effect(load_config(path))) == [], path


def test_a_date_is_no_argument_of_vllm():
    with pytest.raises(ValueError, match=r"rollout\.vllm\.revision = datetime"):
        Config(rollout={"engine": "vllm", "vllm": {"revision": datetime.date(2026, 11, 26)}})


def test_a_name_of_a_reward_has_at_most_100_characters():
    assert Reward(functions=[WeightedReward(function="math", name="y" * 100)]).named[0].name == "y" * 100
    with pytest.raises(ValueError, match="a name has 1 to 100 letters, digits"):
        Reward(functions=[WeightedReward(function="math", name="y" * 101)])
