"""The hccl sender without an NPU: it calls vllm-ascend as its published source declares;
nothing is transferred here."""

import ast
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import msgspec
import pytest
import torch

from engine.errors import BadInput, TransferError
from engine.trainer.publish.hccl import PACKED_BYTES, HcclTransport
from engine.trainer.publish.transports import Snapshots, open_transport
from engine.wire.messages import BucketInfo
from engine.wire.weights.buckets import Buffers, pack

SCHEMA = Path(__file__).with_name("hccl_weight_transfer.schema")
MODULE = "vllm_ascend.distributed.weight_transfer"


def published():
    """{class: fields} and {"class.method": arguments}."""
    found = {}
    for line in SCHEMA.read_text().splitlines():
        if match := re.fullmatch(r"([\w.]+)(?:: |\()([^)]*)\)?", line):
            found[match[1]] = [word.strip() for word in match[2].split(",")]
    return found


class Recorded:
    """A module as the schema describes it, that keeps what it was called with."""

    def __init__(self, fails=False):
        self.calls = []
        fields = published()

        class HCCLTrainerSendWeightsArgs:
            def __init__(self, **values):
                assert values.keys() <= set(fields["HCCLTrainerSendWeightsArgs"])
                vars(self).update(values)

        class HCCLWeightTransferEngine:
            @staticmethod
            def trainer_init(init_info):
                assert set(init_info) == set(fields["HCCLWeightTransferInitInfo"]) - {"rank_offset"}
                self.calls.append(init_info)
                return "group"

            @staticmethod
            def trainer_send_weights(iterator, trainer_args):
                if fails:
                    raise RuntimeError("HCCL error 4")
                self.calls.append((dict(iterator), trainer_args))

        self.HCCLTrainerSendWeightsArgs = HCCLTrainerSendWeightsArgs
        self.HCCLWeightTransferEngine = HCCLWeightTransferEngine


def installed(monkeypatch, module):
    names = MODULE.split(".")
    for count in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:count]), types.ModuleType(names[count - 1]))
    sys.modules[MODULE].hccl_engine = module
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)


def transport(tmp_path, stages=1):
    return open_transport("hccl", 5.0, torch.device("cpu"), Snapshots(tmp_path, stages))


def bucket():
    return next(pack({"a": torch.ones(3), "b": torch.zeros(2, 2)}.items(), None, 1000, Buffers(1, 1.0)))


def test_it_sends_as_the_published_interface_wants_it(monkeypatch, tmp_path):
    module = Recorded()
    installed(monkeypatch, module)
    sender = transport(tmp_path)
    assert isinstance(sender, HcclTransport)
    address = sender.meet(local=True)
    sender.gather(3)
    assert module.calls == [{"master_address": "127.0.0.1", "master_port": address.port, "world_size": 3}]
    sender.send(bucket()).wait()
    tensors, arguments = module.calls[1]
    assert torch.equal(tensors["a"], torch.ones(3))
    assert list(tensors) == ["a", "b"]
    assert (arguments.group, arguments.packed, arguments.packed_buffer_size_bytes) == ("group", True, PACKED_BYTES)
    info = BucketInfo(transport="hccl", version=0, stage=0, bucket=0, **bucket().wire())
    plain = msgspec.to_builtins(info)
    sender.write(bucket(), info)
    told = {key: value for key, value in msgspec.to_builtins(info).items() if key not in plain}
    assert told == {"packed": True, "packed_buffer_size_bytes": PACKED_BYTES}
    assert told.keys() <= set(published()["HCCLWeightTransferUpdateInfo"])


def test_a_failed_broadcast_may_be_tried_again(monkeypatch, tmp_path):
    installed(monkeypatch, Recorded(fails=True))
    sender = transport(tmp_path)
    sender.meet(local=True)
    sender.gather(2)
    with pytest.raises(TransferError, match="HCCL error 4"):
        sender.send(bucket()).wait()


def test_without_vllm_ascend_or_with_pipelines_it_is_refused(monkeypatch, tmp_path):
    with pytest.raises(BadInput, match="needs vllm-ascend in the trainer's environment"):
        transport(tmp_path)
    installed(monkeypatch, Recorded())
    with pytest.raises(BadInput, match="parallel.pipeline = 2"):
        transport(tmp_path, stages=2)


@pytest.mark.slow
def test_the_schema_is_what_the_wheel_says(tmp_path):
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "vllm-ascend==0.23.0",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version=3.11",
        "--platform=manylinux_2_34_x86_64",
        f"--dest={tmp_path}",
    ]
    done = subprocess.run(download, capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"vllm-ascend can't be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(next(tmp_path.glob("vllm_ascend-*.whl"))) as wheel:
        tree = ast.parse(wheel.read("vllm_ascend/distributed/weight_transfer/hccl_engine.py"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, fields in published().items():
        owner, _, method = name.partition(".")
        if method:
            (function,) = (
                node for node in classes[owner].body if isinstance(node, ast.FunctionDef) and node.name == method
            )
            assert [argument.arg for argument in function.args.args] == fields
        else:
            assert [node.target.id for node in classes[owner].body if isinstance(node, ast.AnnAssign)] == fields
