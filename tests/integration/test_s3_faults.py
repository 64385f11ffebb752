"""S3 that fails at every single request of a checkpoint's upload:
what looks complete is complete, and the next try succeeds."""

import hashlib
import json
import re

import fsspec
import pytest
import xxhash

from engine.errors import CheckpointError
from engine.run import checkpoint_files as files
from engine.run import checkpoint_store as store
from support.s3_proxy import FAULTS, proxied_s3

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

CONTENT = {
    "__0_0.distcp": b"\x00weights" * 20_000,
    "__1_0.distcp": b"moments" * 999,
    ".metadata": b"index",
    "state.json": b"{}",
}


@pytest.fixture(scope="module")
def proxy():
    """In front of a moto server; AWS_ENDPOINT_URL leads to it, and no client tries a request a second time."""
    with proxied_s3() as running:
        fsspec.filesystem("s3").mkdir("bucket")
        yield running


def a_checkpoint(folder, step, fill=b"", names=tuple(CONTENT)):
    """A complete checkpoint of some files as the trainer leaves it; `fill` changes the content but not the sizes."""
    target = folder / f"step-{step:06d}"
    files.partial_of(target).mkdir(parents=True)
    for name, content in ((name, CONTENT[name]) for name in names):
        (files.partial_of(target) / name).write_bytes(fill + content[len(fill) :])
    files.publish_checkpoint(files.partial_of(target), target, step, {"reward_mean": 0.5})
    return target


def read_there(place, name):
    """(marker, content of every file) of a published checkpoint that a reader would take, else None."""
    complete = store.survey_place(place).complete
    if name not in complete:
        return None
    s3, root = fsspec.core.url_to_fs(place)
    return complete[name], {file: s3.cat_file(f"{root}/{name}/{file}") for file in complete[name]["files"]}


def must_be_whole(found, *checkpoints):
    """What a reader finds is one of these checkpoints, byte for byte, in no mixture."""
    marker, content = found
    [of] = [one for one in checkpoints if files.read_marker(one)["id"] == marker["id"]]
    assert content == {name: (of / name).read_bytes() for name in marker["files"]}
    assert marker["files"].keys() == files.read_marker(of)["files"].keys()


def fail_at_every_request(proxy, fault, place, old, new, only=False):
    """Upload `new` over `old` with the fault from each request on in turn, or at that one `only`: a reader finds no
    mixture.

    (number of requests, failed uploads, all requests of the uploads)
    """
    number = 0
    failed = 0
    seen = []
    while True:
        proxy.heal()
        store.upload_checkpoint(old, f"{place}/{old.name}")
        proxy.spoil(fault, number, number if only else 10**9)
        try:
            store.upload_checkpoint(new, f"{place}/{new.name}")
            message = ""
        except CheckpointError as error:
            failed = failed + 1
            message = str(error)
        assert not message or re.match(rf"publishing .* {place}/{new.name} \(checkpoint\.path\) failed: .", message)
        requests = len(proxy.requests)
        seen += proxy.requests
        proxy.heal()
        if (found := read_there(place, new.name)) is not None:
            must_be_whole(found, old, new)
        store.upload_checkpoint(new, f"{place}/{new.name}")  # the next attempt
        must_be_whole(read_there(place, new.name), new)
        number += 1
        if requests < number:  # the fault would come after the last request
            return number, failed, seen


@pytest.mark.parametrize("fault", FAULTS)
def test_no_failing_request_makes_half_a_checkpoint_look_complete(proxy, tmp_path, fault):
    """Also where an older checkpoint of the same step, with files of the same sizes, is there: a redone step's."""
    old = a_checkpoint(tmp_path / "old", 4)
    new = a_checkpoint(tmp_path / "new", 4, b"redone")
    number, failed, _ = fail_at_every_request(
        proxy=proxy, fault=fault, place=f"s3://bucket/{tmp_path.name}", old=old, new=new
    )
    assert number > 8  # look, delete the marker, four files, look, marker
    assert failed >= number - 2


@pytest.fixture
def small_parts(monkeypatch):
    """Files of 128 KiB and more go in parts, as those of 100 MiB do otherwise;
    moto takes parts below S3's 5 MiB here."""
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda filesize, chunksize=None: 2**16)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 2**16)


def unfinished(folder):
    """Keys of the uploads in parts under a folder of the bucket that were neither completed nor aborted."""
    answer = fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket="bucket", Prefix=f"{folder}/")
    return [one["Key"] for one in answer.get("Uploads") or ()]


