"""One seed from its schedule to its verdict: the undisturbed run to compare with, the disturbed one, the checks."""

import json
import shutil
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from chaos import checker
from chaos.nemesis import Nemesis, told
from chaos.progress import Progress
from chaos.schedule import LEFT_OUT, WHOLE_MINUTES, schedule
from chaos.world import Disturbed
from support.runs import launch

BRAKE_S = 1.0
"""What the reward of a group takes."""
LEAST_STEP_S = 2.0
"""So a step takes at least this: it has four groups, and there are two workers."""
CALM_STEPS = 3
"""Steps of a disturbed run before its schedule begins."""
PACED_STEPS = 12
"""Steps of an undisturbed run that are as slow as those of a disturbed one, to tell how long they take."""
MEDIAN_S = 30.0
LONGEST_S = 180.0
"""Bounds of p50 and p99 of the recoveries."""
THROUGHPUT = 0.6
"""Least share of the undisturbed run's steps per second."""
ORDINARY = 3
"""A pause between two steps of up to so many undisturbed steps is no disturbance."""
UNDISTURBED_S = 3600.0
"""Longest time of the undisturbed run."""
END_S = 15.0
"""Seconds in which all processes of a run that is complete must be gone."""
EVERY = 2
"""checkpoint.every."""


def steps_of(minutes):
    """More than a disturbed run can do until its schedule is over."""
    return int(60 * minutes / LEAST_STEP_S) + 10


def run_all(world, seeds, minutes, say):
    """The results of all seeds. Prints each schedule first. `world` does not serve yet."""
    steps = steps_of(minutes)
    say(f"{steps} steps a run. {LEFT_OUT}")
    if not world.has_namespaces:
        say("No network namespace here: the guest is behind the proxy alone, and its link does not go down.")
    if not world.has_space_of_its_own:
        say("No file system of its own here: the disk does not fill.")
    undisturbed = compared_with(world, steps, minutes >= WHOLE_MINUTES, say)
    results = []
    for seed in seeds:
        faults = schedule(seed, minutes, world.permitted)
        say(f"schedule of seed {seed}, {minutes:g} minutes:\n" + "\n".join(f"  {fault}" for fault in faults))
        results.append(run_one(world, seed, minutes=minutes, undisturbed=undisturbed, say=say))
        print("RESULT " + json.dumps(results[-1]), flush=True)
    return results


def compared_with(world, steps, whole, say):
    """(hashes of the undisturbed run's weights, median seconds of a step), once the world serves.

    `whole`: whether throughput is held to that median. Where it is not, the run is not slowed down, goes on while the
    servers start, and a step counts as `LEAST_STEP_S`.
    """
    if whole:
        world.serve()
        return train_undisturbed(world, steps, PACED_STEPS, say)
    with ThreadPoolExecutor(1) as beside:
        undisturbed = beside.submit(train_undisturbed, world, steps, 0, say)
        world.serve()
        return undisturbed.result()


def train_undisturbed(world, steps, paced, say):
    """(hashes of its weights, median seconds of its first steps). `paced`: how many of them are slowed down."""
    folder = world.place / "undisturbed"
    with Progress(folder / "steps.jsonl") as progress:

        def release():
            while progress.newest < paced:
                time.sleep(0.1)
            world.slow_down(0)

        if paced:
            world.slow_down(BRAKE_S)
            threading.Thread(target=release, daemon=True).start()
        settings = world.settings(steps) | {"run.name": folder.name}
        code, output = launch(settings, world.folder, timeout_s=UNDISTURBED_S)
    assert code == 0, output
    times = [progress.first[step] for step in range(paced)]
    pace = statistics.median(b - a for a, b in zip(times, times[1:], strict=False)) if paced else LEAST_STEP_S
    found = checker.weights(folder)
    shutil.rmtree(folder)
    say(f"undisturbed: {pace:.2f} s a step; weights {found}")
    return found, pace


