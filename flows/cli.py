"""The `metronome` command line. Exit code 0; 2 on bad input, with one message; 1 on failure; 130 when interrupted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from engine.config import Config
from engine.config.recipe import find_file, load_config, override_keys
from engine.config.reference import main_keys
from engine.errors import BadInput, MetronomeError
from engine.run.folder import RunFolder
from engine.run.process import drop_lifeline, watch_lifeline
from engine.types import JsonObject
from flows import OWN_DATA, QUICKSTART, new_recipe, reports
from tasks.stages.resume import Resumed
from tasks.terminal import console, interruption
from tasks.terminal.progress_display import show_progress, since_now

Recipe = Annotated[
    str,
    typer.Argument(help=f"TOML file; recipes that ship: infra/recipes/NAME.toml. Default: {QUICKSTART}"),
]
OwnRecipe = Annotated[
    str,
    typer.Argument(
        help=f"TOML file; recipes that ship are found by infra/recipes/NAME.toml. Default: {QUICKSTART}, with --set "
        f"data.train {OWN_DATA}; with --resume the run's own settings are used in any case"
    ),
]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="override a key, e.g. rollout.group_size=8")]

app = typer.Typer(
    help="Post-trains language models by reinforcement learning: overlapped, strictly on-policy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        console.print_page(f"metronome {metadata.version('metronome')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options before the command."""


def run(
    recipe: OwnRecipe = "",
    overrides: Set = [],  # noqa: B006
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the run of this run.name; finished stages are not repeated")
    ] = False,
) -> None:
    """Run the whole pipeline: data, base model, conversion, training, publishing, evaluation, registration."""
    found = _run_of(recipe, overrides, resume)
    from tasks.cluster.local_server import local_server, log_prefect_to
    from tasks.stages.input_checks import check_address, check_inputs, check_run_folder
    from tasks.stages.resume import identifying_keys

    config = found.config
    if config.run.dry:
        _print_plan(config)
        return
    check_run_folder(config, resume)
    if not found.recipe:
        raise BadInput(
            f"--resume: {config.folder} has no run.json that says the run's recipe; name it: "
            f"metronome run RECIPE.toml --resume --set run.name={config.run.name}"
        )
    interruption.note_run(config, "run")
    check_address(config)
    check_inputs(config, evaluates=True)
    with local_server(Path(config.run.output)) as wait_for_server:
        with show_progress("start", since_now("starting Prefect")):
            from flows.pipeline import pipeline  # takes seconds, during which the server starts

            log_prefect_to(Path(config.run.output) / "prefect.log")
            wait_for_server()
        # of a run, its own settings are its recipe
        begun = str(RunFolder(config.folder).config.resolve()) if resume else found.recipe
        pipeline(recipe or begun, [*overrides, *identifying_keys(config)], resume=resume)


def _print_plan(config: Config) -> None:
    """Print layout, memory and arithmetic (`run.dry`); start nothing. Raises BadInput with every reason why the recipe
    cannot run, and for a reward or a program of the user's that can't be loaded or, if the model is here, a text in
    `rollout.stop` that is no token of it."""
    from engine.data.tokenizer import Tokenizer
    from engine.tools.dry_run import has_device, plan_run, plan_sections
    from tasks.stages.input_checks import check_machine, check_reward

    if config.rollout.program or any(":" in one.function for one in config.reward.named):
        check_reward(config)
    model = find_file(config.model.path)
    if config.rollout.stop and model.is_dir():
        Tokenizer(model, config.rollout.stop)
    made = plan_run(config)
    if has_device(config):
        check_machine(config)
    _print_sections(plan_sections(made))


def _print_sections(sections: Mapping[str, Mapping[str, str]]) -> None:
    for title, rows in sections.items():
        console.print_table(title, rows)
    console.print_page("\nNothing was started. Memory is computed, not measured: docs/hardware.md says what it covers.")


def _run_of(recipe: str, overrides: list[str], resume: bool) -> Resumed:
    """The run that a command means: a new one, or an existing one with `resume`."""
    from tasks.stages.resume import find_resumed

    if resume:
        return find_resumed(recipe or None, overrides)
    named, note = (recipe, "") if recipe else _default_recipe(override_keys(overrides))
    config = load_config(named, overrides)
    if note:
        console.say("recipe", note)
    return Resumed(config, named)


