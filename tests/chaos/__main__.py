"""`python -m chaos --seeds 1,2 --minutes 10`: a run for each seed, disturbed as the seed says, and what came of it.

The last line is `RESULT` and an object of JSON.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from chaos import trial
from chaos.world import World
from support.runs import save_model, save_problems


def main():
    """Exit code 0 if everything holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="1", help="numbers, separated by commas")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, help="keeps the logs (default: a temporary folder, kept on failure)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers, the namespace and the file system
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = save_model(folder / "model")
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    with World(folder, model, save_problems(folder / "problems.jsonl")) as world:
        results = trial.run_all(world, seeds, arguments.minutes, said)
    problems = [problem for result in results for problem in result["problems"]]
    print("RESULT " + json.dumps({"runs": results, "ok": not problems}))
    if problems:
        said(f"logs are in {folder}")
    elif arguments.folder is None:
        shutil.rmtree(folder)
    return 1 if problems else 0


def said(text):
    """A line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
