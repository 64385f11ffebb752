"""Hugging Face → Megatron → Hugging Face, and the logits, on one process and cut over two."""

import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from engine.errors import BadInput, MetronomeError
from engine.model.shape import read_shape
from engine.platform import get_platform, single_session
from engine.wire.weights.hf_folder import open_folder

CASES = ["qwen3", "qwen3-tied", "qwen2", "qwen2-tied", "llama", "llama-tied", "one", "moe", "moe-tied"]
IDS = torch.randint(61, (50,), generator=torch.Generator().manual_seed(1)).tolist()


def settings_of(case):
    from support.tiny_models import LLAMA3_ROPE

    kind, _, tied = case.partition("-")
    changes = {
        "qwen3": {"head_dim": 16},
        "qwen2": {},
        "llama": {"rope_parameters": LLAMA3_ROPE},
        "one": {"kind": "qwen2", "num_key_value_heads": 1},  # two tensor ranks share it
        "moe": {"head_dim": 16, "mlp_only_layers": [0], "norm_topk_prob": bool(tied)},
    }[kind]
    return {"kind": "qwen3_moe" if kind == "moe" else kind, "tie_word_embeddings": bool(tied), **changes}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random models of two layers, in several shards each, and the logits of transformers beside them."""
    from support.tiny_models import reference, save

    root = tmp_path_factory.mktemp("models")
    for case in CASES:
        save(root / case, shard="60KB", **settings_of(case))
        with torch.no_grad():
            torch.save(reference(str(root / case))(torch.tensor([IDS])).logits[0, :-1], root / f"{case}.logits")
    return root


@pytest.fixture(scope="module", autouse=True)
def _one_process():
    with single_session(get_platform("cpu")):
        yield


def build_and_load(folder):
    from engine.model.build import build_model
    from engine.model.hf_weights import load_weights

    shape = read_shape(folder)
    model = build_model(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    with open_folder(folder) as files:
        load_weights(model, files.read_tensor, shape)
    return model, shape


def exported(model, shape, factor=1):
    from engine.model.hf_weights import export_weights

    tensors = {name: factor * parameter.detach() for name, parameter in model.named_parameters()}
    return {name: tensor.clone() for name, tensor in export_weights(tensors, model, shape)}


def stored(folder):
    with open_folder(folder) as files:
        return {name: files.read_tensor(name).clone() for name in files.names}


def assert_identical(found, expected):
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@torch.no_grad()
def logit_error(model, folder):
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from engine.model.build import compute_hidden, output_weight
    from engine.model.layout import make_layout

    theirs = torch.load(folder.with_suffix(".logits"))
    assert theirs.std() > 0.1
    ours = compute_hidden(model.eval(), make_layout([(IDS[:1], [IDS[1:]])])) @ output_weight(model).t()
    return float((gather_from_tensor_model_parallel_region(ours)[:, :61] - theirs).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_round_trip_and_logits_on_one_process(folders, case):
    model, shape = build_and_load(folders / case)
    expected = stored(folders / case)
    found = exported(model, shape)
    assert found.keys() == expected.keys()
    assert_identical(found, expected)
    assert logit_error(model, folders / case) <= 1e-5
    if shape.tied:  # the last of several pipeline stages has a copy of the embedding
        from engine.model.hf_weights import export_weights

        copy = {"output_layer.weight": model.embedding.word_embeddings.weight}
        assert list(export_weights(copy, model, shape)) == []


@pytest.mark.slow
def test_round_trip_over_two_processes(folders, tmp_path):
    """Tensor parallelism (61 tokens: padded to 62), two pipeline stages (with a copy of a tied embedding),
    expert parallel."""
    torch.multiprocessing.spawn(two_processes, (tmp_path / "store", folders), nprocs=2)


def two_processes(rank, store, folders):
    torch.set_num_threads(1)
    get_platform("cpu").adapt_megatron()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for case in CASES:
        expected = stored(folders / case)
        tensor_parallel(rank, folders / case, expected)
        pipeline_parallel(folders / case, expected)
        if "moe" in case:
            expert_parallel(folders / case, expected)
    dist.destroy_process_group()


def in_parallel(folder, **sizes):
    """The loaded model of this rank's part; the next call ends the layout of this one."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    # as in engine.platform.session: experts are whole
    parallel_state.initialize_model_parallel(**sizes, expert_tensor_parallel_size=1, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(0)
    return build_and_load(folder)


def count(tensors):
    return sum(tensor.numel() for tensor in tensors)


def tensor_parallel(rank, folder, expected):
    model, shape = in_parallel(folder, tensor_model_parallel_size=2)
    found = exported(model, shape)
    assert found.keys() == expected.keys()
    assert_identical(found, expected)
    assert_identical({name: tensor / 2 for name, tensor in exported(model, shape, factor=2).items()}, expected)
    assert logit_error(model, folder) <= 1e-5
    cut = [name for name in expected if ".experts." not in name]
    ours = [parameter for name, parameter in model.named_parameters() if ".experts." not in name]
    assert count(ours) < 0.6 * count(expected[name] for name in cut)
    table = model.embedding.word_embeddings.weight
    assert table.shape[0] == 31
    assert bool((table[-1] == 0).all()) == (rank == 1)


def pipeline_parallel(folder, expected):
    model, shape = in_parallel(folder, pipeline_model_parallel_size=2)
    found = exported(model, shape)
    assert_identical(found, expected)
    names = [None, None]
    dist.all_gather_object(names, sorted(found))
    assert sorted(names[0] + names[1]) == sorted(expected)
    assert names[0][0] == "model.embed_tokens.weight"
    if model.post_process:
        assert torch.equal(
            model.output_layer.weight, expected["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
        )


def expert_parallel(folder, expected):
    model, shape = in_parallel(folder, expert_model_parallel_size=2)
    found = exported(model, shape)
    assert found.keys() == expected.keys()
    assert_identical(found, expected)
    assert logit_error(model, folder) <= 1e-5
    assert len(model.decoder.layers[1].mlp.experts.linear_fc1) == 2


@pytest.mark.parametrize("case", ["qwen2", "moe"])
def test_load_holds_the_tensors_of_one_parameter(folders, case):
    from engine.model.build import build_model
    from engine.model.hf_weights import load_weights

    shape = read_shape(folders / case)
    model = build_model(shape)
    held = set()
    most = 0

    def watched(tensor):
        nonlocal most
        held.add(number := id(tensor))
        weakref.finalize(tensor, held.discard, number)
        most = max(most, len(held))
        return tensor

    with open_folder(folders / case) as files:
        load_weights(model, lambda name: watched(files.read_tensor(name)), shape)
    assert most == 3  # query, key and value


def test_weights_that_do_not_fit_the_configuration_are_refused(folders):
    from engine.model.build import build_model
    from engine.model.hf_weights import load_weights

    shape = read_shape(folders / "qwen2")
    model = build_model(shape)
    with open_folder(folders / "qwen2") as files:
        for name, message in [
            ("model.embed_tokens.weight", r"model\.embed_tokens\.weight is \[60, 48\], expected 61 rows"),
            ("model.layers.1.self_attn.k_proj.bias", r"k_proj\.bias is \[23\], expected 24 rows"),
            (
                "model.layers.0.mlp.down_proj.weight",
                r"mlp\.down_proj\.weight \[47, 80\] give \[47, 80\] for decoder\.layers\.0",
            ),
        ]:

            def read(asked, name=name):
                return files.read_tensor(asked)[: -1 if asked == name else None]

            with pytest.raises(BadInput, match=message):
                load_weights(model, read, shape)


def test_a_parameter_without_a_rule_is_named(folders):
    from engine.model.hf_weights import export_weights

    model, shape = build_and_load(folders / "llama")
    with pytest.raises(
        MetronomeError, match=r"decoder\.layers\.0\.self_attention\.linear_qkv\.bias has no rule for Llama"
    ):
        list(export_weights({"decoder.layers.0.self_attention.linear_qkv.bias": torch.ones(96)}, model, shape))
