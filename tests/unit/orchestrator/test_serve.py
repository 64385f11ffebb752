"""What a service refuses before it starts anything."""

import pytest

from engine.errors import BadInput
from engine.orchestrator import serve
from engine.orchestrator.serve import check_service
from engine.run.run_file import read_run
from support.runs import config_of


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"cluster.engine": "ray"}, "Ray places instances of trainings and evaluations, not of a service"),
        ({"train.record": True}, "train.record = true: a service can't keep a record"),
        (
            {"rollout.engine": "vllm", "weights.transport": "nccl"},
            '"nccl": an outside trainer sends from host',
        ),
    ],
)
def test_what_a_service_does_not_do_is_refused(keys, said):
    with pytest.raises(BadInput, match=said):
        check_service(config_of(keys))


def test_a_service_that_is_started_again_has_the_time_of_its_first_start(settings, monkeypatch):
    """For chat templates that ask for it: a trainer that resumes gets the same tokens."""

    async def nothing(*_):
        pass

    monkeypatch.setattr(serve, "_serve", nothing)
    config = config_of(settings)
    numbers = []
    for _ in range(2):
        serve.run_service(config, print)
        numbers.append((read_run(config.folder).id, read_run(config.folder).began_at))
    assert numbers[0] == numbers[1] != ("", None)