def run_one(world, seed, minutes, undisturbed, say):
    """The result of one seed. `undisturbed`: what `train_undisturbed` found."""
    weights, pace = undisturbed
    steps = steps_of(minutes)
    world.slow_down(BRAKE_S)
    with Disturbed(world, f"seed-{seed}", steps, say) as run:
        nemesis = Nemesis(run, say)
        seconds, reached = disturb(run, nemesis, schedule(seed, minutes, world.permitted), minutes)
        world.slow_down(0)
        run.wait(run.look_after, "the end of the run", 60 * max(15.0, minutes))
        run.progress.look()
        say("the run is complete")
        spoiled = run.guest.spoiled()
        left = left_after(run, END_S)
    moments = [moment for _, moment in nemesis.given]
    recoveries = run.progress.recoveries(moments, time.monotonic(), ORDINARY * pace)
    throughput = (reached - CALM_STEPS + 1) / seconds * pace
    problems = list(run.unexpected)
    problems += checker.all_happened(nemesis.given, nemesis.skipped, spoiled)
    problems += checker.same_weights(run.folder, weights)
    problems += checker.each_step_once(run.folder, steps)
    problems += checker.each_figure_once(world.services["mlflow"].url, run.folder)
    world.servers_went |= any(fault.kind == "restart" for fault, _ in nemesis.given)
    problems += checker.clean_logs(logs(world, run), world.servers_went)
    problems += checker.none_left(left)
    problems += checker.few_wasted(run.progress.wasted, len(nemesis.given), EVERY)
    if minutes >= WHOLE_MINUTES:  # the faults of a shorter schedule come closer together than these bounds are for
        problems += checker.quick(recoveries, MEDIAN_S, LONGEST_S)
        problems += checker.fast(throughput, THROUGHPUT)
    keep_logs(world, run)
    say("recovery of each fault:\n" + "\n".join(told(nemesis.given, recoveries)))
    for problem in problems:
        say(f"FOUND: {problem}")
    return {
        "seed": seed,
        "steps": steps,
        "seconds": round(seconds),
        "faults": len(nemesis.given),
        "skipped": [f"{fault.kind}, {fault.target}: {why}" for fault, why, _ in nemesis.skipped],
        "recovery_p50_s": round(checker.percentile(recoveries, 0.5), 1),
        "recovery_p99_s": round(checker.percentile(recoveries, 0.99), 1),
        "wasted_steps": run.progress.wasted,
        "throughput": round(throughput, 2),
        "undisturbed_s": round(pace, 2),
        "resumed_by_hand": len(run.resumed_by_hand),
        "started_again": dict(run.starts),
        "namespace": world.has_namespaces,
        "problems": problems,
    }


def disturb(run, nemesis, faults, minutes):
    """Give the faults to a run once it trains: (seconds that it took, the newest step at the end)."""
    run.wait(lambda: run.progress.newest >= CALM_STEPS - 1, "the first steps")
    began = time.monotonic()
    run.say("it trains; the schedule begins")
    nemesis.play(faults, began)
    while time.monotonic() < began + 60 * minutes:
        time.sleep(0.5)
        run.look_after()
    nemesis.heal()
    reached = run.progress.newest
    run.say(f"the schedule is over at step {reached}; the run goes on without faults")
    return time.monotonic() - began, reached


def left_after(run, seconds):
    """The run's processes that are still there after so long."""
    end = time.monotonic() + seconds
    while run.own() and time.monotonic() < end:
        time.sleep(0.5)
    return run.own()


def logs(world, run):
    """Every log of the run and of those who serve it, but for the servers of other projects."""
    services = world.folder / "services"
    return [
        *sorted((run.folder / "logs").glob("*.log*")),
        run.guest_log,
        *services.glob("chaos*.log"),
        services / "watchdog.log",
    ]


def keep_logs(world, run):
    """Where they stay when the file system of the runs is gone."""
    kept = world.folder / f"{run.name}-kept"
    shutil.copytree(
        run.folder, kept, ignore=shutil.ignore_patterns("checkpoints", "policy", "responses"), dirs_exist_ok=True
    )
