"""Ray nodes on this machine, and their deaths."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from support.runs import ROOT, Tree, wait_for


@contextlib.contextmanager
def ray_cluster(monkeypatch, nodes):
    """A cluster that asks for the token in this process's environment. `nodes`: arguments of each node, the first of
    which is the head."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path: sockets lie in it
    (folder / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    found = Cluster()
    try:
        for number, given in enumerate(nodes):
            head = {} if number else {"include_dashboard": False}
            found.add_node(object_store_memory=80_000_000, **head, **given)
        yield found
    finally:
        found.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def alive(cluster):
    """Ids of the nodes that the head knows to be alive."""
    return [node["NodeID"] for node in cluster.global_state.node_table() if node["Alive"]]


@contextlib.contextmanager
def node_without(cluster, folders, cache):
    """A node with four CPUs whose processes see nothing in `folders`. Copies of models go to `cache`. Yields its
    process."""
    hidden = " && ".join(f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in folders)
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", cluster.address, "--num-cpus", "4"]
    start += ["--object-store-memory", "80000000", "--block"]
    command = ["unshare", "--mount", "sh", "-c", f"{hidden} && exec {shlex.join(start)}"]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    node = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(alive(cluster)) == 1 + len(cluster.list_all_nodes()), "the node", 120)
        yield node
    finally:
        tree = Tree(node.pid)
        for process in [*tree.processes, psutil.Process(node.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()


def kill_node(cluster, node):
    """Kill a node's raylet and its workers, which would outlive it by some seconds."""
    (raylet,) = node.all_processes["raylet"]
    workers = Tree(raylet.process.pid).processes
    cluster.remove_node(node, allow_graceful=False)
    for process in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
