"""Command line: `distgraph run`, `check`, `plan`, `export`, `forecast`, `inspect`, `profile`, `cluster`,
`checkpoint`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from distgraph import __version__
from distgraph.cli.checkpoint import app as checkpoint_app
from distgraph.engine.commands.inspection import check_script
from distgraph.engine.commands.overrides import CLUSTER_VARIABLE, VARIABLE, giving
from distgraph.engine.commands.plan_search import Progress, SearchOptions
from distgraph.engine.commands.propose import forecast_script, plan_script
from distgraph.engine.compile.program_forecast import beforehand
from distgraph.engine.host_overhead import overheads
from distgraph.errors import DistGraphError, GraphError
from distgraph.ir.graph import Graph
from distgraph.ir.parser import parse_graph, print_graph
from distgraph.passes.analysis.conflicts import conflicts, explain
from distgraph.passes.pass_pipeline import PASSES, Ran, run_passes
from distgraph.plan.export import EXPORTERS
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import MODES
from distgraph.resources import describe, load_cluster, shipped_clusters
from distgraph.runtime.launch.launch import launch
from distgraph.runtime.profile.profiler import Request
from distgraph.runtime.profile.profiler import profile as run_profile
from distgraph.serialization.atomic_files import check_writable
from distgraph.serialization.documents import MOST_BYTES, decode, read_text
from distgraph.verifier import verify

app = typer.Typer(
    name="distgraph",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint_app)
_PLAN = typer.Option("--plan", help="Plan file, see distgraph plan; also behind the script.")
_CLUSTER = typer.Option(
    "--cluster", help="Resource file or shipped name that prices changes of layout; also behind the script."
)
_PASS_ON = {"allow_interspersed_args": False}  # options after the script are the script's


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"distgraph {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Distributed training programs from serial ones."""


@app.command(context_settings=_PASS_ON)
def run(
    script: Annotated[str, typer.Argument(help="Python script.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", help="How many ranks; 1, or as many as the plan has, by default.")
    ] = None,
    plan: Annotated[str, _PLAN] = "",
    cluster: Annotated[str, _CLUSTER] = "",
) -> None:
    """Run a script on N MPI ranks of this machine."""
    if ranks is None:
        _refuse("run", "-n", script, args)
    (plan, cluster), left = _taken({"--plan": plan, "--cluster": cluster}, args)
    needed, env = 1, dict(os.environ)
    if cluster:
        load_cluster(cluster)  # its mistakes are told here, once
        env[CLUSTER_VARIABLE] = str(Path(cluster).resolve()) if Path(cluster).is_file() else cluster
    if plan:
        needed, env[VARIABLE] = max(Plan.load(plan).ranks) + 1, str(Path(plan).resolve())
        if ranks is not None and ranks < needed:
            raise GraphError(f"run: plan {plan} needs {needed} ranks but -n is {ranks}; leave out -n")
    raise typer.Exit(launch(needed if ranks is None else ranks, [script, *left], env=env))