@pytest.mark.parametrize(
    ("fault", "only"), [*((fault, False) for fault in FAULTS), ("refuse", True), ("lose answer", True)]
)
def test_nor_does_one_in_an_upload_in_parts(proxy, tmp_path, small_parts, fault, only):
    """As the files of every real checkpoint go. What was not aborted at once is when old checkpoints are deleted."""
    large = ["__0_0.distcp"]
    old = a_checkpoint(tmp_path / "old", 4, b"", large)
    new = a_checkpoint(tmp_path / "new", 4, b"redone", large)
    number, failed, seen = fail_at_every_request(
        proxy=proxy, fault=fault, place=f"s3://bucket/{tmp_path.name}", old=old, new=new, only=only
    )
    assert number > 9  # look, delete the marker, begin, three parts, complete, look, marker
    # aiohttp sends all but begin and complete again
    assert failed >= (2 if only and fault == "lose answer" else number - 2)
    kinds = ("POST .*[?]uploads", "PUT .*partNumber=3&uploadId=", "POST .*[?]uploadId=", "DELETE .*[?]uploadId=")
    assert [kind for kind in kinds if not any(re.search(kind, request) for request in seen)] == []
    assert only or unfinished(tmp_path.name)  # where the abort failed, too
    store.prune_published(f"s3://bucket/{tmp_path.name}", 1, 0, {})
    assert unfinished(tmp_path.name) == []


def test_retention_aborts_what_a_kill_broke_off_up_to_the_newest_checkpoint_and_nobody_elses(proxy, tmp_path):
    proxy.heal()
    names = [f"{tmp_path.name}/run/step-{step:06d}/__0_0.distcp" for step in (2, 4, 6)] + [
        f"{tmp_path.name}/other/step-000002/f"
    ]
    for name in names:
        fsspec.filesystem("s3").call_s3("create_multipart_upload", Bucket="bucket", Key=name)
    checkpoint = a_checkpoint(tmp_path / "run", 4)
    store.upload_checkpoint(checkpoint, f"s3://bucket/{tmp_path.name}/run/{checkpoint.name}")
    store.prune_published(f"s3://bucket/{tmp_path.name}/run", 1, 0, {})
    assert sorted(unfinished(tmp_path.name)) == sorted(names[2:])


@pytest.mark.parametrize("fault", ["refuse", "lose answer"])
def test_retention_that_fails_half_way_leaves_no_half_checkpoint_and_is_made_up_for(proxy, tmp_path, fault):
    steps = [a_checkpoint(tmp_path / "run", step) for step in (2, 4, 6)]
    number = 0
    while True:
        place = f"s3://bucket/{tmp_path.name}/{number}"
        proxy.heal()
        for step in steps:
            store.upload_checkpoint(step, f"{place}/{step.name}")
        proxy.spoil(fault, number)
        try:
            store.prune_published(place, 1, 0, {})
            message = ""
        except CheckpointError as error:
            message = str(error)
        assert not message or place in message
        done = len(proxy.requests) <= number
        proxy.heal()
        for name in store.survey_place(place)[0]:
            must_be_whole(read_there(place, name), *steps)
        assert steps[-1].name in store.survey_place(place)[0]
        store.prune_published(place, 1, 0, {})
        s3, root = fsspec.core.url_to_fs(place)
        assert {name.removeprefix(f"{root}/").partition("/")[0] for name in s3.find(root)} == {steps[-1].name}
        number += 1
        if done:
            break
    assert not message
    assert number > 6


@pytest.mark.parametrize("name", sorted(CONTENT))
def test_a_flipped_byte_is_found_by_file_name(proxy, tmp_path, name):
    proxy.heal()
    checkpoint = a_checkpoint(tmp_path / "run", 2)
    place = f"s3://bucket/{tmp_path.name}"
    store.upload_checkpoint(checkpoint, f"{place}/{checkpoint.name}")
    damaged = bytearray(CONTENT[name])
    damaged[len(damaged) // 2] ^= 0x10
    (checkpoint / name).write_bytes(damaged)
    assert files.is_complete(checkpoint)  # by names and sizes
    with pytest.raises(CheckpointError, match=rf"step-000002: {name} does not match _SUCCESS\.json"):
        files.check_checkpoint(checkpoint)
    s3, root = fsspec.core.url_to_fs(place)
    s3.pipe_file(f"{root}/{checkpoint.name}/{name}", bytes(damaged))
    marker = store.survey_place(place)[0][checkpoint.name]
    with pytest.raises(CheckpointError, match=rf"{place}/step-000002: {name} does not match"):
        store.download_checkpoint(place, checkpoint.name, marker, tmp_path / "fetched")
    assert not files.is_complete(tmp_path / "fetched" / checkpoint.name)


def test_the_marker_has_a_checksum_of_every_file(tmp_path):
    marker = json.loads((a_checkpoint(tmp_path, 2) / "_SUCCESS.json").read_text())
    small = {name: hashlib.sha256(CONTENT[name]).hexdigest() for name in (".metadata", "state.json")}
    assert marker["sha256"] == small
    assert marker["xxh3_128"] == {
        name: xxhash.xxh3_128_hexdigest(CONTENT[name]) for name in ("__0_0.distcp", "__1_0.distcp")
    }
