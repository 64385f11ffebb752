import contextlib
import json
import shutil

import pytest
from transformers import AutoConfig

from engine.config import Config, Model, Rollout
from engine.config.recipe import HOME, load_config
from engine.config.stages import Stage
from engine.errors import BadInput
from engine.orchestrator.checks import EMBEDDED, check_instances, check_rollouts, check_training
from engine.orchestrator.stages import stages_of
from engine.run.commands import instance_command
from engine.run.vllm_command import MARKER, PYTHON
from support.runs import config_of
from support.tiny_models import save
from tasks.stages.input_checks import _check_prompts, _warn, check_inputs


def a_config(folder, **tables):
    sizes = {"max_context": 128, "max_new_tokens": 16} | tables.pop("rollout", {})
    return Config(model=Model(path=str(folder)), rollout=Rollout(**sizes), **tables)


def test_the_embedded_engines_families_are_those_that_its_model_names():
    from engine.instance.embedded.rollout_model import SUPPORTED

    configs = {kind: type(AutoConfig.for_model(kind)).__name__ for kind in SUPPORTED}
    assert sorted(EMBEDDED) == sorted(name.removesuffix("Config") + "ForCausalLM" for name in configs.values())


def an_environment(folder, monkeypatch, device):
    """What `make vllm` leaves behind, as far as anybody looks before an instance starts."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/python").touch(mode=0o755)
    (folder / MARKER).write_text(f"{device}\n")
    monkeypatch.setenv(PYTHON, str(folder / "bin/python"))


def test_routes_are_replayed_for_mixtures_only(tmp_path, monkeypatch):
    replaying = {"rollout": {"engine": "vllm"}, "algorithm": {"routing_replay": True}}
    save(tmp_path / "dense")
    with pytest.raises(BadInput, match=r"algorithm.routing_replay is for mixtures of experts.*is dense"):
        check_rollouts(a_config(tmp_path / "dense", **replaying))
    save(tmp_path / "mixture", "qwen3_moe")
    with pytest.raises(BadInput, match='"embedded" does not run Qwen3MoeForCausalLM, only Llama.*Qwen3For'):
        check_rollouts(a_config(tmp_path / "mixture"))
    config = a_config(tmp_path / "mixture", **replaying)
    check_rollouts(config)
    an_environment(tmp_path, monkeypatch, "cpu")
    with pytest.raises(BadInput, match=r"algorithm.routing_replay: vLLM on a CPU"):
        check_instances(config)
    an_environment(tmp_path, monkeypatch, "cuda")
    arguments, _ = instance_command(
        config=config, model=tmp_path / "mixture", name="i", number=0, port_file=tmp_path / "port"
    )
    assert "--routes" in arguments
    train, reference = stages_of(config.model_copy(update={"stages": {"reference": Stage()}}), None)
    assert "routes" in train.needs & reference.needs


SCORED = {"algorithm.kl_coef": 0.1}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (SCORED | {"stages.reference.tensor": 2}, ""),
        (SCORED | {"stages.reference.tensor": 3}, "stages.reference.tensor = 3 does not divide its 4 attention heads"),
        (SCORED | {"stages.reference.pipeline": 4}, "stages.reference.pipeline = 4 does not divide its 2 layers"),
        *(({"train.recompute": setting}, "") for setting in (True, 2, "selective")),
        ({"train.recompute": 3}, "train.recompute = 3: a pipeline stage has 2 layers; true recomputes all"),
        ({"train.recompute": 2, "parallel.pipeline": 2}, "train.recompute = 2: a pipeline stage has 1 layers"),
        ({"parallel.tensor": 2, "parallel.data": 3}, ""),
        ({"parallel.tensor": 4, "parallel.pipeline": 4}, "parallel.pipeline = 4 does not divide its 2 layers"),
        ({"rollout.max_context": 2049}, "rollout.max_context = 2,049 is more than the"),
        ({"evaluate.max_context": 2049}, "evaluate.max_context = 2,049 is more than the"),
        ({"rollout.engine": "vllm", "rollout.tensor": 3}, "rollout.tensor = 3 does not divide the model's 4 attention"),
    ],
)
def test_a_layout_or_a_context_that_does_not_fit_the_model_is_refused_by_its_own_keys(settings, keys, said):
    with pytest.raises(BadInput, match=said) if said else contextlib.nullcontext():
        check_training(config_of(settings | keys))


PAIR = {"rollout.tensor": 2, "parallel.tensor": 2}
SCORER = SCORED | {"stages.reference.tensor": 2}
SHARED = {"rollout.share_devices": True, "rollout.devices": "[0]", "rollout.vllm.gpu_memory_utilization": 0.4}
CPU = {"platform.device": "cpu"}
INSTANCES = [
    ("cuda", None, PAIR | {"rollout.devices": "[2, 3]"}, ""),
    ("cuda", None, PAIR | {"rollout.instances": 0, "rollout.listen": "10.0.0.1:7000"}, ""),
    (
        "cuda",
        None,
        PAIR | {"rollout.instances": 0},
        r"rollout\.instances = 0: .* only this machine reaches rollout\.listen",
    ),
    ("cpu", None, {"rollout.instances": 0}, ""),
    (
        "cpu",
        None,
        {"rollout.instances": 0, "dry_run.joining": 1},
        r"dry_run\.joining = 1: .*METRONOME_TOKEN on all nodes",
    ),
    ("cuda", None, PAIR, r"rollout\.devices is empty, so each .*: set rollout\.devices = \[2, 3\]"),
    ("npu", None, PAIR, r"rollout\.devices is empty, so each .*: set rollout\.devices = \[2, 3\]"),
    ("auto", None, PAIR, r"rollout\.devices is empty, so each .*: set rollout\.devices = \[2, 3\]"),
    ("cuda", None, PAIR | {"rollout.devices": "[1, 2]"}, r"\[1\], which the trainer ranks use; they use \[0, 1\]"),
    ("cuda", None, PAIR | {"rollout.devices": "[14, 15]"}, ""),  # more than the plan's platform.devices_per_node
    ("cuda", None, PAIR | {"rollout.devices": "[3, 4, 5]"}, r"3 devices, 1 instances of rollout\.tensor = 2 take 2"),
    ("cuda", "2, 3", {"rollout.devices": "[0]"}, ""),
    ("cuda", "2, 3", {"rollout.devices": "[2]"}, r"\[2\], which the trainer ranks use; they use \[2\]"),
    ("cuda", "2, 3", {}, r"is empty.*set rollout\.devices = \[3\]"),
    ("cuda", "GPU-1,GPU-2", {"rollout.devices": "[0]"}, ""),
    ("cuda", None, SCORER | {"rollout.devices": "[3]"}, ""),
    (
        "cuda",
        None,
        SCORER | {"rollout.devices": "[2]"},
        r"which the ranks of \[stages.reference\] use; .* \[1, 2\]",
    ),
    ("cuda", None, SCORER | {"rollout.devices": "[1]", "stages.reference.devices": "[2, 3]"}, ""),
    ("cuda", None, SCORER, r"set rollout.devices = \[3\]"),
    ("cuda", None, SHARED, ""),
    ("cuda", None, SHARED | {"weights.transport": "gloo"}, ""),
    ("cuda", None, SHARED | {"weights.transport": "nccl"}, r'"nccl" does not connect two processes of one .*\[0\]'),
    ("cuda", None, {"rollout.share_devices": True}, r"needs rollout\.vllm\.gpu_memory_utilization, the share"),
    ("cuda", None, CPU, ""),
    ("cuda", None, CPU | {"rollout.instances": 2}, r"each of the 2 instances .* from 0 on: set .* = \[0, 1\]"),
    ("cpu", None, {}, ""),
    (
        "cpu",
        None,
        {"rollout.devices": "[1000000]"},
        r"cores \[1000000\], which this process can't use; it has \[",
    ),
    ("cpu", None, CPU | {"rollout.devices": "[1000000]"}, r"rollout\.devices names cores \[1000000\]"),
    ("nowhere", None, {}, "METRONOME_VLLM_PYTHON=/nowhere/python: there is no interpreter"),
    ("nowhere", None, {"rollout.engine": "embedded"}, ""),
]
"""What vLLM's environment is for, what the environment names, keys, and what is said of them."""


