"""Checkpoints of one process: everything is in them, they are written beside the training, never look whole when they aren't.

Layouts, and a kill while one is written: tests/parallel/test_checkpoints.py. s3://: tests/unit/tasks/test_publish.py.
"""

import json
import os
import random
import shutil
import threading
from concurrent.futures import wait

import pytest
import torch
from conftest import config_of

from engine import platform
from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.trainer import checkpoint_files as files
from engine.types import Group, Prompt, Response, Score

CPU = platform.get("cpu")


@pytest.fixture(scope="module", autouse=True)
def _session():
    with platform.single(CPU):
        yield


@pytest.fixture
def build(settings, tmp_path):
    """Makes a (policy, checkpoints) pair of the same root folder, with changed settings (`train__dtype="bfloat16"`)."""
    from engine.trainer.checkpoint import Checkpoints
    from engine.trainer.policy import Policy

    def built(reference_hash="hash", root=tmp_path / "checkpoints", policy=None, **changes):
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        config = config_of(settings | {"train.ratio_gap_limit": 0} | changed)
        policy = policy or Policy(config, CPU)
        return policy, Checkpoints(root, policy, config, reference_hash)

    return built


def a_group(seed):
    draw = random.Random(seed)
    ids = [tuple(draw.randrange(256) for _ in range(length)) for length in (7, 3, 12, 5)]
    prompt = Prompt("p", "", "", tuple(draw.randrange(256) for _ in range(9)))
    responses = tuple(Response(i, (-5.0,) * len(i), ((0, 0),), (True,) * len(i), "stop", "", 0, "i") for i in ids)
    return Group(0, 0, prompt, responses, tuple(Score(draw.random()) for _ in ids))


def train(policy, seed):
    policy.start_step()
    policy.accumulate([a_group(seed)])
    policy.reduce(4)
    policy.models.copy_policy_to_old()
    return policy.update()


def save(checkpoints, step, **figures):
    checkpoints.save(step, figures)
    checkpoints.finish(30)
    return files.folder_of(checkpoints._root, step)


def assert_same(policy, other):
    for (name, ours), theirs in zip(policy.models.policy.named_parameters(), other.models.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(policy.models.old.weights, other.models.old.weights, strict=True):
        assert torch.equal(ours, theirs)


KINDS = [{}, {"train__distributed_optimizer": True}, {"train__dtype": "bfloat16"},
         {"train__dtype": "bfloat16", "train__distributed_optimizer": True}]  # fmt: skip


GAC = {"algorithm__gradient_control": "gac", "algorithm__gac_low": 0.01, "algorithm__gac_high": 0.99}
CONTROLLED = [GAC, GAC | {"train__dtype": "bfloat16", "train__distributed_optimizer": True},
              GAC | {"algorithm__gac_low": "auto", "algorithm__gac_high": "auto"}]  # fmt: skip


@pytest.mark.parametrize("saved", [*KINDS, {"train__offload": True}, *CONTROLLED])
def test_a_resumed_run_is_the_run_bit_for_bit(build, saved):
    saved = saved | {"train__warmup_steps": 5}
    policy, checkpoints = build(**saved)
    train(policy, 1), train(policy, 2)
    torch.rand(3)
    save(checkpoints, 2)
    stream = CPU.rng_state()
    other, again = build(**saved)
    torch.rand(5)
    assert again.resume() == 2
    assert all(torch.equal(value, stream[name]) for name, value in CPU.rng_state().items())
    assert_same(policy, other)
    for seed in (3, 4):
        assert train(policy, seed) == train(other, seed)
        assert_same(policy, other)


def plain(folder):
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_plain_tensors(str(folder))


def test_what_is_in_the_files(build):
    """Each tensor against the optimizer's and models' own, and what is in no tensor."""
    policy, checkpoints = build(train__dtype="bfloat16", train__warmup_steps=4)
    train(policy, 1), train(policy, 2)
    folder = save(checkpoints, 2, reward_mean=0.25, versions_seen=[1], truncated=3)
    there = plain(folder)
    old = dict(zip(dict(policy.models.policy.named_parameters()), policy.models.old.weights, strict=True))
    adam = policy.optimizer.chained_optimizers[0].optimizer
    for name, parameter in policy.models.policy.named_parameters():
        state = adam.state[parameter.main_param]
        for prefix, value in (("policy", parameter.main_param), ("optimizer.state.exp_avg.policy", state["exp_avg"]),
                              ("optimizer.state.exp_avg_sq.policy", state["exp_avg_sq"]), ("old", old[name])):  # fmt: skip
            key = f"{prefix}.{name}".replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            found = torch.cat([there[f"{key}_w"], there[f"{key}_v"]]) if f"{key}_w" in there else there[key]
            assert torch.equal(found, value), key
            assert found.dtype == (torch.bfloat16 if prefix == "old" else torch.float32)
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["updates"], state["gradient_control"]) == (2, 2, {})
    assert state["layout"] == {"tensor": 1, "pipeline": 1, "context": 1, "data": 1, "expert": 1}
    assert state["reference"] == {"path": policy.config.model.path, "hash": "hash"}
    assert state["config"]["train"]["warmup_steps"] == 4
    assert state["scheduler"]["num_steps"] == 2
    marker = files.read_marker(folder)
    assert marker["figures"] == {"reward_mean": 0.25, "truncated": 3.0}


