"""Fixtures that tests share; what they are made of is in support/."""

import os

import hypothesis
import pytest

from support.runs import base_settings, save_model, save_problems

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1")  # torch asks a name server for loopback's name: not for 5 s each time
# No deadline: a busy machine makes no example slow. The same examples each time, so that what passed passes again;
# `make search` looks for new ones.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("same")


@pytest.fixture(autouse=True)
def _own_tracking_store():
    """MLflow's set_tracking_uri sets this variable, and runs of a later test would go there."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Qwen3 of 0.2 M parameters with the byte-level tokenizer, as a Hugging Face folder."""
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory):
    """The same with more layers: several buckets of 1 MiB for each of two pipeline stages."""
    return save_model(tmp_path_factory.mktemp("model") / "deep", intermediate_size=1024, num_hidden_layers=8)


@pytest.fixture(scope="module")
def megatron():
    """One CPU rank's session, for tests that build models of Megatron."""
    from engine import platform

    with platform.single_session(platform.get_platform("cpu")):
        yield


@pytest.fixture
def no_grad():
    """As in the process of an instance."""
    import torch

    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def problems(tmp_path_factory):
    """Forty additions in DeepScaleR's schema."""
    return save_problems(tmp_path_factory.mktemp("data") / "problems.jsonl")


@pytest.fixture(scope="session")
def services(tmp_path_factory):
    """Prefect server, MLflow server and S3 endpoint on free ports, one set for all tests
    (support.stack.Services)."""
    from support.stack import Services
    from tasks.cluster.prefect_api import CLIENT_AUTH

    with Services(tmp_path_factory.mktemp("services")) as running:
        running.environment["PREFECT_WORKER_QUERY_SECONDS"] = "2"  # a worker asks for runs every 10 s without it
        os.environ[CLIENT_AUTH] = running.environment[CLIENT_AUTH]  # for this process's own requests
        yield running
        del os.environ[CLIENT_AUTH]


@pytest.fixture(scope="module")
def start_worker(services):
    """`services.worker`, whose workers end with the module's tests, or before by `start_worker.stop()`: one that stayed
    would take runs of other tests, and a test that kills its own worker would wait for a flow that lives."""
    started = []

    def start(*given, **settings):
        started.append(services.worker(*given, **settings))
        return started[-1]

    def stop():
        while started:
            started.pop().stop()

    start.stop = stop
    yield start
    stop()


@pytest.fixture(scope="session")
def environment(services):
    """The whole environment for a process that is to find them."""
    return {**os.environ, **services.environment, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture
def settings(tiny_model, problems, tmp_path):
    """Those of `base_settings`, for a test's own folder."""
    return base_settings(tiny_model, problems, tmp_path)