@app.command(context_settings=_PASS_ON)
def check(
    script: Annotated[str, typer.Argument(help="Python script that trains with an Engine.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="At most so many samples; 0: a whole micro-batch.")] = 0,
    plan: Annotated[str, _PLAN] = "",
    cluster: Annotated[str, _CLUSTER] = "",
) -> None:
    """Compare partitioned with serial on the first batch of a script, value by value."""
    if not samples:
        _refuse("check", "--samples", script, args)
    (plan, cluster), left = _taken({"--plan": plan, "--cluster": cluster}, args)
    with giving(Plan.load(plan) if plan else None, load_cluster(cluster) if cluster else None):
        report = check_script(script, left, samples)
    typer.echo(report)
    raise typer.Exit(0 if report.ok else 1)


@app.command(context_settings={"ignore_unknown_options": True})
def plan(
    script: Annotated[str, typer.Argument(help="Python script that trains with an Engine.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments; after -- all of them.")] = None,
    cluster: Annotated[
        str,
        typer.Option("--cluster", help="Resource file or shipped name; else that of the script's engine."),
    ] = "",
    output: Annotated[str, typer.Option("-o", "--output", help="Write the plan to this file.")] = "",
    mode: Annotated[str, typer.Option("--mode", help=f"One of {', '.join(MODES)}.")] = "auto",
    seconds: Annotated[float, typer.Option("--seconds", help="Search so long at most.")] = 60.0,
    about: Annotated[
        str, typer.Option("--explain", help="A tensor, layer or decision: why, and what else it could be.")
    ] = "",
    other: Annotated[str, typer.Option("--compare", help="Another plan file: what differs.")] = "",
) -> None:
    """Search the best plan for a script on a cluster that need not be there; Ctrl-C keeps the best so far."""
    beside = Plan.load(other) if other else None
    if output:
        check_writable(output, GraphError)
    with Console(stderr=True).status("tracing") as status:

        def watch(progress: Progress) -> None:
            status.update(str(progress))

        options = SearchOptions(mode=mode, seconds=seconds, watch=watch)
        found = plan_script(script, args or (), cluster or None, options)
    if output:
        found.save(output)
    typer.echo(found)
    if about:
        typer.echo(found.explain(about))
    if beside is not None:
        typer.echo(found.compare(beside))


@app.command()
def export(
    plan: Annotated[str, typer.Argument(help="Plan file, see distgraph plan.")],
    framework: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPORTERS)}.")],
    output: Annotated[
        str, typer.Option("-o", "--output", help="Write to this file; a name in .json gets the data.")
    ] = "",
) -> None:
    """Say a plan in the terms of another framework; what that does not express goes to stderr."""
    found = Plan.load(plan).export(framework)
    if output:
        found.save(output)
    else:
        typer.echo(found.source, nl=False)
    for note in found.notes:
        typer.echo(f"not expressed: {note}", err=True)


@app.command(context_settings={"ignore_unknown_options": True})
def forecast(
    script: Annotated[str, typer.Argument(help="Python script that trains with an Engine.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments; after -- all of them.")] = None,
    cluster: Annotated[
        str,
        typer.Option("--cluster", help="Resource file or shipped name; else that of the script's engine."),
    ] = "",
    plan: Annotated[str, _PLAN] = "",
    html: Annotated[str, typer.Option("--html", help="Write a report: one page, no network.")] = "",
    trace: Annotated[str, typer.Option("--trace", help="Write a Chrome trace, for ui.perfetto.dev.")] = "",
    measured: Annotated[
        str,
        typer.Option("--measured", help="Timeline file of callbacks.Timeline, shown beside the forecast."),
    ] = "",
) -> None:
    """Forecast a step of a script: seconds and memory on a cluster that need not be there. Nothing runs."""
    timeline = beforehand(html or None, measured or None)
    with giving(Plan.load(plan) if plan else None):
        found = forecast_script(script, args or (), cluster or None)
    typer.echo(found)
    found.write(html or None, trace or None, timeline)


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(help="Graph text (.dg), - for standard input.")],
    passes: Annotated[
        str, typer.Option("-p", "--passes", help=f"Of {', '.join(PASSES)}; commas between.")
    ] = "",
    print_each: Annotated[
        bool, typer.Option("--print-each", help="Print the graph after each pass.")
    ] = False,
    show_conflicts: Annotated[
        bool,
        typer.Option("--conflicts", help="Annotations that compete, with bytes and the cheapest change."),
    ] = False,
    about: Annotated[
        str, typer.Option("--explain", help="A value: who decided its layout, what follows.")
    ] = "",
) -> None:
    """Run passes on a graph text and print the result; the output is graph text again."""
    where = "standard input" if file == "-" else file
    try:
        graph = verify(parse_graph(_read(file), where))
    except DistGraphError as error:
        message = str(error)
        raise GraphError(message if message.startswith(where) else f"{where}: {message}") from None
    names = [name.strip() for name in passes.split(",") if name.strip()]
    seen: list[Graph] = [graph]

    def watch(ran: Ran) -> None:
        typer.echo(f"# {ran}")
        if print_each:
            typer.echo(print_graph(ran.after), nl=False)
        if PASSES[ran.name].gives == "completed":
            seen.append(ran.after)

    final = run_passes(graph, names, watch)
    if not (print_each and names):
        typer.echo(print_graph(final), nl=False)
    if show_conflicts:
        _echo_commented([str(found) for found in conflicts(seen[-1])] or ["no annotations compete"])
    if about:
        _echo_commented([explain(seen[-1], about)])