@pytest.mark.parametrize(("saved", "loaded"), [(KINDS[0], KINDS[3]), (KINDS[3], KINDS[0]), (KINDS[1], KINDS[2])])
def test_another_optimizer_or_dtype_takes_over(build, saved, loaded):
    """Saved again by the other, weights and moments are the same files' worth of numbers."""
    policy, checkpoints = build(**saved)
    train(policy, 1), train(policy, 2)
    first = plain(save(checkpoints, 2))
    other, again = build(**loaded)
    assert again.resume() == 2
    second = plain(save(build(root=checkpoints._root / "again", policy=other, **loaded)[1], 2))
    for key, value in first.items():
        if key.startswith(("policy.", "optimizer.")):
            assert torch.equal(value, second[key]), key
    assert train(other, 3)[0] == pytest.approx(train(policy, 3)[0], rel=2e-2)  # bfloat16 has 8 bits


def test_changed_settings_take_effect_and_a_misfit_is_refused(build, settings, tmp_path):
    policy, checkpoints = build()
    train(policy, 1)
    checkpoints.prompts = "fingerprint"
    save(checkpoints, 1)
    with pytest.raises(BadInput, match="another reference model"):
        build("other")[1].resume()
    with pytest.raises(BadInput, match=r"--resume: run.seed is 5, but the run has 0"):
        build(run__seed=5)[1].resume()
    hotter, again = build(train__learning_rate=5e-3, train__steps=100)
    assert again.resume() == 1
    assert again.prompts == "fingerprint"
    assert train(hotter, 2)[1] == pytest.approx(5e-3)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(settings["model.path"], intermediate_size=96)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(BadInput, match=r"of another model than .*other.*\(intermediate differ\)"):
        build(model__path=str(tmp_path / "other"))[1].resume()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_before_the_first_update(build, dtype):
    policy, checkpoints = build(train__dtype=dtype)
    with torch.no_grad():
        policy.models.policy.decoder.final_layernorm.weight.mul_(2)
    policy.optimizer.reload_model_params()
    save(checkpoints, 0)
    other, again = build(train__dtype=dtype)
    assert again.resume() == 0
    assert train(policy, 1) == train(other, 1)
    assert_same(policy, other)


def hold(monkeypatch):
    """Writing waits until the returned event is set."""
    from engine.trainer.checkpoint_writer import Snapshot

    go, write = threading.Event(), Snapshot.write_data
    monkeypatch.setattr(Snapshot, "write_data", lambda *arguments: (go.wait(30), write(*arguments))[1])
    return go


def test_training_goes_on_while_files_are_written(build, monkeypatch):
    policy, checkpoints = build()
    train(policy, 1)
    go = hold(monkeypatch)
    before = {name: p.detach().clone() for name, p in policy.models.policy.named_parameters()}
    checkpoints.save(1)
    train(policy, 2)
    checkpoints.poll()
    assert files.latest(checkpoints._root) is None
    with pytest.raises(DeadlineError, match=r"waited 0 s for checkpoint step-000001 to be written"):
        checkpoints.finish(0.1)
    go.set()
    checkpoints.finish(30)
    other, again = build()
    assert again.resume() == 1
    for name, p in other.models.policy.named_parameters():
        assert torch.equal(p, before[name])


def test_a_failed_write_fails_the_next_call_by_name(build, monkeypatch):
    from engine.trainer.checkpoint_writer import Snapshot

    def full(*arguments):
        raise OSError(28, "No space left on device", "__0_0.distcp")

    policy, checkpoints = build()
    train(policy, 1)
    monkeypatch.setattr(Snapshot, "write_data", full)
    for call in (checkpoints.poll, lambda: checkpoints.save(2), lambda: checkpoints.finish(5)):
        checkpoints.save(1)
        assert not wait([checkpoints._flight.done], 30).not_done
        with pytest.raises(MetronomeError, match=r"checkpoint step-000001 could not be saved: .*No space left.*__0_0\.distcp"):
            call()
    assert list(files.incomplete(checkpoints._root).values()) == [
        "checkpoint step-000001 is incomplete (no _SUCCESS.json), ignored"]


def test_ranks_that_do_not_write_are_named(tmp_path):
    from engine.trainer.checkpoint_writer import Snapshot

    taken = Snapshot(str(tmp_path))
    taken.world = 4
    for rank in (0, 3):
        files.write_json(tmp_path / f"written-{rank:05d}.json", [])
    with pytest.raises(DeadlineError, match=r"trainer ranks \[1, 2\] have not written their part of .* within 0 s"):
        taken.gather(0.1)


