"""infra/kubernetes as kubectl renders it: against Kubernetes' schemas, KubeRay's, and against what the manifests name.

METRONOME_KUBERAY_CRD names ray.io_rayclusters.yaml of KubeRay 1.7.0 (ray-operator/config/crd/bases).
"""

import base64
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import mlflow.environment_variables
import prefect_kubernetes
import pytest
import yaml
from prefect.settings.legacy import _get_settings_fields
from prefect.settings.models.root import Settings
from prefect_kubernetes.settings import KubernetesSettings

from support.runs import ROOT
from tasks.cluster.deploy import ADDRESSES, read_pools, read_template
from tasks.cluster.graceful_worker import GRACE_S
from tasks.cluster.watchdog import HEARTBEAT_S

FOLDERS = ("gpu", "npu", "ray-gpu", "ray-npu")
DEVICES = {"gpu": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
SCRIPTS = ("DATABASE", "ADMIN_PASSWORD", "MLFLOW_KEY", "CLIENT_KEY", "MC_HOST_store", "MC_CONFIG_DIR")
IMAGES = ("POSTGRES_USER", "POSTGRES_PASSWORD", "PREFECT_PASSWORD", "MLFLOW_PASSWORD", "PGDATA", "MINIO_ROOT_USER")
IMAGES += ("MINIO_ROOT_PASSWORD", "MINIO_PASSWORD", "MINIO_BROWSER", "RAY_worker_niceness", "HF_HOME", "POOL")
"""Variables of the scripts of infra/compose, and of the images; a Ray worker's niceness is a setting of Ray."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The manifests with passwords, outside the clone."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here, which renders the manifests")
    infra = tmp_path_factory.mktemp("clone") / "infra"
    for name in ("compose", "kubernetes"):
        shutil.copytree(ROOT / "infra" / name, infra / name, ignore=shutil.ignore_patterns(".env*"))
    subprocess.run(["sh", str(infra / "kubernetes/secrets.sh")], check=True, timeout=60, capture_output=True)
    return infra / "kubernetes"


@cache
def rendered(folder):
    """All objects of a kustomization."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def named(objects, kind):
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pods(objects):
    """(name, template) of the pods of each object."""
    for one in objects:
        spec = one.get("spec", {})
        if "template" in spec:
            yield one["metadata"]["name"], spec["template"]
        if one["kind"] == "RayCluster":
            groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
            yield from ((group.get("groupName", "head"), group["template"]) for group in groups)


def containers(objects):
    """(pod, container, whether it ends before the others begin)."""
    for _, pod in pods(objects):
        yield from ((pod["spec"], one, True) for one in pod["spec"].get("initContainers", ()))
        yield from ((pod["spec"], one, False) for one in pod["spec"]["containers"])


@pytest.mark.parametrize("version", ["1.34", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", ["gpu", "npu"])
def test_kubernetes_accepts_every_object(folder, name, version):
    objects = rendered(folder / name)
    assert len(objects) >= 20
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)


def closed(schema):
    """A CRD's schema that refuses keys that it does not know, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.skipif(not os.environ.get("METRONOME_KUBERAY_CRD"), reason="METRONOME_KUBERAY_CRD names no file")
@pytest.mark.parametrize("name", ["ray-gpu", "ray-npu"])
def test_kuberay_accepts_the_ray_clusters(folder, name):
    crd = yaml.safe_load(Path(os.environ["METRONOME_KUBERAY_CRD"]).read_text())
    (version,) = [one for one in crd["spec"]["versions"] if one["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    check = jsonschema.Draft202012Validator(schema)
    (cluster,) = rendered(folder / name)
    assert [f"{one.json_path}: {one.message}" for one in check.iter_errors(cluster)] == []
    assert list(check.iter_errors({**cluster, "spec": {**cluster["spec"], "workerGroups": []}}))
    redis = {"gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}}  # as docs/operate.md has it
    assert not list(check.iter_errors({**cluster, "spec": {**cluster["spec"], **redis}}))


def test_the_pods_of_a_ray_cluster_are_pods_to_kubernetes(folder):
    for name in ("ray-gpu", "ray-npu"):
        for group, template in pods(rendered(folder / name)):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group}, "spec": template["spec"]}
            kubernetes_validate.validate(pod, "1.34", strict=True)
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(pod | {"spec": {**pod["spec"], "container": []}}, "1.34", strict=True)


def test_the_token_that_kuberay_makes_has_a_secret_of_its_own(folder):
    """It is in one with the cluster's name; KubeRay leaves a secret alone that is there, and its pods do not start
    without the key `auth_token`."""
    for name in ("ray-gpu", "ray-npu"):
        (cluster,) = rendered(folder / name)
        assert cluster["spec"]["authOptions"] == {"mode": "token"}
        assert cluster["metadata"]["name"] not in named(rendered(folder / "gpu"), "Secret")


def test_ray_on_npus_gets_its_arguments_as_kuberay_quotes_them(folder, tmp_path):
    """KubeRay puts each of rayStartParams into a variable as it is written, for a shell to read."""
    (tmp_path / "ray").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ray").chmod(0o755)
    (cluster,) = rendered(folder / "ray-npu")
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        flags = [f"--{key}={value}" for key, value in sorted(group["rayStartParams"].items())]
        (container,) = group["template"]["spec"]["containers"]
        (script,) = container["args"]
        script = re.sub(r"source \S+|ulimit -n \d+", "true", script)  # no CANN here, and limits are the machine's
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "KUBERAY_GEN_RAY_START_CMD": f"ray start {'  '.join(flags)} ",
        }
        done = subprocess.run(
            [*container["command"], script], env=environment, capture_output=True, text=True, timeout=30
        )
        assert done.stdout.splitlines() == [
            *("start", "--node-manager-port=6380", "--object-store-memory=1073741824", '--resources={"NPU": 8}')
        ], done.stderr


def test_the_folder_of_your_own_in_the_docs_is_rendered(folder):
    page = (ROOT / "docs/operate.md").read_text()
    (text,) = [one for one in re.findall(r"^```\n(.*?)^```", page, re.M | re.S) if one.startswith("resources:")]
    own = folder.parents[1] / "site"
    own.mkdir()
    (own / "kustomization.yaml").write_text(text)
    objects = rendered(own)
    assert named(objects, "PersistentVolumeClaim")["metronome"]["spec"]["storageClassName"] == "shared"
    ours = {one["image"] for _, one, _ in containers(objects) if "metronome" in one["image"]}
    assert ours
    assert all(image.startswith("registry.example.com/") for image in ours)


@pytest.mark.parametrize("name", FOLDERS)
def test_all_that_is_named_is_there(folder, name):
    objects = rendered(folder / name)
    there = objects + rendered(folder / "gpu") if name.startswith("ray") else objects
    services = named(there, "Service")
    for pod, container, _ in containers(objects):
        assert pod["serviceAccountName"] in named(there, "ServiceAccount")
        for one in container.get("env", ()):
            if key := one.get("valueFrom", {}).get("secretKeyRef"):
                assert key["key"] in named(there, "Secret")[key["name"]]["data"]
            for before in re.findall(r"\$\((\w+)\)", one.get("value", "")):  # only variables above it are filled in
                names = [each["name"] for each in container["env"]]
                assert names.index(before) < names.index(one["name"])
            if "://" in one.get("value", "") and "127.0.0.1" not in one["value"]:
                address = urlsplit(one["value"])
                (port,) = services[address.hostname]["spec"]["ports"]
                assert port["port"] == address.port, one
        for one in container.get("envFrom", ()):
            assert one["secretRef"]["name"] in named(there, "Secret")
        volumes = {one["name"]: one for one in pod.get("volumes", ())}
        claims = [one for each in named(there, "StatefulSet").values() for one in each["spec"]["volumeClaimTemplates"]]
        for mount in container.get("volumeMounts", ()):
            assert mount["name"] in volumes or mount["name"] in {one["metadata"]["name"] for one in claims}
            if script := mount.get("subPath"):
                assert script in named(there, "ConfigMap")[volumes[mount["name"]]["configMap"]["name"]]["data"]
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in named(there, "PersistentVolumeClaim")
            if "configMap" in volume:
                assert volume["configMap"]["name"] in named(there, "ConfigMap")
        for script in re.findall(r"/scripts/(\S+)", str(container)):
            (config,) = named(there, "ConfigMap").values()
            assert script.rstrip("',]") in config["data"]
    for service in named(objects, "Service").values():
        selector = service["spec"]["selector"]
        (found,) = [one["spec"] for _, one in pods(objects) if selector.items() <= one["metadata"]["labels"].items()]
        assert [one["containerPort"] for one in found["containers"][0]["ports"]] == [
            service["spec"]["ports"][0]["port"]
        ]
    for binding in named(objects, "RoleBinding").values():
        assert binding["roleRef"]["name"] in named(objects, "Role")
        assert {one["name"] for one in binding["subjects"]} <= named(objects, "ServiceAccount").keys()
        assert {one["namespace"] for one in binding["subjects"]} == {"metronome"}
    spaces = {one["metadata"].get("namespace") for one in objects if one["kind"] != "Namespace"}
    assert spaces == {"metronome"}


@pytest.mark.parametrize("name", FOLDERS)
def test_each_pod_has_limits_probes_and_no_more_rights_than_it_needs(folder, name):
    objects = rendered(folder / name)
    for pod, container, first in containers(objects):
        what = container["name"]
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][kind].keys(), what
        assert first or {"startupProbe", "livenessProbe"} <= container.keys(), what
        assert pod["enableServiceLinks"] is False, what  # MLFLOW_PORT would be the address of the service mlflow
        assert pod["securityContext"]["runAsUser"] >= 999
        if what == "ray":  # RDMA locks memory
            assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert container["resources"]["limits"][DEVICES[name[4:]]] == 8
        else:  # Kubernetes' pod security standard `restricted`
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
    for account in named(objects, "ServiceAccount").values():
        assert account.get("automountServiceAccountToken", True) == account["metadata"]["name"].startswith("jobs")


def test_users_are_those_of_the_images(folder):
    (number,) = {
        re.search(r"useradd --create-home --uid (\d+) metronome", path.read_text())[1]
        for path in (ROOT / "infra/containers").glob("*.Containerfile")
    }
    compose = yaml.safe_load((ROOT / "infra/compose/compose.yaml").read_text())["services"]
    for pod, container, first in [one for name in FOLDERS for one in containers(rendered(folder / name))]:
        group = pod["securityContext"]
        if container["image"].startswith("metronome:"):
            assert group["runAsUser"] == group["runAsGroup"] == int(number)
        elif container["name"] in compose and not first and container["name"] != "postgres":  # it says "postgres"
            assert compose[container["name"]]["user"] == f"{group['runAsUser']}:{group['runAsGroup']}"
    for pool in [name for name in read_pools() if read_template(name)[0] == "kubernetes"]:
        defaults = read_template(pool)[1]["variables"]["properties"]
        assert defaults["pod_security_context"]["default"]["runAsUser"] == int(number)
        assert ("supplementalGroups" in defaults["pod_security_context"]["default"]) == ("ascend" in pool)


def test_no_password_is_in_a_manifest(folder):
    files = (folder.parent / "compose/.env", folder / "base/.env")
    settings = dict(re.findall(r"^(\w+)=(.+)$", "\n".join(file.read_text() for file in files), re.M))
    secrets = [value for value in settings.values() if len(value) >= 48]
    assert len(secrets) == 13
    for name in FOLDERS:
        objects = rendered(folder / name)
        told = yaml.safe_dump([one for one in objects if one["kind"] != "Secret"])
        assert [value for value in secrets if value in told or base64.b64encode(value.encode()).decode() in told] == []
        for _, container, _ in containers(objects):
            for one in container.get("env", ()):
                if re.search(r"PASSWORD|TOKEN$|SECRET_ACCESS_KEY$|AUTH_STRING$|_KEY$|SECRET$", one["name"]):
                    reference = one["name"].endswith("_SECRET_KEY") and "INTEGRATIONS" in one["name"]
                    assert "valueFrom" in one or reference, one["name"]


def test_the_servers_are_those_of_the_compose_file(folder):
    """The same images, and no variable is forgotten."""
    services = yaml.safe_load((ROOT / "infra/compose/compose.yaml").read_text())["services"]
    images = {re.sub(r"\$\{\w+:-(.*)\}", r"\1", one["image"]) for one in services.values()}
    for name in ("gpu", "npu"):
        objects = rendered(folder / name)
        here = {container["image"] for _, container, _ in containers(objects)}
        (prefect,) = re.findall(r"^prefect==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
        assert here - images == {f"prefecthq/prefect:{prefect}-python3.11-kubernetes"}
        assert images <= here
        keys = set(named(objects, "Secret")["metronome"]["data"])
        for pod, container, first in containers(objects):
            if container["name"] in services and not first or container["name"] == "bucket":
                given = {one["name"] for one in container.get("env", ())} | keys
                wanted = set(services[container["name"]].get("environment", ()))
                assert wanted - {"MC_CONFIG_DIR"} <= given, container["name"]  # of mc in the health check
            if container["name"] == "worker":
                assert pod["terminationGracePeriodSeconds"] > GRACE_S
                values = {one["name"]: one.get("value") for one in container["env"]}
                assert values["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_S)
                assert values.keys() >= set(ADDRESSES)  # what `metronome deploy` hands on to jobs
    for name in ("ray-gpu", "ray-npu"):
        assert {one["image"] for _, one, _ in containers(rendered(folder / name))} == {
            {"ray-gpu": "metronome:cuda", "ray-npu": "metronome:ascend"}[name]
        }
        (cluster,) = rendered(folder / name)
        lists = (ROOT / "infra/trainer/transferqueue.txt").read_text()
        assert f"ray=={cluster['spec']['rayVersion']}\n" in lists


def test_each_variable_is_one_that_its_program_reads(folder):
    worker = KubernetesSettings.model_fields
    known = {*_get_settings_fields(Settings), *vars(mlflow.environment_variables), *SCRIPTS, *IMAGES, "DO_NOT_TRACK"}
    for section in ("worker", "observer"):
        fields = worker[section].annotation.model_fields
        known |= {f"PREFECT_INTEGRATIONS_KUBERNETES_{section}_{field}".upper() for field in fields}
    for name in FOLDERS:
        for _, container, _ in containers(rendered(folder / name)):
            for one in container.get("env", ()):
                assert one["name"] in known or one["name"].startswith("AWS_"), one["name"]


@pytest.mark.parametrize("name", ["gpu", "npu"])
def test_jobs_of_the_pools_fit_what_is_there(folder, name):
    objects = rendered(folder / name)
    deployments = [one for key, one in named(objects, "Deployment").items() if key.startswith("jobs")]
    pools = set()
    for one in deployments:
        (container,) = one["spec"]["template"]["spec"]["containers"]
        values = {each["name"]: each.get("value") for each in container["env"]}
        pools.add(values["POOL"])
        secret = values["PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_NAME"]
        key = values["PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_KEY"]
        assert key in named(objects, "Secret")[secret]["data"]
    wanted = {"gpu": {"kubernetes-cuda"}, "npu": {"kubernetes-ascend-train", "kubernetes-ascend-rollout"}}
    assert pools == wanted[name]
    for pool in pools:
        defaults = {key: one.get("default") for key, one in read_template(pool)[1]["variables"]["properties"].items()}
        assert defaults["namespace"] in named(objects, "Namespace")
        assert defaults["service_account_name"] in named(objects, "ServiceAccount")
        assert defaults["secret"] in named(objects, "Secret")
        assert defaults["claim"] in named(objects, "PersistentVolumeClaim")
        assert DEVICES[name] in defaults["resources"]


def test_the_worker_of_jobs_may_do_what_its_program_calls(folder):
    """The calls in prefect-kubernetes: `read` is `get`. Secrets it would only make without the name of one."""
    verbs = {"read": "get", "replace": "update"}
    program = Path(prefect_kubernetes.__file__).parent
    called = set()
    for file in ("worker.py", "observer.py"):
        source = (program / file).read_text()
        found = re.findall(r"\.(read|list|create|delete|patch|replace)_namespaced_(\w+?)\b", source)
        called |= {(verbs.get(verb, verb), what) for verb, what in found}
        called |= {("watch", what.rstrip("s")) for what in re.findall(r'on\.event\([^)]*?"(pods|jobs)"', source)}
    called = {(verb, what) for verb, what in called if what != "secret"}
    assert {("create", "job"), ("get", "pod_log"), ("watch", "pod"), ("watch", "job")} <= called
    (role,) = named(rendered(folder / "gpu"), "Role").values()
    may = {(verb, what) for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"]}
    resource = {"pod_log": "pods/log", "pod_status": "pods/status"}
    needed = {(verb, resource.get(what, f"{what}s")) for verb, what in called}
    assert needed <= may
    assert ("create", "pods") not in may


@pytest.mark.parametrize("gang", ["volcano", "kueue"])
def test_a_scheduler_of_gangs_gets_its_label(folder, gang):
    own = folder.parent / f"own-{gang}"
    own.mkdir()
    text = {"resources": ["../kubernetes/ray-npu"], "components": [f"../kubernetes/gang/{gang}"]}
    text["images"] = [{"name": "metronome", "newName": "registry.example.com/metronome"}]
    (own / "kustomization.yaml").write_text(yaml.safe_dump(text))
    (cluster,) = rendered(own)
    label = {"volcano": "volcano.sh/queue-name", "kueue": "kueue.x-k8s.io/queue-name"}[gang]
    assert list(cluster["metadata"]["labels"]) == [label]
    assert {one["image"] for _, one, _ in containers([cluster])} == {"registry.example.com/metronome:ascend"}


def test_nodes_are_let_in_where_pods_use_their_network(folder):
    """A network policy sees such a pod as its node."""
    site = folder.parent / "site"
    site.mkdir(exist_ok=True)
    text = "resources: [../kubernetes/gpu]\ncomponents: [../kubernetes/host-network]\n"
    (site / "kustomization.yaml").write_text(text)
    policies = named(rendered(site), "NetworkPolicy")
    (ingress,) = policies["namespace"]["spec"]["ingress"]
    assert ingress["from"] == [{"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}]
    kubernetes_validate.validate(policies["namespace"], "1.34", strict=True)
    assert policies["postgres"] == named(rendered(folder / "gpu"), "NetworkPolicy")["postgres"]


def test_only_the_two_servers_reach_the_database(folder):
    policies = named(rendered(folder / "gpu"), "NetworkPolicy")
    labels = {one["metadata"]["labels"]["app.kubernetes.io/name"] for _, one in pods(rendered(folder / "gpu"))}
    (rule,) = policies["namespace"]["spec"]["podSelector"]["matchExpressions"]
    assert (rule["operator"], rule["values"]) == ("NotIn", ["postgres"])
    (ingress,) = policies["postgres"]["spec"]["ingress"]
    (source,) = ingress["from"]
    (allowed,) = source["podSelector"]["matchExpressions"]
    assert set(allowed["values"]) == {"prefect", "mlflow"} < labels
    assert "egress" not in policies["postgres"]["spec"]  # none


def test_secrets_are_made_once_for_their_owner_only(folder):
    file = folder / "base/.env"
    before = file.read_text()
    subprocess.run(["sh", str(folder / "secrets.sh")], check=True, timeout=60, capture_output=True)
    assert file.read_text() == before
    assert file.stat().st_mode & 0o777 == 0o600
    ignored = subprocess.run(["git", "check-ignore", "-q", "infra/kubernetes/base/.env"], cwd=ROOT, timeout=30)
    assert ignored.returncode == 0
    (folder.parent / "compose/.env").write_text("PREFECT_API_PASSWORD=\n")
    file.unlink()
    done = subprocess.run(["sh", str(folder / "secrets.sh")], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "infra/compose/.env: PREFECT_API_PASSWORD has no value\n")
    assert not file.exists()
