"""Takes the pictures in docs/images/ with headless Chromium: `python docs/screenshots.py [--folder DIR] [--model DIR]`.

Starts a Prefect server, an MLflow server and a worker, deploys the quickstart, has the deployment run it for a few
steps, and trains it once in mode sync and once in periodic. These two take turns, a few steps each (sync, periodic,
periodic, sync …), so that whatever else the machine does meets both. What the folder holds already is kept. Then it
photographs what a person sees. `--only page`: only the page of a run (`metronome watch`) in four states; `--only
compare`: only the comparison of the two modes; both without servers. Take speeds on a quiet machine.
Needs `chromium` on the PATH (Debian: apt-get install chromium) and `pip install playwright pillow`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from engine.run.files import read_lines
from tasks.cluster.prefect_api import CLIENT_AUTH, post_json

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from support.stack import Services  # noqa: E402

IMAGES = HERE / "images"
MODES = ("sync", "periodic")
TURNS = 6
TURN_STEPS = 5
"""Turns of each mode, and steps of a turn."""
LIMIT = 300_000
"""Bytes of a picture."""
SMALL = 200_000
"""Bytes of a picture of the page of a run."""
WATCHED = {"train.steps": 20, "train.prompts_per_step": 24, "evaluate.problems": 64, "evaluate.every": 10}
"""Settings of the run whose page is photographed."""
BROKEN_REWARD = """
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def reward(prompt, responses):
    count = len(SEEN.read_text()) if SEEN.exists() else 0
    SEEN.write_text("x" * (count + 1))
    if count > 100:
        raise KeyError("unit")
    return [float(prompt.answer in response.text) for response in responses]
"""
"""Ends a run after some steps."""
RUN_S = 1500.0
"""What a run, a turn or an evaluation may take."""
READY_MS = 120_000
"""What a page may take to show what is waited for."""
DEPLOYED = {"train.steps": 6, "train.prompts_per_step": 16, "evaluate.problems": 64, "checkpoint.every": 3}
"""Settings of the deployment."""
EVALUATED = {"evaluate.problems": 128, "evaluate.samples": 2}
"""Settings of the two runs that are compared."""
METRONOME = [sys.executable, "-m", "flows.cli"]


def main() -> None:
    """Runs, then pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/screenshots"), help="keeps servers' data and runs")
    parser.add_argument("--model", default="data/quickstart_model", help="base model")
    parser.add_argument("--only", choices=["page", "compare"], help="only these pictures")
    arguments = parser.parse_args()
    chromium = _chromium()
    folder = arguments.folder.resolve()
    with _browser(chromium) as browser:
        if arguments.only != "compare":
            _page_of_a_run(browser, folder, arguments.model)
        else:
            _take_turns(folder, arguments.model, dict(os.environ))
            _compare(browser, folder, dict(os.environ))
    if arguments.only:
        return
    with Services(folder / "services", s3=False) as services:
        environment = {**os.environ, **services.environment, "PREFECT_LOGGING_LEVEL": "INFO"}
        _metronome(environment, "deploy", *_sets(DEPLOYED))
        if not (folder / "runs/deployed/policy/config.json").exists():
            services.worker("cpu", "docs")
            _run_deployment({"name": "deployed", "output": str(folder / "runs"), "model": arguments.model}, environment)
        _take_turns(folder, arguments.model, environment)
        _photograph(
            folder=folder,
            environment=environment,
            prefect=services["prefect"].url,
            mlflow=services["mlflow"].url,
            chromium=chromium,
        )


def _chromium() -> str:
    """Path of the browser. Ends the script with what is missing."""
    missing = [name for name, module in (("playwright", "playwright"), ("pillow", "PIL")) if find_spec(module) is None]
    if missing:
        raise SystemExit(f"error: {' and '.join(missing)} not installed: pip install {' '.join(missing)}")
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        raise SystemExit("error: chromium is not on the PATH (Debian: apt-get install chromium)")
    return found


def _sets(settings: dict[str, Any]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def _metronome(environment: dict[str, str], *arguments: str) -> None:
    subprocess.run([*METRONOME, *arguments], env=environment, check=True, timeout=RUN_S)


def _run_deployment(settings: dict[str, str], environment: dict[str, str]) -> None:
    """The pipeline, as the form in the UI would start it."""
    command = ["deployment", "run", "metronome/pipeline", "--param", f"settings={json.dumps(settings)}", "--watch"]
    subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *command], env=environment, check=True, timeout=RUN_S
    )


@contextmanager
def _browser(chromium: str) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        try:
            yield browser
        finally:
            browser.close()