def _named(recipe: str) -> str:
    """The recipe of a command, by default the quickstart, which is said."""
    if not recipe:
        console.say("recipe", f"{QUICKSTART}, as none is named")
    return recipe or QUICKSTART


def _default_recipe(given: JsonObject) -> tuple[str, str]:
    """The recipe of a training that names none, and the line that says so; "" for the quickstart as it is. Raises
    BadInput for problems of one's own without held-out ones."""
    if "data.train" not in given:
        changed = {"model.path", "data.heldout", "reward.function", "reward.functions"} & given.keys()
        note = f"{QUICKSTART}, as no recipe is named: its settings suit its tiny model"
        return QUICKSTART, note if changed else ""
    if not {"data.heldout", "data.heldout_fraction"} & given.keys():
        raise BadInput(
            "--set data.train: data.heldout would be the quickstart's additions; also give "
            "--set data.heldout=FILE or --set data.heldout_fraction=0.1, or a recipe (README, Your own data and reward)"
        )
    return OWN_DATA, f"{OWN_DATA}, as data.train is set and no recipe is named: other keys have their defaults"


def train(
    recipe: OwnRecipe = "",
    overrides: Set = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="continue the run of this run.name")] = False,
    replay: Annotated[Path | None, typer.Option("--replay", help="repeat a recorded run (train.record)")] = None,
) -> None:
    """Train only, without Prefect; the run is tracked in MLflow."""
    found = _run_of(recipe, overrides, resume)
    from engine.data.problem_statistics import describe_report, report_data
    from engine.wire import record
    from tasks.stages.input_checks import check_address, check_inputs, check_run_folder, with_model_folder

    config = found.config
    if config.run.dry:
        _print_plan(config)
        return
    check_run_folder(config, resume)
    if replay is not None and not replay.is_file():
        raise BadInput(f"--replay {replay}: no such file; a run with train.record = true writes record.msgpack")
    if replay is None:
        check_address(config)
    config, data = check_inputs(config, sampling=replay is None)
    if data is not None:
        console.say("prepare data", describe_report(report_data(data)))
    from flows.local import train_here  # MLflow takes seconds to load
    from tasks.stages.resume_checks import check_resume
    from tasks.tracking.tracked_run import check_store

    if resume:
        found.tell()
        config = check_resume(config)
    interruption.note_run(config, "train")
    config = with_model_folder(config)
    if replay is not None:
        record.check_record(replay, config)
    check_store(config, trains=True)
    train_here(config, resume=resume, replay=replay, recipe=found.recipe, data=data)


def evaluate(
    recipe: Recipe = "",
    overrides: Set = [],  # noqa: B006
    model: Annotated[
        str,
        typer.Option(
            metavar="RUN|DIR|models:/NAME@champion",
            help="the policy of a run, a checkpoint, a registered model, or any model.path (default: model.path)",
        ),
    ] = "",
    benchmark: Annotated[str, typer.Option(help="problem file (default: evaluate.benchmark or data.heldout)")] = "",
) -> None:
    """Measure the accuracy of a model on a benchmark, with its interval, and add a line to the run folder's
    evaluations.jsonl."""
    from engine.data.hub import is_model_name
    from engine.run.served_model import model_folder

    named = _named(recipe)
    config = load_config(named, overrides)
    if model and not (is_model_name(model) and config.run.dry):
        from tasks.commands.export import policy_folder

        model = str(model_folder(policy_folder(model, overrides))[0])
    given = [f"model.path={model}"] if model else []
    given += [f"evaluate.benchmark={benchmark}"] if benchmark else []
    config = load_config(named, [*overrides, *given]) if given else config
    if config.run.dry:
        from engine.tools.dry_run import evaluation_sections

        _print_sections(evaluation_sections(config))
        return
    from tasks.stages.input_checks import check_inputs, with_model_folder

    config = with_model_folder(check_inputs(config, training=False, evaluates=True)[0])
    from flows.local import evaluate_here  # MLflow takes seconds to load

    evaluate_here(config)


