"""Flow runs of a real Prefect server: start them, ask for their state, find and kill their processes."""

import json
import os
import signal
import time
import urllib.request

import psutil

from tasks.cluster.prefect_api import CLIENT_AUTH, basic_auth, post_json


def get_json(url, timeout_s=30.0):
    """The JSON reply to a GET request with the password of the environment."""
    request = urllib.request.Request(url, headers={"Authorization": basic_auth(os.environ[CLIENT_AUTH])})
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return json.load(reply)


def start(api, deployment, parameters):
    """A flow run of a deployment, as the UI's form starts it; its id."""
    found = {one["name"]: one["id"] for one in patiently(post_json, f"{api}/deployments/filter", {})}
    return patiently(post_json, f"{api}/deployments/{found[deployment]}/create_flow_run", {"parameters": parameters})[
        "id"
    ]


def state(api, run, within_s=120.0):
    """A flow run's state. Raises OSError when the server does not tell it in time."""

    def read():
        return get_json(f"{api}/flow_runs/{run}", min(30.0, within_s))["state"]

    return patiently(read, timeout_s=within_s)


def patiently(call, *arguments, timeout_s=120.0):
    """A request to the Prefect server, again while its SQLite is locked (503) or it starts, as its own clients do."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call(*arguments)
        except OSError as error:  # urllib's errors are
            if time.monotonic() > deadline or getattr(error, "code", 503) != 503:
                raise
        time.sleep(1.0)


def processes(run):
    """All processes of a flow run by process id: each inherits the environment of its flow."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") == run and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


def kill(run, part, number=signal.SIGKILL):
    """Send a signal to the one process of the run whose command line has `part`."""
    [pid] = [pid for pid, command in processes(run).items() if part in command]
    os.kill(pid, number)
