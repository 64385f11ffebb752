"""The final policy as a folder; of several ranks in tests/parallel/test_export.py."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import BadInput
from engine.run.run_file import update_run
from engine.run.run_inputs import find_inputs
from engine.trainer.checkpoint.checkpoints import Checkpoints
from engine.trainer.export import export_checkpoint, export_policy
from support.checkpoint_pairs import save
from support.disk_order import disk_order
from support.policies import a_policy
from support.runs import config_of

pytestmark = pytest.mark.usefixtures("megatron")


def test_a_policy_that_is_there_is_on_the_disk(settings, tiny_model, tmp_path, monkeypatch):
    """A stage that counts as done must find it whole after a power cut."""
    policy = a_policy(settings)
    noted = disk_order(monkeypatch)
    export_policy(policy.models, policy.ranks, Path(tiny_model), tmp_path / "policy")
    named = noted.index("name policy")
    synced = {one.removeprefix("sync ") for one in noted[:named] if one.startswith("sync ")}
    assert synced == {".policy.partial", *(path.name for path in (tmp_path / "policy").iterdir())}
    assert noted[named + 1 :] == [f"sync {tmp_path.name}"]


STALE = [
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.BIN",
    "pytorch_model.bin.index.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "original/consolidated.00.pth",
    "model.gguf",
    "tf_model.h5",
    "flax_model.msgpack",
    "model.pt",
    "model.ckpt.data-00000-of-00001",
    "onnx/model.onnx",
    "onnx/model.onnx_data",
    "adapter_model.safetensors",
    "adapter_config.json",
    ".cache/x.json",
]
KEPT = {
    "generation_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/rag.jinja": "",
    "merges.txt": "#",
    "LICENSE": "free",
    "qwen.tiktoken": "",
}


@pytest.mark.parametrize("written", [{}, {"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_has_the_policys_weights_alone_and_says_their_type(settings, tiny_model, tmp_path, written, dtype):
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    config = json.loads((base / "config.json").read_text())
    without = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (base / "config.json").write_text(json.dumps(without | written))
    for name, text in {**dict.fromkeys(STALE, "old"), **KEPT}.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(text)
    policy = a_policy(settings, train__dtype=dtype, train__ratio_gap_limit=0)
    export_policy(policy.models, policy.ranks, base, tmp_path / "policy")
    there = {str(path.relative_to(tmp_path / "policy")) for path in (tmp_path / "policy").rglob("*") if path.is_file()}
    assert not there & set(STALE)
    assert {name: (tmp_path / "policy" / name).read_text() for name in KEPT} == KEPT
    expected = without | dict.fromkeys(written or ["dtype"], dtype)
    assert json.loads((tmp_path / "policy/config.json").read_text()) == expected
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto")
    assert {str(parameter.dtype) for parameter in loaded.parameters()} == {f"torch.{dtype}"}
    whole = dict(loaded.named_parameters())
    exported = dict(policy.models.export())
    assert all(torch.equal(whole[name], exported[name]) for name in whole)


def test_a_checkpoint_is_not_exported_with_another_tokenizer_than_its_own(settings, tiny_model, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    config = config_of(settings | {"model.path": str(base)})
    root = tmp_path / "run/checkpoints"
    root.mkdir(parents=True)
    update_run(root.parent, inputs=find_inputs(config, base))
    checkpoint = save(Checkpoints(root, a_policy(settings), config), 2)
    export_checkpoint(checkpoint, tmp_path / "made")
    (base / "chat_template.jinja").write_text("another")
    with pytest.raises(
        BadInput, match=f"trained with another tokenizer, chat template .* put the files of {base} back"
    ):
        export_checkpoint(checkpoint, tmp_path / "other")
    assert not (tmp_path / "other").exists()
