"""The `metronome` command line. Exit code 0; 2 on bad input, with one message; 1 on failure; 130 when interrupted."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from engine.config import Config
from engine.config.recipe import load
from engine.errors import BadInput, MetronomeError
from engine.run.process import drop_lifeline, watch_lifeline
from engine.types import JsonObject
from flows import QUICKSTART
from tasks import console
from tasks.dry_run import dry_run

Recipe = Annotated[str, typer.Argument(help="TOML file; recipes that ship are found by infra/recipes/NAME.toml")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="override a key, e.g. rollout.group_size=8")]

app = typer.Typer(
    help="Post-trains language models by reinforcement learning: overlapped, strictly on-policy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def run(
    recipe: Recipe = QUICKSTART,
    overrides: Set = [],  # noqa: B006
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the run of this run.name; finished stages are not repeated")
    ] = False,
) -> None:
    """Run the whole pipeline: data, base model, conversion, training, publishing, evaluation, registration."""
    from tasks.cluster.local_server import local_server, log_prefect_to
    from tasks.input_checks import check_inputs, check_run_folder

    with _exit_codes():
        config = load(recipe, overrides)
        if config.run.dry:
            dry_run(config)
            return
        check_run_folder(config, resume)
        check_inputs(config)
        with local_server(Path(config.run.output)) as server:
            from flows.pipeline import pipeline  # seconds, while the server starts

            log_prefect_to(Path(config.run.output) / "prefect.log")
            if server is not None:
                server.wait()
            pipeline(recipe, [*overrides, f"run.name={config.run.name}"], resume=resume)


@app.command()
def train(
    recipe: Recipe = QUICKSTART,
    overrides: Set = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="continue the run of this run.name")] = False,
    replay: Annotated[Path | None, typer.Option("--replay", help="repeat a recorded run (train.record)")] = None,
) -> None:
    """Train only, without Prefect; the run is tracked in MLflow."""
    from tasks.input_checks import check_inputs, check_run_folder, with_model_folder
    from tasks.tracking.registered_policies import as_begun

    with _exit_codes():
        config = load(recipe, overrides)
        if config.run.dry:
            dry_run(config)
            return
        check_run_folder(config, resume)
        if replay is not None and not replay.is_file():
            raise BadInput(f"--replay {replay}: no such file; a run with train.record = true writes record.msgpack")
        config, _ = as_begun(config)
        check_inputs(config, sampling=replay is None)
        config = with_model_folder(config)
        _train(config, resume, replay)


def _train(config: Config, resume: bool, replay: Path | None) -> None:
    from engine.run.folder import RunFolder
    from engine.run.lock import hold_lock
    from tasks import summary
    from tasks.launcher_process import run_training
    from tasks.tracking import evaluations, mlflow_run, tracked_run

    folder = RunFolder(config.folder)
    line = console.StepLines(config.train.steps)
    evaluated = evaluations.InRun(folder)

    def on_step(row: JsonObject) -> None:
        line(row)
        tracked_run.log_step(row)
        evaluated()

    # the lock comes before MLflow: a living process may be using the MLflow run
    locked = hold_lock(folder.lock, f"run folder {folder.path}", 0.0)
    with locked, tracked_run.tracked(config), console.stage("train") as say:
        mlflow_run.log_model_input(Path(config.model.path))
        run_training(config, resume, replay, on_step)
        say(f"{config.train.steps} steps")
    rows = {**evaluations.closing(folder), **summary.training(config), "MLflow UI": tracked_run.ui_command(config)}
    console.table(f"Run {config.run.name}", rows)


@app.command()
def evaluate(
    recipe: Recipe = QUICKSTART,
    overrides: Set = [],  # noqa: B006
    model: Annotated[str, typer.Option(help="Hugging Face folder (default: model.path)")] = "",
    benchmark: Annotated[str, typer.Option(help="problem file (default: evaluate.benchmark or data.heldout)")] = "",
) -> None:
    """Accuracy of a model on a benchmark, with its interval; a line in the run folder's evaluations.jsonl."""
    from tasks.input_checks import check_inputs, with_model_folder

    with _exit_codes():
        given = [f"model.path={model}"] if model else []
        given += [f"evaluate.benchmark={benchmark}"] if benchmark else []
        config = load(recipe, [*overrides, *given])
        check_inputs(config, training=False)
        config = with_model_folder(config)
        _evaluate(config)


def _evaluate(config: Config) -> None:
    from engine.launcher import standalone_evaluation as evaluation
    from engine.run.folder import RunFolder
    from tasks import summary
    from tasks.tracking import evaluations, tracked_run

    folder = RunFolder(config.folder)
    model = Path(config.model.path)
    if not folder.config.exists():
        folder.create(config, resume=False)
    tracked_run.check_store(config)
    with console.stage("evaluate") as say:
        say(evaluations.report(evaluation.evaluate(config, model, summary.weight_version(model), folder)))
    evaluations.log_or_say(config)