@pytest.mark.parametrize(("device", "visible", "keys", "said"), INSTANCES)
def test_instances_that_have_no_environment_or_would_get_others_devices_are_refused(
    tmp_path, monkeypatch, device, visible, keys, said
):
    kind = "npu" if device == "auto" else device
    given = {"rollout.engine": "vllm"} | ({} if kind in ("cpu", "nowhere") else {"platform.device": device}) | keys
    if kind == "nowhere":
        monkeypatch.setenv(PYTHON, "/nowhere/python")
    else:
        an_environment(tmp_path, monkeypatch, kind)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(BadInput, match=said) if said else contextlib.nullcontext():
        check_instances(config_of(given))


def test_a_replay_needs_no_instances(monkeypatch, settings):
    monkeypatch.setenv(PYTHON, "/nowhere/python")
    config = config_of(settings | {"rollout.engine": "vllm"})
    check_inputs(config, sampling=False)
    with pytest.raises(BadInput, match="there is no interpreter"):
        check_inputs(config)


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_that_starts_an_instance_needs_vllm_before_anything_is_read(monkeypatch, settings, training):
    """Also in a run all of whose own instances join."""
    monkeypatch.setenv(PYTHON, "/nowhere/python")
    config = config_of(settings | {"rollout.engine": "vllm", "rollout.instances": 0, "data.train": "nowhere.jsonl"})
    with pytest.raises(BadInput, match="there is no interpreter"):
        check_inputs(config, training=training, evaluates=True)
    if training:
        with pytest.raises(BadInput, match=r"nowhere\.jsonl"):
            check_inputs(config)


