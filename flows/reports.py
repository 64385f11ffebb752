"""Commands that tell about runs: `metronome runs`, `status`, `watch`, `trace` and `logs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.errors import BadInput
from engine.tools.watch import PORT
from tasks.terminal import console

Output = Annotated[Path, typer.Option("--output", help="folder of the runs (run.output)")]
OneRun = Annotated[str, typer.Argument(metavar="[RUN]", help="name or folder of a run (default: the newest)")]


def runs(
    output: Output = Path("runs"),
    count: Annotated[int, typer.Option("--last", min=1, help="number of runs")] = 20,
) -> None:
    """List the newest runs: state, steps, accuracy, champion or why not, resumes, device-hours, place."""
    from tasks.commands.compare import align_columns
    from tasks.commands.run_reports import list_rows

    console.print_page(align_columns(list_rows(output, count)))


def status(run: OneRun = "", output: Output = Path("runs")) -> None:
    """Say how far a run is: stages, step, time left, the sentence of its last failure."""
    from tasks.commands.run_reports import find_folder, status_rows

    folder = find_folder(run, output)
    console.print_table(f"Run {folder.path.name}", status_rows(folder))


def watch(
    run: OneRun = "",
    output: Output = Path("runs"),
    host: Annotated[
        str, typer.Option(help="address to listen on; any but loopback needs METRONOME_TOKEN")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free one")] = PORT,
) -> None:
    """Show a run on a page that follows it: curves, timeline, pool, conversations, warnings."""
    from engine.tools.watch.server import serve_page
    from tasks.commands.run_reports import find_folder

    folder = find_folder(run, output).path
    serve_page(folder, host=host, port=port, say=lambda address: console.say("watch", f"{folder}: {address}"))


def trace(
    run: OneRun = "",
    output: Output = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="file to write, gzipped with .gz (default: RUN/trace.json.gz)",
        ),
    ] = None,
    steps: Annotated[str, typer.Option(metavar="FIRST:LAST", help="only these steps, e.g. 10:19 (default: all)")] = "",
) -> None:
    """Write what every process of a run did as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    from engine.tools.trace_events import write_trace
    from tasks.commands.run_reports import find_folder

    first, colon, last = steps.partition(":")
    if steps and not (colon and first.isdigit() and last.isdigit()):
        raise BadInput(f"--steps {steps}: expected FIRST:LAST, for example 10:19")
    wanted = range(int(first), int(last) + 1) if steps else None
    folder = find_folder(run, output).path
    target = out or folder / "trace.json.gz"
    written = write_trace(folder, target, wanted)
    profiled = f" and {written.profiled:,} events of profiles" if written.profiled else ""
    console.print_page(
        f"{target}: {written.spans:,} spans{profiled}; open it at ui.perfetto.dev, which keeps it in the browser"
    )
    for file in written.left_out:
        console.print_page(f"{file} is too large to be put in; open it by itself")


def logs(
    run: OneRun = "",
    output: Output = Path("runs"),
    process: Annotated[str, typer.Option(help="only this process, e.g. trainer")] = "",
    lines: Annotated[int, typer.Option(min=1, help="last lines of each log")] = 50,
    follow: Annotated[bool, typer.Option("--follow", help="go on with new lines until the run has ended")] = False,
) -> None:
    """Print the logs of a run's processes, merged."""
    from tasks.commands.run_reports import find_folder, show_logs

    show_logs(find_folder(run, output), process, lines, follow)
