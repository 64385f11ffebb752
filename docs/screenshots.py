"""Takes the pictures in docs/images/ with headless Chromium: `python docs/screenshots.py [--folder DIR] [--model DIR]`.

Starts a Prefect server, an MLflow server and a worker, deploys the quickstart, has it trained once in mode sync and once in
periodic (about five minutes each on two idle cores; runs that the folder holds already are kept), and photographs what a person
sees then. Needs `chromium` on the PATH (Debian: apt-get install chromium) and Pillow.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from tasks.services import Services, post

HERE = Path(__file__).resolve().parent
IMAGES = HERE / "images"
MODES = ("sync", "periodic")
LIMIT = 300_000
"""Bytes of a picture."""
RUN_S = 1500.0
"""What a run may take."""
SETTINGS = {
    "train.steps": 10, "train.prompts_per_step": 16, "evaluate.problems": 64, "evaluate.samples": 2, "checkpoint.every": 5,
}  # fmt: skip
METRONOME = [sys.executable, "-m", "flows.cli"]


def main() -> None:
    """Runs, then pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/screenshots"), help="keeps servers' data and runs")
    parser.add_argument("--model", default="quickstart", help="base model")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    with Services(folder / "services", s3=None) as services:
        environment = {**os.environ, **services.environment, "PREFECT_LOGGING_LEVEL": "INFO"}
        _deploy(environment)
        missing = [mode for mode in MODES if not _done(folder, mode)]
        if missing:
            services.worker("cpu", "docs")
        for mode in missing:
            _run({"name": mode, "mode": mode, "output": str(folder / "runs"), "model": arguments.model}, environment)
        _photograph(folder, environment, services["prefect"].url, services["mlflow"].url)


def _done(folder: Path, mode: str) -> bool:
    return (folder / "runs" / mode / "policy" / "config.json").exists()


def _deploy(environment: dict[str, str]) -> None:
    sets = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    subprocess.run([*METRONOME, "deploy", *sets], env=environment, check=True, timeout=300)


def _run(settings: dict[str, str], environment: dict[str, str]) -> None:
    """The pipeline, as the form in the UI would start it."""
    command = ["deployment", "run", "metronome/pipeline", "--param", f"settings={json.dumps(settings)}", "--watch"]
    subprocess.run([sys.executable, "-m", "prefect", "--no-prompt", *command], env=environment, check=True, timeout=RUN_S)


def _photograph(folder: Path, environment: dict[str, str], prefect: str, mlflow: str) -> None:
    api = environment["PREFECT_API_URL"]
    [deployment] = [one["id"] for one in post(f"{api}/deployments/filter", {}) if one["name"] == "pipeline"]
    last = post(f"{api}/flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}, "sort": "START_TIME_DESC", "limit": 1})
    page = folder / "compare.html"
    subprocess.run([*METRONOME, "compare", *(str(folder / "runs" / mode) for mode in MODES), "--out", str(page)], check=True)
    runs = [(folder / "runs" / mode / "mlflow_run_id").read_text().strip() for mode in MODES]
    picture(f"{prefect}/runs/flow-run/{last[0]['id']}", "prefect-run", 1400, 590, 40)
    picture(f"{prefect}/deployments/deployment/{deployment}/run", "prefect-form", 1400, 1700)
    picture(_plot(mlflow, runs, "reward_mean"), "mlflow-compare", 1500, 690, 30)
    picture(page.as_uri(), "compare", 1280, 1720)


def _plot(mlflow: str, runs: list[str], metric: str) -> str:
    """Address of MLflow's plot of one metric of some runs."""
    from mlflow import MlflowClient

    experiment = str(MlflowClient(mlflow).get_run(runs[0]).info.experiment_id)
    values = {"runs": runs, "metric": metric, "experiments": [experiment], "plot_metric_keys": [metric],
              "plot_layout": {"autosize": True, "xaxis": {}, "yaxis": {}}, "line_smoothness": 1, "show_point": True,
              "deselected_curves": [], "last_linear_y_axis_range": []}  # fmt: skip
    parts = [f"{name}={quote(json.dumps(value))}" for name, value in values.items()]
    return f"{mlflow}/#/metric?{'&'.join(parts)}&x_axis=step&y_axis_scale=linear"


def picture(url: str, name: str, width: int, height: int, patience_s: int = 15) -> None:
    """`docs/images/NAME.png` of a page, with at most 256 colours. Raises RuntimeError for one that is too large."""
    target = IMAGES / f"{name}.png"
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("error: chromium is not on the PATH (Debian: apt-get install chromium)")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb",
             f"--window-size={width},{height}", f"--virtual-time-budget={patience_s * 1000}",
             f"--screenshot={target}"]  # fmt: skip
    IMAGES.mkdir(exist_ok=True)
    subprocess.run([chromium, *flags, url], check=True, timeout=180, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with Image.open(target) as image:
        image.convert("RGB").quantize(256).save(target, optimize=True)
    size = target.stat().st_size
    print(f"{target.name}: {size / 1000:.0f} kB", flush=True)
    if size > LIMIT:
        raise RuntimeError(f"{target} has {size} bytes, more than {LIMIT}")


if __name__ == "__main__":
    main()