@pytest.fixture(autouse=True)
def warned_of_nothing_yet():
    _warn.cache_clear()


GPG = {"algorithm.advantage": "gpg", "algorithm.kl_coef": 0}
OFF_POLICY = "the updates of a step after its first are off-policy"
TOO_WIDE = "algorithm.clip_low = 0.2 is for ratios of tokens"
ROUNDED = "rollout.vllm.kv_cache_dtype = 'fp8' rounds"


def gpg(loss, old_policy, updates):
    return GPG | {"algorithm.loss": loss, "algorithm.old_policy": old_policy, "train.updates": updates}


def several(mode, updates):
    return {"train.mode": mode, "train.updates": updates, "algorithm.old_policy": "behavior"}


def clipped(loss, low):
    return {"algorithm.loss": loss, "algorithm.clip_low": low, "algorithm.old_policy": "previous"}


def cached(dtype):
    return {"rollout.engine": "vllm", "rollout.vllm.kv_cache_dtype": dtype}


@pytest.mark.parametrize(
    ("keys", "said", "warned"),
    [
        (gpg("grpo", "previous", 1), "clipped", True),
        (gpg("gspo", "rollout", 1), "clipped", True),
        (gpg("grpo", "behavior", 1), "clipped", False),
        (gpg("grpo", "behavior", 2), "clipped", True),
        (gpg("gpg", "previous", 1), "clipped", False),
        (several("periodic", 2), OFF_POLICY, True),
        (several("sync", 3), OFF_POLICY, True),
        (several("sync", 1), OFF_POLICY, False),
        (several("bounded", 2), OFF_POLICY, False),
        (clipped("gspo", 0.2), TOO_WIDE, True),
        (clipped("gspo", 3e-4), TOO_WIDE, False),
        (clipped("grpo", 0.2), TOO_WIDE, False),
        (clipped("gspo", 0.2) | {"algorithm.old_policy": "behavior"}, TOO_WIDE, False),
        (cached("fp8"), ROUNDED, True),
        (cached("auto"), ROUNDED, False),
    ],
)
def test_what_changes_the_numbers_is_warned_of(settings, capsys, keys, said, warned):
    if said == "clipped":
        loss, old_policy = keys["algorithm.loss"], keys["algorithm.old_policy"]
        said = f'with algorithm.loss = "{loss}" and algorithm.old_policy = "{old_policy}" is clipped'
    check_inputs(config_of(settings | keys), sampling=keys.get("rollout.engine") != "vllm")
    assert (said in capsys.readouterr().out) == warned


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.tensor=3"], "parallel.tensor = 3 does not divide its 8 attention heads"),
        (["parallel.pipeline=3"], "parallel.pipeline = 3 does not divide its 4 layers"),
        (["parallel.data=2", "parallel.expert=2"], "parallel.expert = 2 shares experts, but the model has none"),
        (["rollout.max_context=4096"], "rollout.max_context = 4,096 is more than the 2,048 positions"),
        (["algorithm.loss=nowhere.py:own"], "algorithm.loss = .*nowhere.py"),
        (["checkpoint.path=README.md/below"], "checkpoint.path = '/.*/README.md/below': .*README.md is a file"),
        (["checkpoint.path=ftp://there"], "expected a folder or s3://bucket/folder"),
    ],
)
def test_what_does_not_fit_the_quickstarts_model_is_refused(monkeypatch, tmp_path, overrides, said):
    monkeypatch.chdir(HOME)
    with pytest.raises(BadInput, match=said):
        check_inputs(load_config("infra/recipes/quickstart.toml", [f"run.output={tmp_path}", *overrides]))


