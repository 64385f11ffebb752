"""Weights of Hugging Face folders: written by transformers and read by us, and the other way round."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import BadInput
from engine.wire.weights import hf_folder
from engine.wire.weights.hf_folder import INDEX, join_folders, open_folder, write_sharded
from support.tiny_models import reference, save


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A model that transformers wrote in several shards."""
    folder = tmp_path_factory.mktemp("sharded")
    save(folder, "qwen2", shard="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def broken(sharded, tmp_path):
    """A copy to break."""
    shutil.copytree(sharded, tmp_path, dirs_exist_ok=True)
    return tmp_path


def mapped(folder):
    """Weight files that this process has in memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if str(folder) in line and line.endswith(".safetensors")}


def resident(folder):
    """Bytes of the folder's weight files that count as memory of this process."""
    mappings = Path("/proc/self/smaps").read_text().split(f"{folder}/model.safetensors\n")[1:]
    return sum(int(mapping.split("Rss:")[1].split()[0]) * 1024 for mapping in mappings)


def rewrite_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_reads_what_transformers_wrote(sharded):
    expected = reference(str(sharded)).state_dict()
    with open_folder(sharded) as files:
        assert files.names == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(files.read(name), tensor), name


def test_no_more_than_one_shard_is_in_memory(sharded):
    most = 0
    with open_folder(sharded) as files:
        for name in sorted(files.names):
            files.read(name)
            most = max(most, len(mapped(sharded)))
    assert most == 1
    assert not mapped(sharded)


def test_little_of_a_large_file_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_folder, "MAPPED_BYTES", 2**20)
    names = [f"t{number:02d}" for number in range(32)]
    save_file({name: torch.ones(2**16) for name in names}, tmp_path / "model.safetensors")  # 32 × 256 KiB
    most = 0
    with open_folder(tmp_path) as files:
        for name in names:
            assert float(files.read(name).sum()) == 2**16
            most = max(most, resident(tmp_path))
    assert 2**18 <= most <= 2 * 2**20


def test_dtype_is_the_files(tmp_path):
    save_file({"a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with open_folder(tmp_path) as files:
        assert files.read("a").dtype == torch.bfloat16
        with pytest.raises(BadInput, match="tensor b is missing"):
            files.read("b")


def test_transformers_reads_what_we_wrote(sharded, tmp_path):
    shutil.copy(sharded / "config.json", tmp_path)
    with open_folder(sharded) as files:
        write_sharded(tmp_path, ((name, files.read(name)) for name in sorted(files.names)), shard_bytes=50_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / INDEX).read_text())
    assert len(shards) > 2
    assert max(sum(tensor.nbytes for tensor in load_file(shard).values()) for shard in shards) <= 50_000
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for shard in shards for tensor in load_file(shard).values()
    )
    expected = reference(str(sharded)).state_dict()
    found = reference(str(tmp_path)).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_one_small_model_is_one_file_without_an_index(tmp_path):
    fused = torch.arange(12.0).view(4, 3)
    write_sharded(tmp_path, iter([("upper", fused[:2]), ("lower", fused[2:]), ("turned", fused.T), ("again", fused)]))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["lower"], fused[2:])
    assert torch.equal(found["turned"], fused.T)


def test_shards_are_written_as_tensors_come(tmp_path):
    written = []

    def tensors():
        for number in range(6):
            written.append(len(list(tmp_path.iterdir())))
            yield f"t{number}", torch.full((25,), float(number))

    write_sharded(tmp_path, tensors(), shard_bytes=200)
    assert written == [0, 0, 0, 1, 1, 2]  # 100 bytes each: a full shard goes to disk when the next tensor comes
    with open_folder(tmp_path) as files:
        assert [float(files.read(f"t{number}")[0]) for number in range(6)] == [0, 1, 2, 3, 4, 5]


def test_parts_of_several_writers_become_one_folder(sharded, tmp_path):
    shutil.copy(sharded / "config.json", tmp_path)
    parts = [tmp_path / "stage-0", tmp_path / "stage-1"]
    with open_folder(sharded) as files:
        names = sorted(files.names)
        for part, mine in zip(parts, (names[:11], names[11:]), strict=True):
            write_sharded(part, ((name, files.read(name)) for name in mine), shard_bytes=50_000)
    join_folders(tmp_path, parts)
    assert not any(part.exists() for part in parts)
    expected = reference(str(sharded)).state_dict()
    found = reference(str(tmp_path)).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    total = json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in expected.values())


def test_a_folder_with_weights_is_not_written_over(sharded):
    with pytest.raises(BadInput, match=r"model-00001-of-.* this folder already has weights"):
        write_sharded(sharded, [("a", torch.ones(1))])


def test_a_missing_shard_is_named(broken):
    sorted(broken.glob("*.safetensors"))[1].unlink()
    with pytest.raises(
        BadInput, match=r"model-00002-of-\d+\.safetensors: no such file, although .* holds tensor model\."
    ):
        with open_folder(broken):
            pass


def test_a_tensor_missing_in_its_shard_is_named(broken):
    rewrite_index(broken, lambda where: where.update({"model.norm.weight": where["model.embed_tokens.weight"]}))
    with pytest.raises(BadInput, match=r"model-00001-of-\d+\.safetensors: tensor model\.norm\.weight is not in it"):
        with open_folder(broken):
            pass


def test_the_index_stays_in_its_folder(broken):
    rewrite_index(broken, lambda where: where.update({"model.norm.weight": "../other.safetensors"}))
    with pytest.raises(BadInput, match=r"model\.norm\.weight is said to be in '\.\./other\.safetensors'"):
        with open_folder(broken):
            pass


def test_a_broken_index_is_refused(broken):
    (broken / INDEX).write_text("[]")
    with pytest.raises(BadInput, match="not an index of safetensors"):
        with open_folder(broken):
            pass


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(BadInput, match=r"model\.safetensors: damaged safetensors file"):
        with open_folder(tmp_path):
            pass


def test_pickles_are_not_read(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        BadInput, match=r"no model\.safetensors and no model\.safetensors\.index\.json there; other weight"
    ):
        with open_folder(tmp_path):
            pass