def try_reward(
    recipe: Recipe = "",
    overrides: Set = [],  # noqa: B006
    response: Annotated[
        list[str], typer.Option("--response", metavar="TEXT", help="a response to score (default: the row's answer)")
    ] = [],  # noqa: B006
    responses: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='lines {"response": "..."}, or a run\'s responses/step-N.jsonl'),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="number of problems of data.train to try it on")] = 3,
) -> None:
    """Show a prompt as the model gets it and what a few responses score, with metrics and seconds. Exit code 1: a score
    is missing."""
    config = load_config(_named(recipe), overrides)
    from tasks.stages.input_checks import with_model_folder
    from tasks.stages.reward_trial import read_given, run_trial

    given = read_given(response, responses)
    shown, whole = run_trial(with_model_folder(config), given, rows)
    console.print_page(shown)
    raise typer.Exit(0 if whole else 1)


def serve(
    recipe: Annotated[str, typer.Argument(help="TOML file (default: the quickstart; with --model the run's own)")] = "",
    overrides: Set = [],  # noqa: B006
    model: Annotated[
        str,
        typer.Option(metavar="RUN|DIR", help="serve text through OpenAI's API, with this policy, checkpoint or model"),
    ] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0 takes a free one")] = 0,
    host: Annotated[
        str, typer.Option(help="address to listen on; any but loopback needs METRONOME_TOKEN")
    ] = "127.0.0.1",
    join: Annotated[str, typer.Option(help="join this run: its orchestrator's host:port, or its run folder")] = "",
    name: Annotated[str, typer.Option(help="its name in the run (default: host and process id)")] = "",
) -> None:
    """Run one rollout instance of the recipe in the foreground; with --model, serve a policy to talk to. On Ctrl-C the
    instance leaves its run and ends."""
    from engine.data.named_models import is_named_model
    from engine.instance.join import check_join, default_name, serve_alone, serve_joined
    from engine.run.served_model import in_use, served_config
    from tasks.commands.export import policy_folder
    from tasks.stages.input_checks import with_model_folder

    instance = name or default_name()
    if model and join:
        raise BadInput("--model serves a policy, --join joins a run: give one of them")
    if join:
        check_join(join)
    if model:
        folder = policy_folder(model, overrides)
        config, text = served_config(folder, recipe, overrides)
        text = model if is_named_model(model) else text
        with in_use(Path(config.model.path)):
            raise typer.Exit(serve_alone(config=config, name=instance, host=host, port=port, text=text))
    config = with_model_folder(load_config(_named(recipe), overrides))
    if not join:
        raise typer.Exit(serve_alone(config, instance, host, port))
    raise typer.Exit(
        serve_joined(config=config, address=join, name=instance, host=host, port=port, say=console.print_error)
    )


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/step-NUMBER; RUN or RUN/checkpoints/best: its best"),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="new folder (default: RUN/exported/step-NUMBER)")
    ] = None,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face folder: weights, config, tokenizer, chat template."""
    from tasks.commands.export import best_checkpoint, find_checkpoint
    from tasks.commands.export import export as export_policy

    run = RunFolder(Path(checkpoint))
    found = best_checkpoint(run) if run.config.is_file() else find_checkpoint(checkpoint)
    if found is None:
        raise BadInput(f"{checkpoint}: neither a checkpoint nor a run folder; expected RUN/checkpoints/step-NUMBER")
    console.print_page(str(export_policy(found, out)))


def service(recipe: Recipe = "", overrides: Set = []) -> None:  # noqa: B006
    """Run a recipe's rollout instances, rewards and weight sync in the foreground, for your own trainer or programs."""
    config = load_config(_named(recipe), overrides)
    from engine.orchestrator.serve import run_service as serve_programs
    from tasks.stages.input_checks import check_inputs, with_model_folder

    config = with_model_folder(check_inputs(config, training=False)[0])
    serve_programs(config, partial(console.say, "service"))


def conform(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="address http://host:port of a running engine that no run uses")
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="the Hugging Face folder that the engine serves (default: the one that it names)"
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(help="of the engine's weights: float32 or bfloat16")] = "float32",
    shared: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder for files of weights that the engine can read (default: temporary)"),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="seconds for each call")] = 60.0,
    only: Annotated[list[str], typer.Option("--only", metavar="RULE", help="only this rule")] = [],  # noqa: B006
) -> None:
    """Try the rules of the rollout protocol on an inference engine, and say which hold. Exit code 0: all rules that a
    run needs hold."""
    from engine.tools.conformance.suite import conform as try_rules

    holds = try_rules(
        url=url,
        model=model,
        dtype=dtype,
        shared=shared,
        timeout_s=timeout_s,
        only=only,
        say=partial(print, flush=True),
    )
    raise typer.Exit(0 if holds else 1)