def test_a_step_of_more_prompts_than_there_are_problems_is_warned_of(capsys):
    _warn.cache_clear()
    _check_prompts(Config(train={"prompts_per_step": 32}), problems=32)
    assert capsys.readouterr().out == ""
    _check_prompts(Config(train={"prompts_per_step": 33}), problems=32)
    assert "train.prompts_per_step = 33 is more than the 32 problems of data.train" in capsys.readouterr().out


def test_a_checkpoint_path_that_is_not_there_yet_is_none_of_them(monkeypatch, tmp_path):
    monkeypatch.chdir(HOME)
    given = [f"run.output={tmp_path}", f"checkpoint.path={tmp_path}/a/b"]
    check_inputs(load_config("infra/recipes/quickstart.toml", given))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("key", "returns"),
    [
        ("advantage", "rewards[:1]"),
        ("loss", "terms.advantages"),
        ("gradient_control", "'skip'"),
    ],
)
def test_a_users_function_is_tried_before_any_process_starts(tmp_path, key, returns):
    save(tmp_path, "qwen3")
    arguments = {"advantage": "rewards, lengths", "loss": "terms, coefficients", "gradient_control": "step"}[key]
    (tmp_path / "own.py").write_text(f"def own({arguments}): return {returns}")
    with pytest.raises(BadInput, match=rf"algorithm\.{key} = .*own.py:own.*it failed in a trial call"):
        check_training(a_config(tmp_path, algorithm={key: f"{tmp_path / 'own.py'}:own"}))


def test_a_store_that_is_not_installed_is_refused_with_the_command_that_installs_it(tiny_model, monkeypatch):
    config = a_config(tiny_model, queue={"store": "transferqueue", "unauthenticated": True})
    monkeypatch.setattr("engine.orchestrator.checks.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r'pip install "metronome\[transferqueue\]" into'):
        check_training(config)


def test_a_model_that_nothing_ends_is_refused(settings, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "endless")
    (model / "generation_config.json").unlink()
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        kept = {name: value for name, value in json.loads((model / name).read_text()).items() if name != key}
        (model / name).write_text(json.dumps(kept))
    with pytest.raises(BadInput, match=r"endless: nothing ends a response: .*name a token in rollout\.stop"):
        check_inputs(config_of(settings | {"model.path": str(model)}))
    check_inputs(config_of(settings | {"model.path": str(model), "rollout.stop": '["#"]'}))


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"problem": "1+1=", "answer": "2"}, r"data\.prompt_template: \{kind\} is no column of .*line 301"),
        (
            {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2", "kind": "sum"},
            "line 301: .* list of messages",
        ),
    ],
)
def test_every_row_must_fit_the_template_before_the_start(settings, tmp_path, last, message):
    rows = [{"problem": f"{n}+0=", "answer": str(n), "kind": "sum"} for n in range(300)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, last]))
    given = {"data.train": str(path), "data.heldout": "", "data.heldout_fraction": "0.1"}
    with pytest.raises(BadInput, match=message):
        check_inputs(config_of(settings | given | {"data.prompt_template": "{kind}: {problem}"}))


@pytest.mark.parametrize(
    ("template", "chosen", "warned"),
    [
        ("<|user|>{{ messages[0].content }}", "{problem}", True),
        ("<|user|>{{ messages[0].content }}", "chat", False),
        ("<|user|>{{ messages[0].content }}", "<|endoftext|>{problem}", True),
        ("<|user|>{{ messages[0].content }}<|im_end|>", "<|im_start|>{problem}", False),
        ((HOME / "data/quickstart_model/chat_template.jinja").read_text(), "{problem}", False),
        (None, "{problem}", False),
    ],
)
def test_a_chat_template_that_is_not_used_is_warned_of(
    settings, tiny_model, tmp_path, capsys, template, chosen, warned
):
    """Not where the text has special tokens, as a chat template written out has, and not for the quickstart's model."""
    model = shutil.copytree(tiny_model, tmp_path / "instruct")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    check_inputs(config_of(settings | {"model.path": str(model), "data.prompt_template": chosen}))
    told = f"{model}: its tokenizer has a chat template, which data.prompt_template = {chosen!r} does not use"
    assert (told in " ".join(capsys.readouterr().out.split())) == warned


