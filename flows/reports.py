"""Commands that tell about runs: `metronome runs`, `status`, `watch` and `logs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.tools.watch import PORT
from tasks import console

Output = Annotated[Path, typer.Option("--output", help="folder of the runs (run.output)")]
OneRun = Annotated[str, typer.Argument(metavar="[RUN]", help="name or folder of a run (default: the newest)")]


def runs(
    output: Output = Path("runs"),
    count: Annotated[int, typer.Option("--last", min=1, help="number of runs")] = 20,
) -> None:
    """List the newest runs: state, steps, accuracy, champion or why not, resumes, device-hours, place."""
    from tasks.compare import align_columns
    from tasks.run_reports import list_rows

    console.print_page(align_columns(list_rows(output, count)))


def status(run: OneRun = "", output: Output = Path("runs")) -> None:
    """Say how far a run is: stages, step, time left, the sentence of its last failure."""
    from tasks.run_reports import find_folder, status_rows

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
    from tasks.run_reports import find_folder

    folder = find_folder(run, output).path
    serve_page(folder, host, port, lambda address: console.say("watch", f"{folder}: {address}"))


def logs(
    run: OneRun = "",
    output: Output = Path("runs"),
    process: Annotated[str, typer.Option(help="only this process, e.g. trainer")] = "",
    lines: Annotated[int, typer.Option(min=1, help="last lines of each log")] = 50,
    follow: Annotated[bool, typer.Option("--follow", help="go on with new lines until the run has ended")] = False,
) -> None:
    """Print the logs of a run's processes, merged."""
    from tasks.run_reports import find_folder, show_logs

    show_logs(find_folder(run, output), process, lines, follow)
