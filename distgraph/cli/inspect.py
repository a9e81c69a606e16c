"""`distgraph inspect`: passes on the text of a graph."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from distgraph.errors import DistGraphError, GraphError
from distgraph.ir.graph import Graph
from distgraph.ir.parser import parse_graph, print_graph
from distgraph.passes.analysis.conflicts import conflicts, explain
from distgraph.passes.pass_pipeline import PASSES, Ran, run_passes
from distgraph.serialization.documents import MOST_BYTES, decode, read_text
from distgraph.verifier import verify


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
    completed: list[Graph] = [graph]

    def watch(ran: Ran) -> None:
        typer.echo(f"# {ran}")
        if print_each:
            typer.echo(print_graph(ran.after), nl=False)
        if PASSES[ran.name].gives == "completed":
            completed.append(ran.after)

    final = run_passes(graph, names, watch)
    if not (print_each and names):
        typer.echo(print_graph(final), nl=False)
    if show_conflicts:
        _echo_commented(
            [str(conflict) for conflict in conflicts(completed[-1])] or ["no annotations compete"]
        )
    if about:
        _echo_commented([explain(completed[-1], about)])


def _read(file: str) -> str:
    if file != "-":
        return read_text(file, GraphError)
    return decode(sys.stdin.buffer.read(MOST_BYTES + 1), "standard input", GraphError)


def _echo_commented(texts: list[str]) -> None:
    for text in texts:
        typer.echo("\n".join(f"# {line}" for line in text.split("\n")))
