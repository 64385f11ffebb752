"""Ray nodes on this machine, and their deaths."""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from support.ports import two_neighbours
from support.runs import ROOT, Tree, wait_for


@contextlib.contextmanager
def ray_settings(monkeypatch):
    """The environment of a cluster that asks for the token in this process's environment, with a folder of its own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path: sockets lie in it
    (folder / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster(monkeypatch, nodes):
    """A cluster. `nodes`: arguments of each node, the first of which is the head."""
    with ray_settings(monkeypatch):
        from ray.cluster_utils import Cluster

        found = Cluster()
        try:
            for number, given in enumerate(nodes):
                head = {} if number else {"include_dashboard": False}
                found.add_node(object_store_memory=80_000_000, **head, **given)
            yield found
        finally:
            found.shutdown()


class StartedCluster:
    """Nodes that `ray start` has started. This process joins none of them, so they may all die."""

    def __init__(self, cpus, apart=False, **environment):
        """`cpus`: those of each node, the first of which is the head. `apart`: whether each node sees its own processes
        only, as on a machine of its own. `environment`: the head's."""
        self.address = f"127.0.0.1:{two_neighbours()}"
        self._cpus = cpus[0]
        self._before = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if apart else []
        self._environment = environment
        self.nodes = []
        self.start_head()
        self.nodes += [start_ray(number, ["--address", self.address], self._before) for number in cpus[1:]]

    def start_head(self):
        """Start the head, in the place of the one that died if there was one."""
        host, port = self.address.split(":")
        arguments = ["--head", "--port", port, "--include-dashboard", "false"]
        self.nodes[:1] = [start_ray(self._cpus, arguments, self._before, **self._environment)]
        wait_for(lambda: _listens(host, int(port)), "Ray's head", 120)

    def on(self, number):
        """What a command begins with that runs on a node of those that are `apart`."""
        node = psutil.Process(self.nodes[number].pid)
        wait_for(node.children, "the first process of the node", 60)
        return ["nsenter", "--target", str(node.children()[0].pid), "--pid", "--mount"]


@contextlib.contextmanager
def redis_server():
    """A Redis of this machine. Yields its address."""
    folder = tempfile.mkdtemp()
    port = two_neighbours()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", folder, "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens("127.0.0.1", port), "Redis", 30)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def start_ray(cpus, arguments, before=(), **environment):
    """The process of `ray start` for a node."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--num-cpus", str(cpus)]
    command += ["--object-store-memory", "80000000", "--block"]
    return subprocess.Popen([*before, *command], env=os.environ | environment, cwd=ROOT, stdout=subprocess.DEVNULL)


def _listens(host, port):
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=1.0).close()
        return True
    return False


@contextlib.contextmanager
def started_cluster(monkeypatch, cpus, **keys):
    """A `StartedCluster`."""
    with ray_settings(monkeypatch):
        found = StartedCluster(cpus, **keys)
        try:
            yield found
        finally:
            for node in reversed(found.nodes):
                kill_tree(node)


def kill_tree(node):
    """Kill a node's process and all that belong to it. Returns them."""
    tree = Tree(node.pid) if node.poll() is None else None
    for process in reversed(tree.processes) if tree is not None else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.wait()
    return tree


def alive(cluster):
    """Ids of the nodes that the head knows to be alive."""
    return [node["NodeID"] for node in cluster.global_state.node_table() if node["Alive"]]


@contextlib.contextmanager
def node_without(cluster, folders, cache):
    """A node with four CPUs whose processes see nothing in `folders`. Copies of models go to `cache`. Yields its
    process."""
    hidden = " && ".join(f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in folders)
    before = ["unshare", "--mount", "sh", "-c", f'{hidden} && exec "$0" "$@"']
    node = start_ray(4, ["--address", cluster.address], before=before, XDG_CACHE_HOME=str(cache))
    try:
        wait_for(lambda: len(alive(cluster)) == 1 + len(cluster.list_all_nodes()), "the node", 120)
        yield node
    finally:
        kill_tree(node)


def kill_node(cluster, node):
    """Kill a node's raylet and its workers, which would outlive it by some seconds."""
    (raylet,) = node.all_processes["raylet"]
    workers = Tree(raylet.process.pid).processes
    cluster.remove_node(node, allow_graceful=False)
    for process in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
