from engine.orchestrator.launch import training_progress

STEP = {"ready": True, "instances": 2, "met": 2, "running": 16, "tokens_per_s": 1234, "step": 12, "expected": 32}


def test_how_far_a_step_is():
    for row, text, share in (
        ({"ready": False}, "loading the models; starting", None),
        ({"ready": False, "instances": 2, "met": 1}, "loading the models; 1 of 2 instances ready", None),
        ({"ready": False, "instances": 0, "met": 1}, "loading the models; joined: 1 instance", None),
        ({"ready": True, "instances": 0, "met": 0}, "waiting for an instance", None),
        ({"ready": True, "instances": 2, "met": 2}, "weights are on their way to the instances", None),
        ({"ready": True, "done": 50}, "the last checkpoint and the policy are written", 1.0),
        (
            STEP | {"arrived": 0, "trained": 0},
            "12/50 steps; in the next: waiting for the first of 32 groups; 16 in flight, 1,234 tokens/s",
            0.24,
        ),
        (STEP | {"arrived": 9, "trained": 4}, "12/50 steps; in the next: 4 of 32 groups trained, 9 sampled", 0.2425),
        (
            STEP | {"arrived": 32, "trained": 32, "evaluation": {"version": 12, "finished": 7, "expected": 256}},
            "12/50 steps; in the next: 32 of 32 groups trained; evaluating version 12: 7 of 256 responses",
            0.26,
        ),
    ):
        found = training_progress(row, 50)
        assert (found.text, found.share) == (text, share)
    assert training_progress(STEP | {"step": 1200, "arrived": 0, "trained": 0}, 1600).text.startswith("1,200/1,600 ")
