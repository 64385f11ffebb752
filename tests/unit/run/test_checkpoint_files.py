"""Which checkpoints are kept, and what may be in the pickled index of one."""

import os
import pickle

import pytest
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from engine.errors import MetronomeError
from engine.run import checkpoint_files as files
from support.disk_order import disk_order
from support.run_folders import a_checkpoint


def marked(folder, index):
    """A folder with an index and a marker that fits it."""
    partial = files.partial_of(folder)
    partial.mkdir(parents=True)
    (partial / files.INDEX).write_bytes(index)
    files.publish_checkpoint(partial, folder, 2, {})
    return folder


def an_index(entry):
    return pickle.dumps(Metadata({"policy.weight": entry}, storage_data={}))


class Called:
    """What an index would call when it is read."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


def test_an_index_of_tensors_is_read(tmp_path):
    folder = marked(tmp_path / "step-000002", an_index(TensorStorageMetadata(TensorProperties(), (3,), [])))
    files.check_checkpoint(folder)
    (folder / files.INDEX).write_bytes((folder / files.INDEX).read_bytes() + b".")
    with pytest.raises(MetronomeError, match=r"\.metadata does not match .* \(SHA-256 differs\)"):
        files.check_checkpoint(folder)


def test_the_member_of_an_enum_may_be_pickled_by_name(tmp_path):
    """So does Python 3.11.2."""
    found = Called(getattr, _MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")
    files.check_checkpoint(
        marked(tmp_path / "step-000002", an_index(TensorStorageMetadata(TensorProperties(), (3,), [found])))
    )


def by_name(module, attribute):
    """A pickle of what a module has, also by way of another module in it."""
    names = (bytes([len(part)]) + part.encode() for part in (module, attribute))
    return b"\x80\x04" + b"".join(b"\x8c" + name for name in names) + b"\x93."


FORGED = {
    "an attribute of a class": (
        an_index(Called(getattr, TensorProperties, "__init__")),
        r"builtins\.getattr of <\w+ .*,",
    ),
    "a method of an enum": (an_index(Called(getattr, _MEM_FORMAT_ENCODING, "mro")), r"builtins\.getattr of <\w+ .*,"),
    "no name": (an_index(Called(getattr, _MEM_FORMAT_ENCODING, ("a",))), r"builtins\.getattr of <\w+ .*,"),
    "a call": (an_index(Called(os.mkdir, "evil")), r"(posix|os)\.mkdir,"),
    "through our module": (by_name("engine.run.checkpoint_files", "os.mkdir"), r"engine\.\S+\.os\.mkdir"),
    "through torch's": (by_name("torch.distributed.checkpoint.filesystem", "os.mkdir"), r"torch\.\S+\.os\.mkdir"),
    # Megatron would unpickle these from the data files
    "bytes": (an_index(BytesStorageMetadata()), "\\S+BytesStorageMetadata, which no checkpoint of Metronome does"),
}


@pytest.mark.parametrize("case", FORGED)
def test_an_index_that_refers_to_more_than_tensors_is_refused_and_nothing_runs(tmp_path, monkeypatch, case):
    """Also if the marker was forged with it."""
    index, said = FORGED[case]
    monkeypatch.chdir(tmp_path)
    folder = marked(tmp_path / "step-000002", index)
    with pytest.raises(MetronomeError, match=rf"\.metadata refers to {said}"):
        files.check_checkpoint(folder)
    assert not (tmp_path / "evil").exists()


def test_an_entry_that_is_no_tensor_is_refused(tmp_path):
    folder = marked(tmp_path / "step-000004", an_index("a string"))
    with pytest.raises(MetronomeError, match=r"policy\.weight is not a tensor"):
        files.check_checkpoint(folder)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_marker_comes_last(tmp_path, monkeypatch):
    noted = disk_order(monkeypatch)
    target = a_checkpoint(tmp_path, 2)
    begin = noted.index(f"name {target.name}")
    written = {".metadata", "__0_0.distcp", "state.json", files.partial_of(target).name}
    assert {f"sync {name}" for name in written} <= set(noted[:begin])
    after = [f"sync {tmp_path.name}", f"name {files.MARKER}", f"sync {target.name}"]
    assert [one for one in noted[begin + 1 :] if not one.endswith(".partial")] == after


def test_a_checkpoint_that_is_deleted_is_none_from_the_beginning(tmp_path, monkeypatch):
    def killed(folder):
        raise KeyboardInterrupt

    for step in (2, 4):
        a_checkpoint(tmp_path, step)
    monkeypatch.setattr(files.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        files.prune_checkpoints(tmp_path, last=1, best=0, scores={})
    assert files.all_complete(tmp_path) == [tmp_path / "step-000004"]
    assert (tmp_path / "step-000002").is_dir()


def test_the_newest_those_with_the_best_evaluations_and_one_that_awaits_its_own_are_kept():
    scores = {0: 0.95, 1: 0.5, 2: 0.9, 3: 0.9, 4: None, 6: 0.2}
    markers = {f"step-{step}": {"step": step} for step in range(1, 7)}
    assert files.checkpoints_to_keep(markers, 2, 0, scores) == {"step-5", "step-6"}
    assert files.checkpoints_to_keep(markers, 1, 1, scores) == {"step-6", "step-3", "step-4"}  # of equals the newer
    assert files.checkpoints_to_keep(markers, 1, 3, scores) == {"step-6", "step-3", "step-2", "step-1", "step-4"}
    assert files.checkpoints_to_keep(markers, 1, 1, {}) == {"step-6"}
    assert files.checkpoints_to_keep({}, 2, 2, scores) == set()
