import json

import fsspec
import pytest

from engine.errors import MetronomeError
from tasks.publish import copy_checkpoint

server = pytest.importorskip("moto.server")


@pytest.fixture
def made(tmp_path):
    """A complete checkpoint and a policy folder."""
    checkpoint, policy = tmp_path / "step-000002", tmp_path / "policy"
    checkpoint.mkdir()
    policy.mkdir()
    (checkpoint / "policy.safetensors").write_bytes(b"weights" * 1000)
    (checkpoint / "state.json").write_text('{"step": 2}')
    files = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    (checkpoint / "_SUCCESS.json").write_text(json.dumps({"step": 2, "weight_version": 2, "files": files}))
    (policy / "model.safetensors").write_bytes(b"hf" * 500)
    return checkpoint, policy


@pytest.fixture(scope="module")
def s3():
    """A real S3 endpoint on loopback with one bucket; its URL."""
    with pytest.MonkeyPatch.context() as patch:
        endpoint = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        endpoint.start()
        host, port = endpoint.get_host_and_port()
        for name, value in {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x",
                            "DEFAULT_REGION": "us-east-1"}.items():  # fmt: skip
            patch.setenv(f"AWS_{name}", value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/runs"
        endpoint.stop()


def published(place):
    """The marker, and the size of each file under a place."""
    store, root = fsspec.core.url_to_fs(place)
    store.invalidate_cache()
    sizes = {name.removeprefix(f"{root}/"): store.size(name) for name in store.find(root)}
    return json.loads(store.cat_file(f"{root}/_SUCCESS.json")), sizes


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_a_published_checkpoint_is_whole(made, where, tmp_path, request):
    place = f"{tmp_path}/out/mine" if where == "folder" else f"{request.getfixturevalue('s3')}/mine"
    copy_checkpoint(*made, place)
    copy_checkpoint(*made, place)  # again over the first
    marker, sizes = published(place)
    assert marker["step"] == 2
    assert marker["files"]["policy/model.safetensors"] == 1000
    assert {name: size for name, size in sizes.items() if name != "_SUCCESS.json"} == marker["files"]


def test_a_failing_upload_leaves_no_marker(made, s3):
    checkpoint, policy = made
    place = f"{s3}/broken"
    copy_checkpoint(checkpoint, policy, place)
    marker = json.loads((checkpoint / "_SUCCESS.json").read_text())
    (checkpoint / "_SUCCESS.json").write_text(json.dumps({**marker, "files": {**marker["files"], "gone": 1}}))
    with pytest.raises(MetronomeError, match=r"s3://bucket/runs/broken .* failed"):
        copy_checkpoint(checkpoint, policy, place)
    with pytest.raises(FileNotFoundError):
        published(place)


def test_a_bucket_that_is_not_there_is_named(made, s3):
    with pytest.raises(MetronomeError, match="s3://nowhere/x"):
        copy_checkpoint(*made, "s3://nowhere/x")


def test_an_incomplete_checkpoint_is_not_published(made, tmp_path):
    checkpoint, policy = made
    (checkpoint / "_SUCCESS.json").unlink()
    with pytest.raises(MetronomeError, match="is not complete"):
        copy_checkpoint(checkpoint, policy, f"{tmp_path}/out")
    assert not (tmp_path / "out").exists()
