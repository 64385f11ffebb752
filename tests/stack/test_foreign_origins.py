"""Who may use the servers of `make services`: a page of another origin and a stranger on this machine may not."""

import json
import urllib.error
import urllib.request

import pytest

from support.flow_runs import get_json
from tasks.cluster.prefect_api import post_json

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]
FOREIGN = "http://evil.example"


def as_a_page(url, method, body=None, **headers):
    """(status, headers) of what a browser sends for a page of another origin."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Origin": FOREIGN, **headers}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as reply:
            return reply.status, reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def test_a_foreign_page_can_neither_read_nor_start_anything(services):
    api = services.environment["PREFECT_API_URL"]
    for path, body in (("/flows/", {"name": "evil"}), ("/flows/filter", {}), ("/deployments/filter", {})):
        status, headers = as_a_page(f"{api}{path}", "POST", body, **{"Content-Type": "text/plain"})
        assert status == 401, path
        assert headers["Access-Control-Allow-Origin"] is None
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    status, headers = as_a_page(f"{api}/flows/", "OPTIONS", **asks)
    assert headers["Access-Control-Allow-Origin"] is None
    assert status in (400, 401)
    assert "evil" not in [one["name"] for one in post_json(f"{api}/flows/filter", {})]


def test_with_the_password_the_server_answers_and_anybody_may_ask_whether_it_lives(services):
    api = services.environment["PREFECT_API_URL"]
    assert isinstance(post_json(f"{api}/flows/filter", {}), list)
    assert get_json(f"{api}/health") is True
    with pytest.raises(urllib.error.HTTPError, match="401"):
        post_json(f"{api}/flows/filter", {}, "metronome:wrong")


def test_a_foreign_page_changes_nothing_in_mlflow_and_no_other_name_leads_there(services):
    """By MLflow's own checks, with the names that `make services` gives it."""
    url = services.environment["MLFLOW_TRACKING_URI"]
    create = f"{url}/api/2.0/mlflow/experiments/create"
    for headers in ({"Origin": FOREIGN}, {"Host": "evil.example"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(create, b'{"name": "stranger"}', headers))
    search = f"{url}/api/2.0/mlflow/experiments/search?max_results=5"
    own = urllib.request.Request(search, headers={"Origin": url, "Sec-Fetch-Site": "same-origin"})
    assert "stranger" not in [one["name"] for one in json.load(urllib.request.urlopen(own))["experiments"]]
    assert b"<title>MLflow</title>" in urllib.request.urlopen(url).read()
