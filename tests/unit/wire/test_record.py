from pathlib import Path
from tempfile import TemporaryDirectory

import msgpack
import msgspec
import pytest

from engine.config import Config
from engine.errors import BadInput
from engine.trainer.rollouts import Replay
from engine.types import BatchScores
from engine.wire.columns import open_group, pack_column, pack_group, pack_ids
from engine.wire.messages import Window
from engine.wire.record import RecordWriter, check_record, read_record, record_settings
from support.disk_order import disk_order
from support.groups import numbered_group

FOLDER = TemporaryDirectory()
MODEL = {"path": FOLDER.name}
(Path(FOLDER.name) / "config.json").write_text("{}")
CONFIG = Config(model=MODEL, parallel={"data": 2}, train={"prompts_per_step": 3})

HEADER = msgpack.packb({"plan": record_settings(CONFIG)})


def group(index, step=0):
    return pack_group(numbered_group(index, step))


def recorded(path, steps=2, config=CONFIG, start=0):
    """Steps of three groups: replica group 1 trains two of the groups, one at a time."""
    recorder = RecordWriter(path, config, start)
    for step in range(start, steps):
        recorder.add_window(0, Window(step, (group(0, step),)))
        recorder.add_window(1, Window(step, (group(2, step),)))
        recorder.add_window(1, Window(step, (group(1, step),)))
        recorder.flush()
    return path


def indices(windows):
    return [[one.index for one in window] for window in windows]


def test_each_unit_gets_back_what_it_was_given_in_its_order(tmp_path):
    path = recorded(tmp_path / "record.msgpack")
    check_record(path, CONFIG)
    for step in (0, 1):
        assert indices(Replay(path, 0, 3, {}).windows(step)) == [[0]]
        mine = list(Replay(path, 1, 3, {}).windows(step))
        assert indices(mine) == [[2], [1]]
        assert mine[0] == [open_group(group(2, step))]
        assert list(Replay(path, 2, 3, {}).windows(step)) == []


def test_the_scores_of_a_batch_come_back_with_its_window(tmp_path):
    path = tmp_path / "record.msgpack"
    recorder = RecordWriter(path, CONFIG, 0)
    scores = BatchScores(((1.0,),) * 3, ((2,),) * 3, ((2,),) * 3)
    recorder.add_window(0, Window(0, (group(0), group(1), group(2)), scores))
    recorder.flush()
    (window,) = Replay(path, 0, 3, {}).windows(0)
    assert [one.batch for one in window] == [scores] * 3


def test_a_resumed_run_keeps_the_steps_before_its_start(tmp_path):
    path = recorded(tmp_path / "record.msgpack", steps=3)
    RecordWriter(path, CONFIG, 1)
    assert {entry.step for entry in read_record(path)} == {0}
    recorded(path, steps=3, start=1)
    assert [indices(Replay(path, 1, 3, {}).windows(step)) for step in range(3)] == [[[2], [1]]] * 3


def test_a_resumed_run_with_other_settings_can_not_go_on_with_its_record(tmp_path):
    path = recorded(tmp_path / "record.msgpack")
    other = Config(model=MODEL, parallel={"data": 1}, train={"prompts_per_step": 3})
    with pytest.raises(BadInput, match=r"--resume: parallel\.data is 1, but the record was taken with 2"):
        RecordWriter(path, other, 1)
    assert len(list(read_record(path))) == 6  # and nothing is lost
    RecordWriter(path, other, 0)  # all steps are done again: a new record
    assert list(read_record(path)) == []


FALLS = {"train.schedule": "linear", "train.steps": 2}


@pytest.mark.parametrize(
    ("key", "value", "recorded_with"),
    [
        ("train.learning_rate", 0.5, {}),
        ("train.betas", (0.8, 0.9), {}),
        ("train.micro_batch_tokens", 7, {}),
        ("train.recompute", "selective", {}),
        ("train.recompute", 1, {"train.recompute": True}),  # one layer is not all of them
        ("train.steps", 1, FALLS),
        ("parallel.data", 1, {}),
        ("parallel.tensor", 2, {}),
        ("algorithm.clip_low", 0.1, {}),
        ("attention.shared_prompt", False, {}),
        ("rollout.temperature", 0.5, {}),
        ("rollout.max_new_tokens", 7, {}),  # dr_grpo's denominator, and where overlong shaping begins
    ],
)
def test_a_replay_with_another_setting_is_refused_by_its_key(tmp_path, key, value, recorded_with):
    path = recorded(tmp_path / "record.msgpack", config=config_with(recorded_with))
    check_record(path, config_with(recorded_with))
    with pytest.raises(BadInput, match=rf"{key} is .*, but the record was taken with .*config\.toml"):
        check_record(path, config_with(recorded_with | {key: value}))


def config_with(changes):
    tables = {"model": MODEL, "parallel": {"data": 2}, "train": {"prompts_per_step": 3}}
    for key, value in changes.items():
        table, name = key.split(".")
        tables[table] = tables.get(table, {}) | {name: value}
    return Config(**tables)


