"""The report of the acceptance, as text and as JSON."""

import json

from engine.tools.acceptance.supervisor import PartResult, as_json, summary, verdict

FINE = PartResult("kernels", "ok", 12.3, ("attention cuda: 1e-7",), figures={"errors": [1e-7]})
SKIPPED = PartResult("broadcast", "skipped", 1.0, reason="nccl needs two devices", remedy="use two")
BROKEN = PartResult(
    "devices", "failed", 60.4, ("device 0 works",), reason="late; its log ends:\n    one\n    two", remedy="ask"
)


def test_the_summary_counts_and_lists_all_parts():
    found = summary([FINE, SKIPPED, BROKEN])
    assert "| broadcast | skipped | 1 s |" in found
    assert found.endswith("1 ok, 1 failed, 1 skipped, in 74 s.")
    assert verdict([FINE]) == "1 ok, in 12 s."


def test_the_json_report_has_all_of_it():
    found = json.loads(json.dumps(as_json([FINE, BROKEN], ["platform.device=cuda"])))
    assert (found["format"], found["healthy"], found["settings"]) == (1, False, ["platform.device=cuda"])
    assert [part["status"] for part in found["parts"]] == ["ok", "failed"]
    assert found["parts"][0]["figures"] == {"errors": [1e-7]}
    assert found["parts"][1]["reason"].startswith("late")