def deploy(
    recipe: Recipe = "",
    overrides: Set = [],  # noqa: B006
    name: Annotated[
        str, typer.Option(help="for several recipes or teams on one server: deployments and policies of its own")
    ] = "",
    pool: Annotated[str, typer.Option(help="work pool of training and evaluation, of infra/pools/pools.toml")] = "cpu",
    rollout_pool: Annotated[str, typer.Option(help="work pool of rollout instances that join a run")] = "cpu",
    timezone: Annotated[
        str,
        typer.Option(help="time zone of the schedule, e.g. Asia/Shanghai (default: as it was, else UTC)"),
    ] = "",
    schedule: Annotated[
        bool, typer.Option("--schedule", help="train every night at 22:00 (default: the schedule stays as it is)")
    ] = False,
    training: Annotated[str, typer.Option(help="cron line of the nightly training, instead of --schedule")] = "",
    npus: Annotated[
        int, typer.Option(help="NPUs of the cluster: slots of the limit ascend-npus; 0 leaves it as it is")
    ] = 0,
    cuda_devices: Annotated[int, typer.Option(help="the same for CUDA devices: slots of the limit cuda-devices")] = 0,
    cpu_slots: Annotated[int, typer.Option(help="the same for runs on a CPU at a time: cpu-slots")] = 0,
    on_rollout_pool: Annotated[int, typer.Option(help="instances that runs take from the rollout pool by default")] = 0,
    pools: Annotated[
        Path | None, typer.Option(help="file with your own work pools, in the form of infra/pools/pools.toml")
    ] = None,
    notify: Annotated[
        str,
        typer.Option(
            metavar="URL", envvar="METRONOME_NOTIFY", help="webhook for messages about runs; off: no messages any more"
        ),
    ] = "",
    notify_format: Annotated[
        str, typer.Option(help="slack, feishu, dingtalk, wecom or json (default: by the host of --notify)")
    ] = "",
    notify_wait: Annotated[
        float, typer.Option(min=1, help="minutes that a run may wait for a worker without a message")
    ] = 30.0,
) -> None:
    """Update work pools, deployments and alerts on the server of PREFECT_API_URL. Nothing starts automatically
    without --schedule (or a cron line)."""
    recipe = _named(recipe)
    load_config(recipe, overrides)
    from tasks.cluster.deploy import NIGHTLY_TRAINING, Choices
    from tasks.cluster.deploy import deploy_flows as make

    rows = make(
        recipe,
        overrides,
        Choices(
            name=name,
            pool=pool,
            rollout_pool=rollout_pool,
            timezone=timezone,
            training=training or (NIGHTLY_TRAINING if schedule else ""),
            npus=npus,
            cuda_devices=cuda_devices,
            cpu_slots=cpu_slots,
            on_rollout_pool=on_rollout_pool,
            pools=pools,
            notify=notify,
            notify_format=notify_format,
            notify_wait=notify_wait,
        ),
    )
    console.print_table("Deployed", rows)


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="run folders, names, MLflow ids; compared with the first")
    ],
    out: Annotated[Path, typer.Option("--out", help="the page to write")] = Path("compare.html"),
    tracking_uri: Annotated[
        str, typer.Option(help="MLflow store of run ids (default: MLFLOW_TRACKING_URI or runs/)")
    ] = "",
) -> None:
    """Compare runs: curves, wall time and benchmarks with intervals, in a page and a table."""
    from tasks.commands import compare as comparison

    console.print_page(comparison.compare_runs(runs, out, tracking_uri))


def prune(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, or folders of them (runs)")],
    keep_steps: Annotated[
        int, typer.Option(min=0, help="newest steps whose spans, response samples and evaluation tables stay")
    ] = 100,
    records: Annotated[
        bool, typer.Option("--records", help="also the records (train.record) of finished runs")
    ] = False,
    keep_last: Annotated[
        int, typer.Option(min=0, metavar="N", help="whole runs go, but the newest N of each recipe")
    ] = 0,
    younger_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="whole runs go, but those that changed within so many days")
    ] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", help="delete it; otherwise it is only listed")] = False,
) -> None:
    """List what can go from run folders, with sizes, and delete it with --yes. Whole runs, with their checkpoints,
    go only with --keep-last or --younger-than. Runs that are running or needed stay, and so does what MLflow has."""
    from tasks.commands.prune import Retention
    from tasks.commands.prune import prune as prune_runs

    rule = Retention(keep_last, younger_than)
    console.print_page(prune_runs(runs, keep_steps, records, apply=yes, rule=rule))


