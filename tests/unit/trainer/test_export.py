"""The final policy as a folder; of several ranks in tests/parallel/test_export.py."""

from pathlib import Path

import pytest

from engine.trainer.export import export
from support.disk_order import disk_order
from support.policies import a_policy

pytestmark = pytest.mark.usefixtures("megatron")


def test_a_policy_that_is_there_is_on_the_disk(settings, tiny_model, tmp_path, monkeypatch):
    """A stage that counts as done must find it whole after a power cut."""
    policy = a_policy(settings)
    noted = disk_order(monkeypatch)
    export(policy.models, policy.ranks, Path(tiny_model), tmp_path / "policy")
    named = noted.index("name policy")
    synced = {one.removeprefix("sync ") for one in noted[:named] if one.startswith("sync ")}
    assert synced == {".policy.partial", *(path.name for path in (tmp_path / "policy").iterdir())}
    assert noted[named + 1 :] == [f"sync {tmp_path.name}"]