def test_a_failed_publication_fails_the_next_call_by_name(build, tmp_path):
    (tmp_path / "file").touch()
    policy, checkpoints = build(checkpoint__path=str(tmp_path / "file"))
    with pytest.raises(MetronomeError, match=r"step-000001 could not be saved: .*publishing the checkpoint to .*/file/run"):
        save(checkpoints, 1)
    assert files.complete(checkpoints._root / "step-000001")


def test_the_last_and_the_best_are_kept(build):
    policy, checkpoints = build(checkpoint__keep_last=2, checkpoint__keep_best=2)
    (checkpoints._root / ".step-000002.partial").mkdir(parents=True)
    rewards = {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.7, 5: 0.2, 6: 0.3}
    for step, reward in rewards.items():
        save(checkpoints, step, reward_mean=reward)
    assert sorted(os.listdir(checkpoints._root)) == ["step-000001", "step-000003", "step-000005", "step-000006"]
    assert files.step_of(files.latest(checkpoints._root)) == 6
    save(checkpoints, 6)  # taken already
    assert files.read_marker(checkpoints._root / "step-000006")["figures"] == {"reward_mean": 0.3}
    save(build()[1], 6)  # but not by this run
    assert files.read_marker(checkpoints._root / "step-000006")["figures"] == {}


def test_half_written_ones_are_ignored_and_named(build, capsys):
    policy, checkpoints = build(checkpoint__keep_last=9)
    for step in (1, 2, 3, 4):
        train(policy, step)
        save(checkpoints, step)
    root = checkpoints._root
    (root / "step-000002/state.json").unlink()
    data = root / "step-000003/__0_0.distcp"
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[:-1])
    (root / "step-000004" / files.MARKER).unlink()
    (root / ".step-000005.partial").mkdir()
    other, again = build()
    assert again.resume() == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoint")] == [
        "checkpoint step-000002 is incomplete (state.json is missing), ignored",
        f"checkpoint step-000003 is incomplete (__0_0.distcp has {size - 1} bytes, _SUCCESS.json says {size}), ignored",
        "checkpoint step-000004 is incomplete (no _SUCCESS.json), ignored",
        "checkpoint step-000005 is incomplete (no _SUCCESS.json), ignored",
    ]


def test_a_lost_run_folder_resumes_from_where_it_was_published(build, tmp_path, capsys):
    place = tmp_path / "published"
    kept = {"checkpoint__path": str(place), "checkpoint__keep_last": 2}
    policy, checkpoints = build(**kept)
    for step in (1, 2, 3):
        train(policy, step)
        save(checkpoints, step)
    assert sorted(os.listdir(place / "run")) == ["step-000002", "step-000003"]
    other, elsewhere = build(root=tmp_path / "elsewhere", **kept)
    assert elsewhere.resume() == 3
    assert_same(policy, other)
    assert files.complete(tmp_path / "elsewhere/step-000003")
    (place / "run/step-000003/__0_0.distcp").write_bytes(b"cut")
    assert build(root=tmp_path / "third", **kept)[1].resume() == 2
    assert f"checkpoint {place}/run/step-000003 is incomplete (__0_0.distcp has 3 bytes" in capsys.readouterr().out
    assert build(root=tmp_path / "fourth")[1].resume() is None


def test_another_run_of_the_name_neither_takes_nor_loses_checkpoints_in_the_shared_place(build, tmp_path, capsys):
    """Two run folders with numbers of their own, one place."""
    place, kept = tmp_path / "published", {"checkpoint__path": str(tmp_path / "published"), "checkpoint__keep_last": 1}
    pairs = {}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run_id").write_text(name)
        pairs[name] = build(root=tmp_path / name / "checkpoints", **kept)
    for name, step in (("first", 100), ("second", 5), ("second", 10)):
        save(pairs[name][1], step)
    assert sorted(os.listdir(place / "run")) == ["step-000010", "step-000100"]
    assert json.loads((place / "run/step-000010" / files.MARKER).read_text())["run"] == "second"
    shutil.rmtree(tmp_path / "second/checkpoints")
    assert build(root=tmp_path / "second/checkpoints", **kept)[1].resume() == 10
    with pytest.raises(MetronomeError, match=r"step-000010 .*holds a checkpoint of another run, which is not overwritten"):
        save(build(root=tmp_path / "first/checkpoints", **kept | {"checkpoint__keep_last": 3})[1], 10)
    assert json.loads((place / "run/step-000010" / files.MARKER).read_text())["run"] == "second"


def test_a_tampered_index_is_not_read(build):
    policy, checkpoints = build()
    index = save(checkpoints, 1) / files.INDEX
    index.write_bytes(b"." * index.stat().st_size)
    with pytest.raises(MetronomeError, match=r"\.metadata is not the file that _SUCCESS.json was written for"):
        build()[1].resume()