@app.command()
def serve(
    recipe: Recipe = QUICKSTART,
    overrides: Set = [],  # noqa: B006
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 0,
    host: Annotated[
        str, typer.Option(help="address to listen on; others than loopback need METRONOME_TOKEN")
    ] = "127.0.0.1",
    join: Annotated[str, typer.Option(help="join this run: its launcher's host:port, or its run folder")] = "",
    name: Annotated[str, typer.Option(help="its name in the run (default: host and process id)")] = "",
) -> None:
    """Run one rollout instance of the recipe in the foreground. On Ctrl-C it leaves its run and ends."""
    from engine.instance.join import default_name, serve_alone, serve_joined
    from tasks.input_checks import with_model_folder

    with _exit_codes():
        config = with_model_folder(load(recipe, overrides))
        instance = name or default_name()
        if not join:
            raise typer.Exit(serve_alone(config, instance, host, port))
        raise typer.Exit(
            serve_joined(config=config, address=join, name=instance, host=host, port=port, say=console.complain)
        )


@app.command()
def deploy(
    recipe: Recipe = QUICKSTART,
    overrides: Set = [],  # noqa: B006
    pool: Annotated[str, typer.Option(help="work pool of training and evaluation, of infra/pools/pools.toml")] = "cpu",
    rollout_pool: Annotated[str, typer.Option(help="work pool of rollout instances that join a run")] = "cpu",
    timezone: Annotated[str, typer.Option(help="time zone of the schedules, e.g. Asia/Shanghai")] = "Etc/UTC",
    training: Annotated[str, typer.Option(help="cron line of the nightly training; empty: no schedule")] = "0 22 * * *",
    evaluation: Annotated[
        str, typer.Option(help="cron line of the nightly evaluation; empty: no schedule")
    ] = "0 6 * * *",
    npus: Annotated[
        int, typer.Option(help="NPUs of the cluster: slots of the limit ascend-npus; 0 leaves it as it is")
    ] = 0,
    on_rollout_pool: Annotated[int, typer.Option(help="instances that runs take from the rollout pool by default")] = 0,
    pools: Annotated[
        Path | None, typer.Option(help="list of work pools of your own, as infra/pools/pools.toml")
    ] = None,
) -> None:
    """Bring work pools, deployments, schedules and automations up to date on the server of PREFECT_API_URL."""
    with _exit_codes():
        load(recipe, overrides)
        from tasks.cluster.deploy import Choices
        from tasks.cluster.deploy import deploy as make

        rows = make(
            recipe,
            overrides,
            Choices(
                pool=pool,
                rollout_pool=rollout_pool,
                timezone=timezone,
                training=training,
                evaluation=evaluation,
                npus=npus,
                on_rollout_pool=on_rollout_pool,
                pools=pools,
            ),
        )
        console.table("Deployed", rows)


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="run folders and MLflow run ids; compared with the first")
    ],
    out: Annotated[Path, typer.Option("--out", help="the page to write")] = Path("compare.html"),
    tracking_uri: Annotated[
        str, typer.Option(help="MLflow store of run ids (default: MLFLOW_TRACKING_URI or runs/)")
    ] = "",
) -> None:
    """Compare runs: curves, wall time and benchmarks with intervals, as one page and a table."""
    with _exit_codes():
        from tasks import compare as comparison

        print(comparison.compare(runs, out, tracking_uri))


@app.command()
def doctor(
    device: Annotated[
        bool, typer.Option("--device", help="try the devices too: kernels, transfers, a completion, training steps")
    ] = False,
    only: Annotated[list[str], typer.Option("--only", metavar="PART", help="with --device: only this part")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option("--out", help="with --device: the JSON file of the report")] = None,
    overrides: Set = [],  # noqa: B006
) -> None:
    """Say which versions are installed, whether they fit together, and what is missing; --device tries the machine."""
    from tasks.cluster.doctor import check_devices, findings

    with _exit_codes():
        if device:
            raise typer.Exit(0 if check_devices(overrides, only, out) else 1)
        if only or out or overrides:
            raise BadInput("--only, --out and --set are for metronome doctor --device")
        lines, healthy = findings()
        print("\n".join(lines))
        raise typer.Exit(0 if healthy else 1)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn errors into one message and an exit code. The children end in any case."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except BadInput as error:
        console.complain(f"error: {error}")
        raise typer.Exit(2) from None
    except MetronomeError as error:
        console.complain(f"error: {type(error).__name__}: {error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.complain("interrupted")
        raise typer.Exit(130) from None
    finally:
        drop_lifeline()


def _interrupt(*_: object) -> NoReturn:
    """SIGTERM ends a command as Ctrl-C does: through its `finally` blocks."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the console script."""
    watch_lifeline()
    try:
        app(prog_name="metronome")
    finally:
        gc.freeze()  # without it the interpreter collects the modules of torch and Prefect one by one, in two seconds


if __name__ == "__main__":
    main()
