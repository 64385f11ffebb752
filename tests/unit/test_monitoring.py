"""Grafana's dashboard and the alert rules ask for what a run has in /metrics; promtool tries them, where it is."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from engine.orchestrator.pool.pool_metrics import metrics_text

MONITORING = Path(__file__).resolve().parents[2] / "infra/monitoring"
METRIC = re.compile(r"\bmetronome_\w+")
FIGURES = ("step", "reward_mean", "step_s", "tokens_per_s_per_device", "wait_ratio", "response_length_mean", "kl")
FIGURES += ("response_length_p90", "response_length_max", "mismatch_kl", "max_ratio_gap", "entropy")
INSTANCE = {"name": "instance-0", "state": "out", "failures": 0, "running": 1, "waiting": 0, "version": 3}
INSTANCE |= {"tokens_per_s": 10.0, "restarts": 0, "groups": 1, "group_s": 2.0}
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
RUN = 'instance="host:7000",job="metronome"'


def labels(**more):
    return {"instance": "host:7000", "job": "metronome", **more}


TRIED = {
    "MetronomeRunDied": (f"up{{{RUN}}}", "1x9 0x600", "8m", "12m", labels()),
    "MetronomeNoStep": (f"metronome_step_step{{{RUN}}}", "0+1x9 9x600", "38m", "41m", labels()),
    "MetronomeInstanceLost": (
        f'metronome_pool_instance_state{{exported_instance="instance-0",state="out",{RUN}}}',
        "0x9 1x600",
        "11m",
        "13m",
        labels(exported_instance="instance-0", state="out"),
    ),
    "MetronomeRewardCollapsed": (
        f"metronome_step_reward_mean{{{RUN}}}",
        "0.5x240 0x300",
        "4h",
        "4h40m",
        labels(),
    ),
}
"""Alert → (series, its values a minute, a time at which it is quiet, one at which it fires, labels)."""


def test_each_metric_that_they_name_is_one_of_a_run():
    text = metrics_text([INSTANCE], dict.fromkeys(FIGURES, 1.0)).decode()
    there = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    board = json.loads((MONITORING / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [rule["expr"] for rule in RULES]
    assert len(asked) > 15
    assert {name for query in asked for name in METRIC.findall(query)} <= there


def rule_tests():
    """promtool's file of tests: each alert is quiet first, and fires later."""
    tests = []
    for name, (series, values, quiet, fires, found) in TRIED.items():
        rule = next(rule for rule in RULES if rule["alert"] == name)
        alert = {"exp_labels": {**rule["labels"], **found}}
        cases = [{"eval_time": quiet, "alertname": name, "exp_alerts": []}]
        cases += [{"eval_time": fires, "alertname": name, "exp_alerts": [alert]}]
        tests.append(
            {"interval": "1m", "input_series": [{"series": series, "values": values}], "alert_rule_test": cases}
        )
    return tests


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package prometheus is not installed")
def test_promtool_accepts_them_and_each_alert_fires(tmp_path):
    shutil.copytree(MONITORING, tmp_path, dirs_exist_ok=True)
    rules = yaml.safe_load((tmp_path / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]  # promtool would compare them word by word
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(rules))
    tried = {"rule_files": ["plain.yaml"], "evaluation_interval": "1m", "tests": rule_tests()}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tried))
    (tmp_path / "targets.json").write_text("[]")
    (tmp_path / "token").write_text("a-token")
    for command in (["check", "config", "prometheus.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried():
    assert [rule["alert"] for rule in RULES] == list(TRIED)
