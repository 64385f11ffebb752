"""The work pools; tests/contract/test_kubernetes_jobs.py has the jobs that a worker makes of them."""

import json
import re

import pytest
from prefect.utilities.templating import apply_values
from prefect.workers.process import ProcessJobConfiguration

from engine.errors import BadInput
from support.runs import ROOT
from tasks.cluster.deploy import POOLS, read_pools, read_template
from tasks.cluster.watchdog import HEARTBEAT_S

ASCEND = {"ASCEND_RT_VISIBLE_DEVICES", "HCCL_CONNECT_TIMEOUT"}


def defaults(base):
    return {name: field["default"] for name, field in base["variables"]["properties"].items() if "default" in field}


def own(folder, text):
    (folder / "mine.toml").write_text(text)
    return read_pools(folder / "mine.toml")


@pytest.mark.parametrize("pool", ["cpu", "ascend-train", "ascend-rollout"])
def test_process_pools_give_a_job_its_environment(pool):
    kind, base = read_template(pool)
    assert kind == "process"
    job = ProcessJobConfiguration(**apply_values(base["job_configuration"], defaults(base)))
    assert set(job.env) >= (ASCEND if pool != "cpu" else set())
    assert job.env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_S)
    assert all(isinstance(value, str) for value in job.env.values())


@pytest.mark.parametrize("path", sorted(POOLS.glob("*.json")), ids=lambda path: path.stem)
def test_templates_name_only_their_own_variables(path):
    base = json.loads(path.read_text())
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(base["job_configuration"])))
    assert used == set(base["variables"]["properties"])
    assert all(field["description"] and field["title"] for field in base["variables"]["properties"].values())


def test_a_list_of_ones_own_changes_pools_and_adds_some(tmp_path):
    pools = own(
        tmp_path,
        """
        [ascend-train.variables.env]
        HCCL_IF_IP = "10.0.0.1"
        [far]
        like = "kubernetes-ascend-rollout"
        [far.variables]
        namespace = "far"
        """,
    )
    changed = defaults(read_template("ascend-train", pools)[1])["env"]
    assert changed == defaults(read_template("ascend-train")[1])["env"] | {"HCCL_IF_IP": "10.0.0.1"}
    assert read_template("ascend-rollout", pools)[1] == read_template("ascend-train", pools)[1]  # it is like that one
    far = defaults(read_template("far", pools)[1])
    assert far == defaults(read_template("kubernetes-ascend-rollout")[1]) | {"namespace": "far"}


def test_the_list_in_the_documentation_works(tmp_path):
    page = (ROOT / "docs/operate.md").read_text()
    [example] = [block for block in page.split("```\n") if block.startswith("[training] ")]
    pools = own(tmp_path, example)
    assert defaults(read_template("training", pools)[1])["resources"]["huawei.com/ascend-1980"] == 16
    assert defaults(read_template("training", pools)[1])["env"]["HCCL_SOCKET_IFNAME"] == "eth0"
    assert defaults(read_template("kubernetes-ascend-rollout", pools)[1])["resources"] == {"huawei.com/ascend-1980": 16}


def test_the_list_for_a3_in_the_documentation_gives_all_sixteen_devices(tmp_path):
    page = (ROOT / "docs/hardware.md").read_text()
    [example] = [block for block in page.split("```\n") if block.startswith("[ascend-train.")]
    pools = own(tmp_path, example)
    for pool in ("ascend-train", "ascend-rollout"):
        found, shipped = (defaults(read_template(pool, one)[1])["env"] for one in (pools, None))
        assert found == shipped | {"ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, range(16)))}
        assert defaults(read_template(f"kubernetes-{pool}", pools)[1])["resources"]["huawei.com/Ascend910"] == 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[cpu.variables]\nnpus = 4", "work pool cpu: no variable npus: expected one of name, env"),
        ("[cpu.variables.env]\nA = 4", r"work pool cpu: variable env\.A: 4 is not valid"),
        ('[cpu]\nlike = "docker"', "work pool cpu: like = 'docker': expected one of process, kubernetes, ascend"),
        ('[cpu]\nlike = "a"\n[a]\nlike = "b"\n[b]\nlike = "a"', "work pool b: like = 'a': expected one of"),
        ("[cpu]\nenv = {}", r"list of work pools .*mine\.toml: cpu\.env: Extra inputs"),
        ('[cpu.host_mounts]\n"/etc/hccn.conf" = "File"', "work pool cpu: host_mounts: only pods on Kubernetes"),
        ('[cpu.host_mounts]\n"/etc/hccn.conf" = "Filer"', "cpu.host_mounts.*Input should be 'Directory' or 'File'"),
        ("[cpu", "list of work pools .*mine.toml: Expected ']'"),
    ],
)
def test_a_list_that_cannot_work_is_refused(tmp_path, text, said):
    with pytest.raises(BadInput, match=said):
        read_template("cpu", own(tmp_path, text))
    with pytest.raises(BadInput, match="no work pool ascend: expected one of ascend-rollout, ascend-train, ascend-"):
        read_template("ascend")
    with pytest.raises(BadInput, match=r"list of work pools .*none\.toml.*No such file"):
        read_pools(tmp_path / "none.toml")
