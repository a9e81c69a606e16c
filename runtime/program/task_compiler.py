"""A task as compiled Python: its source is generated (`codegen`), kept for tracebacks, and executed."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

from distgraph.passes.partition import LocalTask, RankProgram
from distgraph.runtime.program.code_cache import shared_code
from distgraph.runtime.program.codegen import Writer
from distgraph.runtime.program.compiled_task import Arena, CompiledTask
from distgraph.runtime.program.identifiers import commented
from distgraph.runtime.program.storage import Storage
from distgraph.runtime.transport.transport import Transport

_FILE = "<distgraph rank"
WriterType = Callable[[RankProgram, Storage, Arena, Transport | None, Any], Writer]


def compile_task(
    task: LocalTask,
    program: RankProgram,
    storage: Storage,
    arena: Arena,
    transport: Transport | None,
    xp: Any,
    writer_type: WriterType = Writer,
) -> CompiledTask:
    """Generate and compile the three functions of a task."""
    writer = writer_type(program, storage, arena, transport, xp)
    names = {suffix: writer.identifiers.once(f"{task.name}_{suffix}") for suffix in ("post", "body", "last")}
    parts = [f"# task {commented(task.name)} of rank {program.rank}"]
    repeated = task.per_micro and program.graph.micro_batches > 1  # otherwise every run is the last one
    for suffix, lines in (
        ("post", writer.post(task)),
        *([("body", writer.function(task, last=False))] if repeated else []),
        ("last", writer.function(task, last=True)),
    ):
        parts.append(f"def {names[suffix]}(m):\n" + "\n".join(lines))
    source = "\n\n\n".join(parts + writer.called) + "\n"
    filename = f"{_FILE} {program.rank} {commented(task.name)}>"
    # tracebacks show the lines of the source
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(shared_code(program.parts, source, filename), writer.bound)
    last = writer.bound[names["last"]]
    post, body = writer.bound[names["post"]], writer.bound.get(names["body"], last)
    return CompiledTask(task.name, post, body, last, source, writer.bound)


def is_of_task(error: BaseException) -> bool:
    """Whether the line that raised an error is one of a generated task, such as a call of NumPy."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_filename.startswith(_FILE)


def op_of(error: BaseException) -> tuple[str, str]:
    """The rank and task in whose source an error was raised, and the op as the comment of the line describes
    it; empty outside of generated tasks."""
    rank, op, place = "", "", error.__traceback__
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if name.startswith(_FILE):
            rank = name.removeprefix("<distgraph ").removesuffix(">")
            op = linecache.getline(name, place.tb_lineno).rpartition("# ")[2]
        place = place.tb_next
    return rank, re.sub(r"\s+", " ", op).strip()
