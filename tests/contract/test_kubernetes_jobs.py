"""The jobs that a worker makes of the Kubernetes pools: by Prefect's own code, checked with Kubernetes' schema.

Names come from the device plugins: huawei.com/Ascend910 and huawei.com/npu (MindCluster's ascend-device-plugin),
huawei.com/ascend-1980 (the plugin of Huawei Cloud's CCE), nvidia.com/gpu (NVIDIA's k8s-device-plugin). Such extended
resources are whole numbers, and requests equal limits (Kubernetes, "Assign Extended Resources to a Container").
"""

import inspect
import re
import uuid

import kubernetes_validate
import prefect_kubernetes.worker as kubernetes_worker
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.workers import base as base_worker
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from tasks.cluster.deploy import read_pools, read_template
from tasks.cluster.watchdog import HEARTBEAT_S

DEVICES = ("huawei.com/Ascend910", "huawei.com/npu", "huawei.com/ascend-1980", "nvidia.com/gpu")
SHIPPED = [name for name in read_pools() if read_template(name)[0] == "kubernetes"]
OWN = """
[cluster]
like = "kubernetes-ascend-train"

[cluster.host_mounts]
"/usr/local/Ascend/driver/tools" = "Directory"

[cluster.variables]
resources = { "huawei.com/ascend-1980" = 16, cpu = 125, memory = "512Gi" }
scheduler_name = "volcano"
runtime_class = "ascend"
node_selector = { accelerator-type = "module-a3-16" }
tolerations = [{ key = "npu", operator = "Exists", effect = "NoSchedule" }]
labels = { "ring-controller.atlas" = "ascend-910b" }
annotations = { "k8s.v1.cni.cncf.io/networks" = "roce-0,roce-1", "scheduling.volcano.sh/queue-name" = "training" }
host_network = true
security_context = { runAsUser = 0 }
env_from_fields = [{ name = "HCCL_IF_IP", valueFrom = { fieldRef = { fieldPath = "status.hostIP" } } }]

[cluster.variables.env]
HCCL_SOCKET_IFNAME = "eth0"
"""


async def job_of(base, **variables):
    """What the worker sends to Kubernetes for a flow run."""
    configuration = await KubernetesWorkerJobConfiguration.from_template_and_values(base, variables, client=object())
    configuration.prepare_for_flow_run(FlowRun(flow_id=uuid.uuid4(), name="quiet-otter"))
    return configuration.job_manifest


def check(job):
    """Valid for Kubernetes, as far as its schema says, and what the schema does not say about devices."""
    kubernetes_validate.validate(job, "1.34", strict=True)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    extended = {name: count for name, count in container["resources"]["limits"].items() if "/" in name}
    assert extended
    for name, count in extended.items():
        assert re.fullmatch(r"[a-z0-9.-]+\.[a-z]+/[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", name)
        assert not name.partition("/")[0].endswith("kubernetes.io")
        assert isinstance(count, int)
        assert container["resources"]["requests"][name] == count
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    names = [one["name"] for one in container["env"]]
    assert len(names) == len(set(names))


def test_the_worker_reads_all_that_the_template_sets():
    """A field of the configuration that only its own definition names has no effect."""
    read = {
        found[1]
        for module in (kubernetes_worker, base_worker)
        for found in re.finditer(r"(?:self|configuration)\.(\w+)", inspect.getsource(module))
    }
    assert set(read_template("kubernetes-cuda")[1]["job_configuration"]) - read == set()
    assert {*KubernetesWorkerJobConfiguration.model_fields} - read == {
        *("job_watch_timeout_seconds", "pod_watch_timeout_seconds", "stream_output")
    }


@pytest.mark.parametrize("pool", SHIPPED)
def test_a_job_leaves_room_on_its_node(pool):
    """The system and the cluster's own pods need some of it: here of 1 TiB and 128 cores with 8 devices."""
    asked = read_template(pool)[1]["variables"]["properties"]["resources"]["default"]
    [devices] = [count for name, count in asked.items() if "/" in name]
    assert int(asked["memory"].removesuffix("Gi")) / devices <= 0.9 * 1024 / 8
    assert asked["cpu"] / devices <= 0.9 * 128 / 8


@pytest.mark.parametrize("pool", SHIPPED)
async def test_kubernetes_accepts_the_jobs_of_every_pool(pool):
    base = read_template(pool)[1]
    job = await job_of(base)
    check(job)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert {"cpu", "memory"} < set(container["resources"]["limits"]) < {*DEVICES, "cpu", "memory"}
    values = {one["name"]: one["value"] for one in container["env"]}
    assert values["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_S)
    assert ("HCCL_CONNECT_TIMEOUT" in values) == ("ascend" in pool)
    host = {one["hostPath"]["path"] for one in job["spec"]["template"]["spec"]["volumes"] if "hostPath" in one}
    assert ("/etc/hccn.conf" in host) == ("/usr/local/Ascend/driver" in host) == ("ascend" in pool)
    assert all(one["readOnly"] for one in container["volumeMounts"] if one["mountPath"] in host)
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA locks memory


@pytest.mark.parametrize("device", DEVICES)
async def test_a_run_may_ask_for_other_devices_than_its_pool(device):
    job = await job_of(read_template("kubernetes-cuda")[1], resources={device: 2})
    check(job)
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] == {device: 2}


async def test_what_clusters_differ_in_reaches_the_pod(tmp_path):
    (tmp_path / "pools.toml").write_text(OWN)
    job = await job_of(read_template("cluster", read_pools(tmp_path / "pools.toml"))[1], env={"MINE": "1"})
    check(job)
    pod = job["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {"huawei.com/ascend-1980": 16, "cpu": 125, "memory": "512Gi"}
    assert (pod["spec"]["schedulerName"], pod["spec"]["runtimeClassName"]) == ("volcano", "ascend")
    assert pod["spec"]["nodeSelector"] == {"accelerator-type": "module-a3-16"}
    assert pod["spec"]["tolerations"] == [{"key": "npu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["spec"]["hostNetwork"] is True
    assert container["securityContext"] == {"runAsUser": 0}
    assert pod["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"  # else pods on the node's network find no services
    assert pod["metadata"]["annotations"] == {
        "k8s.v1.cni.cncf.io/networks": "roce-0,roce-1",
        "scheduling.volcano.sh/queue-name": "training",
    }
    assert pod["metadata"]["labels"]["ring-controller.atlas"] == "ascend-910b"
    assert {"name": "HCCL_IF_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}} in container["env"]
    assert {"name": "MINE", "value": "1"} in container["env"]
    paths = [one["hostPath"]["path"] for one in pod["spec"]["volumes"] if "hostPath" in one]
    assert paths == ["/usr/local/Ascend/driver/tools"]