def test_a_replay_reads_ones_own_loss_from_wherever_it_lies_and_refuses_another(tmp_path):
    def config(folder):
        own = {"loss": f"{folder / 'loss.py'}:own", "advantage": "grpo"}
        return Config(model=MODEL, train={"prompts_per_step": 3}, algorithm=own)

    for name, text in (("a", "own = 1\n"), ("b", "own = 1\n"), ("c", "own = 2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "loss.py").write_text(text)
    path = tmp_path / "record.msgpack"
    RecordWriter(path, config(tmp_path / "a"), 0).flush()
    check_record(path, config(tmp_path / "b"))
    with pytest.raises(BadInput, match="content of the algorithm's code is "):
        check_record(path, config(tmp_path / "c"))


def test_a_replay_from_another_base_model_is_refused_and_from_a_copy_is_not(tmp_path):
    path = recorded(tmp_path / "record.msgpack")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text("{}")
    moved = Config(model={"path": str(copy)}, parallel={"data": 2}, train={"prompts_per_step": 3})
    check_record(path, moved)
    (copy / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(BadInput, match=r"content of model\.path is .*, but the record was taken with"):
        check_record(path, moved)


def test_a_step_that_was_cut_off_is_refused(tmp_path):
    path = recorded(tmp_path / "record.msgpack")
    path.write_bytes(path.read_bytes()[:-10])  # in the middle of the last entry
    check_record(path, CONFIG)
    assert indices(Replay(path, 0, 3, {}).windows(0)) == [[0]]
    for step, groups in ((1, 2), (2, 0)):
        with pytest.raises(BadInput, match=f"holds {groups} groups of step {step}, train.prompts_per_step is 3"):
            list(Replay(path, 0, 3, {}).windows(step))


def sealed(entry):
    return msgspec.msgpack.encode(pack_column("entry", entry))


DAMAGED = {
    "text": (b"step,loss\n0,1\n", "does not begin with a run's settings"),
    "no msgpack": (b"\xc1 nothing", "not a record"),
    "empty": (b"", "does not begin with a run's settings"),
    "another message": (msgpack.packb({"plan": 1}), "does not begin with a run's settings"),
    "bytes behind the header": (HEADER + b"\x07\x07", "entry 0 is damaged"),
    "no msgpack behind the header": (
        HEADER + sealed({"replica_group": 0, "step": 0, "rows": []}) + b"\xc1",
        "not a record",
    ),
    "an entry of something else": (HEADER + msgpack.packb({"step": 0}), "entry 0 is damaged"),
    "another release": (
        HEADER + sealed({"replica_group": 0, "step": 0, "rows": [], "sealed": [b"group"]}),
        "entry 0 is damaged, or of another release: .*`sealed`",
    ),
    "missing": (None, "no such file"),
}


def test_no_flipped_bit_is_replayed(tmp_path):
    """Neither in a group nor in what stands beside it: the scores of the batch, places and lengths."""
    path = tmp_path / "record.msgpack"
    recorder = RecordWriter(path, CONFIG, 0)
    recorder.add_window(0, Window(0, (group(0), group(1)), BatchScores(((1.0,),) * 2, ((2,),) * 2, ((2,),) * 2)))
    recorder.flush()
    right = list(read_record(path))
    whole = path.read_bytes()
    other = []
    for at in range(len(HEADER), len(whole), 3):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            found = list(read_record(path))
        except BadInput:
            continue
        if found not in (right, []):  # the name of the seal says nothing; a cut end is refused by its missing groups
            other.append(at)
    assert len(whole) - len(HEADER) > 300
    assert other == []
    data = bytearray(whole)
    data[data.rindex(pack_ids([5, 6]))] ^= 4  # a token of the last window
    path.write_bytes(data)
    with pytest.raises(BadInput, match=r"entry 0 is damaged \(its [\d,]+ bytes differ from those that were recorded"):
        check_record(path, CONFIG)


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, damage):
    content, said = DAMAGED[damage]
    if content is not None:
        (tmp_path / "record.msgpack").write_bytes(content)
    with pytest.raises(BadInput, match=said):
        check_record(tmp_path / "record.msgpack", CONFIG)


def test_a_step_is_on_the_disk_when_it_is_flushed_and_a_record_before_it_has_its_name(tmp_path, monkeypatch):
    noted = disk_order(monkeypatch)
    recorder = RecordWriter(tmp_path / "record.msgpack", CONFIG, 0)
    assert noted == ["sync record.partial", "name record.msgpack", f"sync {tmp_path.name}"]
    recorder.add_window(0, Window(0, (group(0),)))
    recorder.flush()
    assert noted[3:] == ["sync record.msgpack"]
    assert len(list(read_record(tmp_path / "record.msgpack"))) == 1


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xc1", b"\x85"], ids=["zeros", "no msgpack", "cut"])
def test_a_resume_leaves_out_what_a_power_cut_left_behind_the_steps_that_stay(tmp_path, tail):
    path = recorded(tmp_path / "record.msgpack")
    path.write_bytes(path.read_bytes() + tail)
    RecordWriter(path, CONFIG, 2)
    check_record(path, CONFIG)
    assert [indices(Replay(path, 1, 3, {}).windows(step)) for step in range(2)] == [[[2], [1]]] * 2


def test_a_resume_names_a_record_that_is_damaged_before(tmp_path):
    path = recorded(tmp_path / "record.msgpack")
    damaged = path.read_bytes()[:-100] + b"\0" * 100
    path.write_bytes(damaged)
    with pytest.raises(
        BadInput, match=r"--resume: .* has only 2 of 3 groups of step 1; keep it, and continue with train"
    ):
        RecordWriter(path, CONFIG, 2)
    assert path.read_bytes() == damaged
    RecordWriter(path, CONFIG, 1)
    assert {entry.step for entry in read_record(path)} == {0}