QWEN = (HOME / "data/quickstart_model/chat_template.jinja").read_text()
USER_ONLY = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|endoftext|>{% endfor %}"
KINDLY = "{% if kindly %}Please: {% endif %}" + QWEN
THINKS = "{% if a or b %}Think. {% endif %}" + QWEN
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "given", "told"),
    [
        (QWEN, {}, []),
        (QWEN, {"data.system": "Be brief."}, []),
        (USER_ONLY, {"data.system": "Be brief."}, ["data.system changes no prompt"]),
        (KINDLY, {"data.chat_template_kwargs.kindly": "true"}, []),
        (KINDLY, {"data.chat_template_kwargs.kindly": "false"}, ["data.chat_template_kwargs.kindly changes no prompt"]),
        (KINDLY, {"data.chat_template_kwargs.kindli": "true"}, ["data.chat_template_kwargs.kindli changes no prompt"]),
        (
            THINKS,
            {"data.chat_template_kwargs": "{a=true,b=true,c=1}"},
            [".a changes no prompt", ".c changes no prompt"],
        ),
        (PLAIN, {}, ["writes after an answer, '\\n', no token ends a response"]),
        (PLAIN, {"rollout.stop": '["\\n"]'}, []),
        ("{{ messages[0].content }}", {}, ["writes after an answer, '', no token ends"]),
    ],
)
def test_what_a_chat_template_leaves_without_effect_is_warned_of(
    settings, tiny_model, tmp_path, capsys, template, given, told
):
    model = shutil.copytree(tiny_model, tmp_path / "instruct")
    (model / "chat_template.jinja").write_text(template)
    check_inputs(config_of(settings | {"model.path": str(model), "data.prompt_template": "chat"} | given))
    shown = " ".join(capsys.readouterr().out.split())
    for sentence in ("changes no prompt", "writes after an answer"):
        assert shown.count(sentence) == sum(sentence in one for one in told)
    assert all(one in shown for one in told)


@pytest.mark.parametrize("template", ["chat", "<|im_start|>{problem}<|im_end|>", "{problem} ({level})"])
def test_special_tokens_typed_in_problems_are_counted(settings, tiny_model, tmp_path, capsys, template):
    rows = [
        {"problem": f"{n}+1000=", "answer": str(n + 1000), "level": "<|pad|>" if n in (5, 6) else "1"}
        for n in range(400)
    ]
    for n in (3, 7, 300):
        rows[n]["problem"] += "<|im_end|>\n<|im_start|>assistant"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"problem": "0+0=", "answer": "0", "level": "1"}) + "\n")
    sets = {"data.train": str(path), "data.heldout": str(tmp_path / "heldout.jsonl")}
    given = sets | {"data.prompt_template": template}
    check_inputs(config_of(settings | given))
    count = 5 if "level" in template else 3
    told = f"{path}: {count} of 400 problems contain special tokens of the model, such as '<|im_"
    shown = " ".join(capsys.readouterr().out.split())
    assert told in shown
    assert shown.count("contain special tokens") == 1


def test_a_class_of_transformers_that_reads_otherwise_is_warned_of(settings, tiny_model, tmp_path, capsys):
    model = shutil.copytree(tiny_model, tmp_path / "other")
    named = json.loads((model / "tokenizer_config.json").read_text())
    file = json.loads((model / "tokenizer.json").read_text())
    file["pre_tokenizer"]["add_prefix_space"] = True
    (model / "tokenizer.json").write_text(json.dumps(file))
    (model / "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": "GPT2Tokenizer"}))
    check_inputs(config_of(settings | {"model.path": str(model)}))
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{model}: transformers (GPT2Tokenizer) reads" in shown
    assert "Metronome uses tokenizer.json, other programs may not" in shown


def test_a_special_token_of_the_prompts_that_tokenizer_json_lacks_is_refused(settings, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "lost")
    named = json.loads((model / "tokenizer_config.json").read_text())
    named["added_tokens_decoder"] = {"260": {"content": "<|turn|>", "special": True}}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    given = settings | {"model.path": str(model)}
    check_inputs(config_of(given))
    rows = [{"problem": problem, "answer": "1"} for problem in ("1=", "<|turn|>1=")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for typed in ({"data.prompt_template": "{problem}<|turn|>"}, {"data.train": str(tmp_path / "rows.jsonl")}):
        with pytest.raises(BadInput, match=r"lost: prompts have the special token '<\|turn\|>'.*tokenizer.json does"):
            check_inputs(config_of(given | typed))


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_in_the_models_folder_is_refused(settings, tiny_model, tmp_path, file):
    model = shutil.copytree(tiny_model, tmp_path / "adapted")
    (model / file).touch()
    with pytest.raises(BadInput, match=rf"adapted: it has an adapter \({file}\), which is not loaded: merge it"):
        check_inputs(config_of(settings | {"model.path": str(model)}))
