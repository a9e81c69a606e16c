"""`distgraph inspect`: runs passes on the text of a graph."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from distgraph.cli.pass_table import pass_table
from distgraph.errors import DistGraphError, GraphError
from distgraph.ir.graph import Graph
from distgraph.ir.parser import parse_graph, print_graph
from distgraph.ir.verifier import verify
from distgraph.passes.analysis.conflicts import conflicts, explain
from distgraph.passes.pass_pipeline import PassRun, run_passes
from distgraph.passes.pass_registry import GRAPH_STAGES, find_passes
from distgraph.runtime.schedule.table_report import is_schedule, schedule_report
from distgraph.serialization.documents import MOST_BYTES, decode, read_text


def _list_passes(requested: bool) -> None:
    if requested:
        typer.echo(pass_table())
        raise typer.Exit


def inspect(
    file: Annotated[
        str, typer.Argument(help="File with graph text (.dg) or a schedule; - for standard input.")
    ],
    passes: Annotated[
        str, typer.Option("-p", "--passes", help="Comma-separated names of passes; see --list-passes.")
    ] = "",
    list_passes: Annotated[
        bool,
        typer.Option("--list-passes", callback=_list_passes, is_eager=True, help="Print a table of passes."),
    ] = False,
    print_each: Annotated[
        bool, typer.Option("--print-each", help="Print the graph after each pass.")
    ] = False,
    show_conflicts: Annotated[
        bool,
        typer.Option("--conflicts", help="List competing annotations, with bytes and the cheapest change."),
    ] = False,
    about: Annotated[
        str, typer.Option("--explain", help="Explain the layout of a value: its origin and its consequences.")
    ] = "",
) -> None:
    """Run passes on graph text and print the result as graph text; or verify and print a schedule."""
    where, text = "standard input" if file == "-" else file, _read(file)
    if is_schedule(text):
        if passes or about or show_conflicts:
            raise GraphError(f"{where}: it is a schedule but passes and layouts are those of a graph")
        typer.echo(schedule_report(text, where))
        return
    try:
        graph = verify(parse_graph(text, where))
    except DistGraphError as error:
        message = str(error)
        raise GraphError(message if message.startswith(where) else f"{where}: {message}") from None
    names = _graph_passes(passes)
    completed: list[Graph] = [graph]

    def watch(run: PassRun) -> None:
        typer.echo(f"# {run}")
        if print_each:
            typer.echo(print_graph(run.after), nl=False)
        if run.ran.stage == "completed":
            completed.append(run.after)

    final: Graph = run_passes(graph, names, watch=watch)
    if not (print_each and names):
        typer.echo(print_graph(final), nl=False)
    if show_conflicts:
        _echo_commented(
            [str(conflict) for conflict in conflicts(completed[-1])] or ["no annotations compete"]
        )
    if about:
        _echo_commented([explain(completed[-1], about)])


def _graph_passes(text: str) -> list[str]:
    """Names of passes. Raises GraphError if there is no such pass, or its result is not a graph."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for each in find_passes(names):
        if each.stage not in GRAPH_STAGES:
            raise GraphError(
                f"pass {each.name} gives no graph but inspect prints graphs; end with the pass before it"
            )
    return names


def _read(file: str) -> str:
    if file != "-":
        return read_text(file, GraphError)
    return decode(sys.stdin.buffer.read(MOST_BYTES + 1), "standard input", GraphError)


def _echo_commented(texts: list[str]) -> None:
    for text in texts:
        typer.echo("\n".join(f"# {line}" for line in text.split("\n")))