@app.command()
def profile(
    output: Annotated[str, typer.Option("-o", "--output", help="Resource file to write.")],
    ranks: Annotated[int, typer.Option("-n", min=1, help="How many ranks, one a device.")] = 1,
    source: Annotated[
        str, typer.Option("--cluster", help="Resource file to measure anew; without it, this machine.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="Measure so long at most.")] = 120.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier measurements.")] = False,
) -> None:
    """Measure this machine, or those of the job, and write a resource file with the error of every fit."""
    raise typer.Exit(run_profile(Request(output, source, ranks, seconds, fresh=fresh), overheads))


@app.command()
def cluster(
    name: Annotated[str, typer.Argument(help="Shipped name, resource file, or Paddle's JSON.")] = "",
) -> None:
    """Check a resource file and print the cluster; without a name, list those that are shipped."""
    if name:
        typer.echo(describe(load_cluster(name)))
        return
    for shipped in shipped_clusters():
        typer.echo(describe(load_cluster(shipped)).partition("\n")[0])


def _refuse(command: str, option: str, script: str, args: list[str] | None) -> None:
    """Ours behind the script and nowhere else: a slip, unless -- says that it is the script's.

    Raises:
        GraphError: the option is there, as `-n 2`, `-n2` or `-n=2`.
    """
    ours, _ = _ours(args)
    for position, word in enumerate(ours):
        if not re.fullmatch(rf"{option}(=.*|\d+)?", word):
            continue
        said = " ".join(ours[position : position + 1 + (word == option)])
        raise GraphError(
            f"{command}: {said} stands behind {script}, where options are the script's; write distgraph "
            f"{command} {said} {script}, or, if it is the script's, distgraph {command} {script} -- {said}"
        )


def _taken(given: Mapping[str, str], args: list[str] | None) -> tuple[list[str], list[str]]:
    """Options that stand behind the script are ours too; what follows -- is the script's alone.

    Args:
        given: option -> its value where it stood before the script, else "".

    Returns: the values in the same order, and what is left for the script.
    """
    ours, rest = _ours(args)
    found = dict(given)
    for option in given:
        for position, word in enumerate(ours):
            if word.startswith(f"{option}="):
                found[option], ours[position : position + 1] = word.removeprefix(f"{option}="), []
                break
            if word == option and position + 1 < len(ours):
                found[option], ours[position : position + 2] = ours[position + 1], []
                break
    return list(found.values()), [*ours, *rest]


def _ours(args: list[str] | None) -> tuple[list[str], list[str]]:
    """Arguments before and after the first --, which is ours too."""
    words = list(args or ())
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _read(file: str) -> str:
    if file != "-":
        return read_text(file, GraphError)
    return decode(sys.stdin.buffer.read(MOST_BYTES + 1), "standard input", GraphError)


def _echo_commented(texts: list[str]) -> None:
    for text in texts:
        typer.echo("\n".join(f"# {line}" for line in text.split("\n")))


def main() -> None:
    """Entry point; a user's mistake is one message and exit code 1."""
    try:
        app()
    except DistGraphError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