def _page_of_a_run(browser: Browser, folder: Path, model: str) -> None:
    """The page of a run that starts, goes on and ends, and of one whose reward fails."""
    sets = {"run.output": folder / "runs", "model.path": model, **WATCHED}
    with _begun(folder / "runs/watched", sets) as (run, process):
        with _watched(run) as url:
            page = _open(browser, url, 1280, 400)
            _wait_for_state(page, "starting")
            _save_page_of_run(page, "watch-starting", folder)
            page = _open(browser, url, 1280, 1800)
            _wait_for_state(page, "running")
            _wait_until(page, "run.count >= 12 && run.timeline !== null")
            _save_page_of_run(page, "watch-running", folder)
            process.wait(RUN_S)
            page = _open(browser, url, 1280, 1000)
            _wait_for_state(page, "finished")
            page.locator("#conversations .tokens").first.wait_for(timeout=READY_MS)
            page.evaluate("document.querySelector('#conversations').scrollIntoView()")
            _save_page_of_run(page, "watch-finished", folder)
    reward = folder / "broken_reward.py"
    reward.write_text(BROKEN_REWARD)
    reward.with_name("seen").unlink(missing_ok=True)
    with _begun(folder / "runs/broken", {**sets, "reward.function": f"{reward}:reward"}) as (run, process):
        process.wait(RUN_S)
    with _watched(run) as url:
        page = _open(browser, url, 1280, 560)
        _wait_for_state(page, "failed")
        _save_page_of_run(page, "watch-failed", folder)


