"""The ranks of an invitation on another node than the orchestrator's."""

import os
from unittest.mock import patch

from engine.config.recipe import load_config
from engine.trainer.ranks import agent
from engine.trainer.ranks.nodes import follow_invitations
from engine.wire.invitation import write_invitation


def test_ranks_of_other_nodes_have_the_same_defaults_and_the_users_values(tmp_path, monkeypatch):
    config = load_config(None, ["parallel.tensor=2", "parallel.nodes=2", "parallel.rendezvous=127.0.0.1:29500"])
    write_invitation(config=config, folder=tmp_path, run_id="a", arguments=[], token="secret", certificate="public")
    own = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64"}
    seen = {}
    with (
        patch.dict(os.environ, own, clear=True),
        patch.object(agent, "run_ranks", lambda **_: seen.update(os.environ) or 0),
    ):
        follow_invitations(tmp_path, 1.0)
    expected = own | {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert seen.items() >= expected.items()