def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            help=f"TOML file; recipes that ship are found by infra/recipes/NAME.toml. Default: {QUICKSTART}; with "
            "--from the settings of the (first) run"
        ),
    ] = "",
    overrides: Set = [],  # noqa: B006
    runs: Annotated[
        list[str],
        typer.Option("--from", metavar="RUN", help="folder of a run of this recipe; it is measured by its trace"),
    ] = [],  # noqa: B006
    measured: Annotated[
        bool, typer.Option("--measure", help="measure four short runs of the recipe, a few minutes on the quickstart")
    ] = False,
    autotune: Annotated[
        bool, typer.Option("--autotune", help="run the three best for a few steps each, and take the fastest")
    ] = False,
    devices: Annotated[int, typer.Option(help="devices to use (default: as many as the recipe uses)")] = 0,
    device: Annotated[str, typer.Option(help="kind of device: 910b, 910c, a100, h100, h20, h200")] = "",
    lengths: Annotated[
        str, typer.Option(metavar="MEAN,P99", help="without --from: tokens of a response, mean and 99 % quantile")
    ] = "",
    out: Annotated[Path | None, typer.Option("--out", help="write the best settings as a recipe")] = None,
) -> None:
    """Find, by simulation, how to split and configure a run: devices for rollouts and for training, layout, mode."""
    config = load_config(str(Path(runs[0]) / "config.toml") if runs and not recipe else _named(recipe), overrides)
    from tasks.commands.plan import make_plan, measure_probes
    from tasks.stages.input_checks import check_inputs, with_model_folder

    if measured or autotune:
        config = with_model_folder(check_inputs(config)[0])
    make_plan(
        config,
        [*runs, *(measure_probes(config) if measured else [])],
        count=devices,
        kind=device,
        lengths=lengths,
        out=out,
        autotune=autotune,
    )


def doctor(
    device: Annotated[
        bool, typer.Option("--device", help="test the devices too: kernels, transfers, a completion, training steps")
    ] = False,
    only: Annotated[list[str], typer.Option("--only", metavar="PART", help="with --device: only this part")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option("--out", help="with --device: the JSON file of the report")] = None,
    overrides: Set = [],  # noqa: B006
) -> None:
    """Say which versions are installed, whether they fit together, and what is missing; --device tests the machine."""
    from tasks.commands.doctor import FINE, check_devices, check_servers, collect_findings

    if device:
        raise typer.Exit(0 if check_devices(overrides, only, out) else 1)
    if only or out or overrides:
        raise BadInput("--only, --out and --set are for metronome doctor --device")
    lines, healthy = collect_findings()
    servers = check_servers()
    console.print_page("\n".join([*lines, *servers]))
    raise typer.Exit(0 if healthy and all(line.startswith(FINE) for line in servers) else 1)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn errors into one message and an exit code."""
    interruption.catch_signals()
    try:
        yield
    except BadInput as error:
        console.print_error(f"error: {error}")
        raise typer.Exit(2) from None
    except (MetronomeError, console.OutputClosed) as error:
        console.print_error(f"error: {error}{interruption.how_on()}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        interruption.say_told()
        raise typer.Exit(interruption.INTERRUPTED) from None


def _ending_with_code(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def run_command(**given: object) -> None:
        with _exit_codes():
            command(**given)

    return run_command


_KEYS = f"The keys that most recipes set, as --set KEY=VALUE or in a file:\n\n{main_keys()}"
_COMMANDS: tuple[Callable[..., None], ...] = (run, train, evaluate, try_reward, serve, export, service, conform, deploy)
_COMMANDS += (compare, prune, plan, doctor, new_recipe.init)
_COMMANDS += (reports.runs, reports.status, reports.watch, reports.trace, reports.logs)
for _command in _COMMANDS:
    app.command(epilog=_KEYS if _command is run else None)(_ending_with_code(_command))


def main() -> None:
    """Entry point of the console script. When the command ends, for whatever reason, its children end as well."""
    watch_lifeline()
    try:
        app(prog_name="metronome")
    finally:
        drop_lifeline()
        gc.freeze()  # else it takes two seconds to collect the modules of torch and Prefect


if __name__ == "__main__":
    main()