@contextmanager
def _begun(run: Path, sets: dict[str, Any]) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A run that has just begun, and its process; a folder of that name goes first."""
    shutil.rmtree(run, ignore_errors=True)
    log = run.parent / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*METRONOME, "train", *_sets({**sets, "run.name": run.name})], stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + RUN_S
        while not (run / "config.toml").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{run} was not begun:\n{log.read_text()}")
            time.sleep(0.1)
        yield run, process
    finally:
        process.terminate()
        process.wait(RUN_S)


@contextmanager
def _watched(run: Path) -> Iterator[str]:
    """The address of a run's page."""
    process = subprocess.Popen([*METRONOME, "watch", str(run), "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield "http:" + process.stdout.readline().strip().partition("http:")[2]
    finally:
        process.terminate()
        process.wait(RUN_S)


def _save_page_of_run(page: Page, name: str, folder: Path) -> None:
    """With paths as on a reader's machine."""
    _settle(page, 3)
    page.evaluate("() => { now = () => {}; }")  # would write its own paths again two seconds later
    for path, shown in ((folder, "/home/you/metronome"), (HERE.parent, "/home/you/metronome")):
        page.evaluate(
            """([path, shown]) => { for (const one of document.querySelectorAll("#facts dd, #failure, #notices span"))
               one.textContent = one.textContent.replaceAll(path, shown); }""",
            [str(path), shown],
        )
    _save(page, name, most=SMALL)


def _wait_for_state(page: Page, state: str) -> None:
    _wait_until(page, f"document.querySelector('#state').textContent === '{state}'")


def _wait_until(page: Page, script: str) -> None:
    """Wait until an expression is true. Playwright's own wait is refused by the page's policy."""
    deadline = time.monotonic() + RUN_S
    while not page.evaluate(script):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{script} was not true within {RUN_S:.0f} s")
        page.wait_for_timeout(500)


def _take_turns(folder: Path, model: str, environment: dict[str, str]) -> None:
    """Train both modes in turns, the first of a round last in the next one; then evaluate both."""
    common = {"model.path": model, "run.output": folder / "runs", **EVALUATED}
    sets = {mode: _sets({**common, "run.name": mode, "train.mode": mode}) for mode in MODES}
    for turn in range(TURNS):
        for mode in MODES[:: -1 if turn % 2 else 1]:
            steps = (turn + 1) * TURN_STEPS
            if len(list(read_lines(folder / "runs" / mode / "steps.jsonl"))) < steps:
                resume = ["--resume"] if turn else []
                _metronome(environment, "train", *sets[mode], "--set", f"train.steps={steps}", *resume)
    for mode in MODES:
        run = folder / "runs" / mode
        if not list(read_lines(run / "evaluations.jsonl")):
            _metronome(environment, "evaluate", *sets[mode], "--model", str(run / "policy"))


def _photograph(folder: Path, environment: dict[str, str], prefect: str, mlflow: str, chromium: str) -> None:
    api = environment["PREFECT_API_URL"]
    password = environment[CLIENT_AUTH]
    [deployment] = [
        one["id"] for one in post_json(f"{api}/deployments/filter", {}, password) if one["name"] == "pipeline"
    ]
    asked = {"deployments": {"id": {"any_": [deployment]}}, "sort": "START_TIME_DESC", "limit": 1}
    [last] = post_json(f"{api}/flow_runs/filter", asked, password)
    runs = [(folder / "runs" / mode / "mlflow_run_id").read_text().strip() for mode in MODES]
    IMAGES.mkdir(exist_ok=True)
    with _browser(chromium) as browser:
        _prefect_run(browser, f"{prefect}/runs/flow-run/{last['id']}", password)
        _prefect_form(browser, f"{prefect}/deployments/deployment/{deployment}/run", password)
        _mlflow(browser, _plot(mlflow, runs, "tokens_per_s_per_device"))
        _compare(browser, folder, environment)


def _prefect_run(browser: Browser, url: str, password: str) -> None:
    """Without the arrows, which Prefect draws through labels;
    moved a little, so that the first label of the axis is whole."""
    page = _open(browser, url, 1400, 590, password=password)
    page.locator("canvas").first.wait_for(timeout=READY_MS)
    options = page.get_by_label("Run Graph Options")
    options.click()
    page.get_by_text("Hide dependency arrows").click()
    options.click()
    _settle(page, 5)
    page.mouse.move(900, 420)
    page.mouse.down()
    page.mouse.move(900 + 60, 420, steps=5)
    page.mouse.up()
    _settle(page, 3)
    _save(page, "prefect-run")


def _prefect_form(browser: Browser, url: str, password: str) -> None:
    """The whole form: Prefect scrolls it inside the window, so the window is made as high as it is."""
    page = _open(browser, url, 1200, 1000, password=password)
    page.get_by_text("continue_from").first.wait_for(timeout=READY_MS)
    _settle(page, 2)
    height = page.evaluate("Math.max(...[...document.querySelectorAll('*')].map(one => one.scrollHeight))")
    page.set_viewport_size({"width": 1200, "height": height})
    _settle(page, 2)
    _save(page, "prefect-form")


def _mlflow(browser: Browser, url: str) -> None:
    """Without the assistant, and without the plot's tool bar, which lies on the curves."""
    page = _open(browser, url, 1200, 690)
    page.locator(".main-svg .trace").first.wait_for(timeout=READY_MS)
    page.get_by_label("Close").click()
    page.add_style_tag(content=".modebar { display: none !important; }")
    _settle(page, 5)
    _save(page, "mlflow-compare")


def _compare(browser: Browser, folder: Path, environment: dict[str, str]) -> None:
    html = folder / "compare.html"
    folders = [str(folder / "runs" / mode) for mode in MODES]
    _metronome(environment, "compare", *folders, "--out", str(html))
    page = _open(browser, html.as_uri(), 1280, 900)
    _save(page, "compare", full_page=True)


def _open(browser: Browser, url: str, width: int, height: int, password: str = "") -> Page:
    """A page; `password`: what Prefect's login would ask for and keep in the browser."""
    page = browser.new_page(viewport={"width": width, "height": height})
    if password:
        page.add_init_script(f"localStorage.setItem('prefect-password', btoa({json.dumps(password)}))")
    page.goto(url, timeout=READY_MS)
    return page


def _settle(page: Page, seconds: float) -> None:
    """Animations have no end that one could wait for."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(1000 * seconds)


def _save(page: Page, name: str, full_page: bool = False, most: int = LIMIT) -> None:
    """`docs/images/NAME.png` of the page, with at most 256 colours. Raises RuntimeError for more than `most` bytes."""
    from PIL import Image

    target = IMAGES / f"{name}.png"
    page.screenshot(path=target, full_page=full_page)
    page.close()
    with Image.open(target) as image:
        image.convert("RGB").quantize(256).save(target, optimize=True)
    size = target.stat().st_size
    print(f"{target.name}: {size / 1000:.0f} kB", flush=True)
    if size > most:
        raise RuntimeError(f"{target} has {size} bytes, more than {most}")


def _plot(mlflow: str, runs: list[str], metric: str) -> str:
    """Address of MLflow's plot of one metric of some runs."""
    from mlflow import MlflowClient

    experiment = str(MlflowClient(mlflow).get_run(runs[0]).info.experiment_id)
    values = {
        "runs": runs,
        "metric": metric,
        "experiments": [experiment],
        "plot_metric_keys": [metric],
        "plot_layout": {"autosize": True, "xaxis": {}, "yaxis": {}},
        "line_smoothness": 1,
        "show_point": True,
        "deselected_curves": [],
        "last_linear_y_axis_range": [],
    }
    parts = [f"{name}={quote(json.dumps(value))}" for name, value in values.items()]
    return f"{mlflow}/#/metric?{'&'.join(parts)}&x_axis=step&y_axis_scale=linear"


if __name__ == "__main__":
    main()
