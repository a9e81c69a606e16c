"""Bytes that one rank sends: annotated programs completed by distgraph beside XLA's two partitioners.

    python benchmarks/comm_bytes.py [FILE] [--only REGEX] [--check] [--refine always|conflicts|never]
                                    [--print] [--json OUT]

FILE (default `data/gspmd_comm.json`) names programs of `communication_programs` with the mesh, the shape,
dtype and layout of every argument, and the layout of the results (none = the partitioner chooses, but no
result stays a pending sum). All given layouts are pinned. Ours = the largest number of bytes that a rank
sends in one step under ring algorithms, as the rank programs say; XLA = the smaller of Shardy and GSPMD, an
all-reduce whose users only slice it counted as reduce-scatter (XLA on CPU forms none by itself). An
all-reduce costs 2(g-1)/g of its bytes, all-gather, reduce-scatter and all-to-all (g-1)/g of the whole, a
permute its block.

`--refine` is that of `Strategy`: by default layouts without annotations are searched ("always").

`--check` also runs every program on in-process ranks with random numbers and compares all results with the
serial interpretation: a layout that saves bytes but computes something else does not count. Where rounding in
fp32 turns a gate over (relu, argmax) fp64 decides.

Changes, with the cases above XLA by more than 1 % (of 139) and what all cases send together:

* completion alone: conflicts left where claims meet, 10 of the first 49 cases above.
* borders moved (`passes/layout_local_search.py`): 5 above, 67 below. ZeRO-3 GPT 2.4 times: pinned gradients
beat the ids.
* gradients rank with parameters; every policy of completion refined, the cheapest kept: 4 above. No policy is
  best: ZeRO-3 GPT 0.63 / 2.4 (data first / weights first), sequence-parallel MLP 4.0 / 0.8. 536 MB.
* a flood follows a value reader by reader (it stopped at every value with two readers): 503 MB; it may start
  with a move that leaves the border's own cost as it is: 439 MB (GPT tp 0.91 to 0.69).
* no gradient through integers (argmax of a router): MoE with tokens on both axes 1.03 to 0.95.
* a contraction with an annotated result may be computed in fewer parts: nothing here; a wide result from a
  narrow contraction, replicated, 6.2 to 1.0.
* neighbours exchange what a shift or a window needs. Left: reversal of a split dim (GSPMD renumbers devices).
* an op may be computed on its ranks in another order: the reversal sends 0 bytes (294,912 before); halos are
  counted with the value that they are read from: the slice 0.33 of XLA (0.5). None above, 75 below.
* completion alone tries the last of equal claims too: 6 above (12), products whose operands compete.
* the cheapest completion is searched from by default where claims are lost or a rank order saves bytes: none.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of the package `benchmarks`
from benchmarks.support.communication_programs import HEADS, SETTING, Setting, leaves, program_of
from distgraph.errors import DistGraphError
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.choose_completion import choose_completion
from distgraph.passes.complete import complete
from distgraph.plan.strategy import REFINE
from distgraph.runtime.execute.process_group import InProcessWorld
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.program.build import Build, build
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

DATA = Path(__file__).resolve().parent / "support" / "data" / "gspmd_comm.json"
CREDITED = "wire_if_allreduce_slice_were_reduce_scatter"
MARGIN = 0.01  # bytes within this share of XLA's count as equal
TOLERANCE = 2e-4  # of the largest result element, fp32 sums in another order


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its path in the arguments, global shape, dtype, and axes (or None) a dim."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: ShardSpec

    @property
    def name(self) -> str:
        """The path as an identifier."""
        return "_".join(("arg", *map(str, self.path)))

    @property
    def kind(self) -> str:
        """What the program declares: arrays in dicts are parameters or moments, bare arrays are data."""
        return "input" if len(self.path) == 1 else "param" if self.path[0] == 0 else "state"


@dataclass(frozen=True, slots=True)
class Case:
    """One annotated program and what XLA sends for it (bytes)."""

    name: str
    mesh: ProcessMesh
    arguments: tuple[Argument, ...]
    out_specs: tuple[tuple[Any, ...], ...] | None
    heads: int
    xla: float


@dataclass(frozen=True, slots=True)
class Result:
    """What completion and partition made of a case.

    Attributes:
        ours: bytes that the busiest rank sends.
        seconds: of completion alone, and of completion with the search over borders.
        error: largest relative error against the serial program; nan where it was not checked.
    """

    case: Case
    build: Build
    traced: Graph
    ours: float
    seconds: tuple[float, float]
    error: float

    @property
    def ratio(self) -> float:
        """Ours over XLA's; 1 when neither sends anything."""
        if self.ours == self.case.xla:
            return 1.0
        return self.ours / self.case.xla if self.case.xla else float("inf")


def read_cases(path: Path) -> list[Case]:
    """The cases of a file. Raises SystemExit when it does not have the format."""
    try:
        return [_case(record) for record in json.loads(path.read_text())["cases"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no file of cases: {type(error).__name__} {error}") from None


def _case(record: Mapping[str, Any]) -> Case:
    mesh = ProcessMesh.grid(**record["mesh"])
    outs = record["out_specs"]
    heads = re.search(r"'heads': (\d+)", record.get("note", ""))
    return Case(
        record["case"],
        mesh,
        tuple(_argument(a) for a in record["args"]),
        None if outs is None else tuple(tuple(spec) for spec in outs),
        int(heads[1]) if heads else HEADS,
        min(float(found[CREDITED]) for found in record["xla_bytes"].values()),
    )


def _argument(record: Mapping[str, Any]) -> Argument:
    keys = re.findall(r"\['([^']*)'\]|\[(\d+)\]", record["name"])
    path = tuple(key or int(number) for key, number in keys)
    shape = tuple(record["shape"])
    return Argument(path, shape, str(np.dtype(record["dtype"])), spec_of(record["spec"], len(shape)))


def spec_of(dims: Sequence[Any], ndim: int) -> ShardSpec:
    """A layout whose last dims may be left out."""
    return ShardSpec.of([*dims, *[None] * (ndim - len(dims))])


def trace_case(case: Case) -> Graph:
    """The annotated serial graph of a case."""
    trace = Trace(re.sub(r"\W", "_", case.name))
    token = SETTING.set(Setting(case.mesh, case.heads))
    try:
        with trace.activate():
            tensors = [_source(trace, case.mesh, a) for a in case.arguments]
            results = leaves(program_of(case.name)(*nested([a.path for a in case.arguments], tensors)))
            if case.out_specs is not None:
                pairs = zip(results, case.out_specs, strict=True)
                results = [_pin(trace, case.mesh, t, spec) for t, spec in pairs]
    finally:
        SETTING.reset(token)
    return trace.finish({f"out{i}": t for i, t in enumerate(results)})


def _source(trace: Trace, mesh: ProcessMesh, argument: Argument) -> Tensor:
    tensor = trace.source(argument.kind, argument.name, argument.shape, argument.dtype)
    trace.annotate(tensor.value, DistAttr(mesh, argument.spec, Origin("user", argument.name)))
    return tensor


def _pin(trace: Trace, mesh: ProcessMesh, tensor: Tensor, dims: Sequence[Any]) -> Tensor:
    """The result in its given layout: pinned itself, or a moved copy where its layout is given already."""
    attr = DistAttr(mesh, spec_of(dims, tensor.ndim), Origin("user", "result"))
    if tensor.value.name in trace.attrs:
        with trace.on(mesh):
            (tensor,) = trace.emit("reshard", (tensor,))
    trace.annotate(tensor.value, attr)
    return tensor


def nested(paths: Sequence[tuple[Any, ...]], values: Sequence[Any]) -> list[Any]:
    """Values in dicts and lists by their paths: `(0, "w")` is `result[0]["w"]`."""
    root: dict[Any, Any] = {}
    for path, value in zip(paths, values, strict=True):
        at = root
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return list(_lists(root))


def _lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if all(isinstance(key, int) for key in tree):
        return [_lists(tree[key]) for key in sorted(tree)]
    return {key: _lists(part) for key, part in tree.items()}


def measure(case: Case, *, refine: str = "always", check: bool = False) -> Result:
    """Complete, partition and count one case; `refine` is that of `Strategy`.

    Raises AssertionError when a result is left partial.
    """
    traced = trace_case(case)
    start = time.perf_counter()
    graph = complete(traced, case.mesh)
    middle = time.perf_counter()
    if refine != "never":
        graph = choose_completion(traced, case.mesh, search=refine == "always")
    end = time.perf_counter()
    built = build(graph)
    for label, value in built.lowered.outputs:
        spec = built.lowered.attrs[value.name].spec
        if spec.partial:
            raise AssertionError(f"{case.name}: result {label} is left as {spec}")
    ours = max(built.program(rank).bytes_sent() for rank in built.ranks)
    error = largest_error(case, traced, built) if check else float("nan")
    if error > TOLERANCE and widened(case) != case:
        # a gate (relu, argmax) may turn over within the rounding of fp32; in fp64 a wrong layout stays wrong
        error = measure(widened(case), refine=refine, check=True).error
    return Result(case, built, traced, ours, (middle - start, end - middle), error)


def largest_error(case: Case, traced: Graph, built: Build) -> float:
    """Largest difference between partitioned and serial results, relative to the largest element of each."""
    arrays = draw(case)
    expected, _ = interpret(traced, arrays, arrays)
    lowered = built.lowered

    def blocks(rank: int, *kinds: str) -> dict[str, Any]:
        found = {}
        for op in lowered.sources(*kinds):
            attr, name = lowered.attrs[op.name], str(op.attrs["name"])
            block = arrays[name][attr.spec.slices(op.result.shape, attr.mesh, rank)]
            found[name if kinds == ("input",) else op.name] = np.array(block, order="C")
        return found

    world = InProcessWorld(len(built.ranks))

    def step(rank: int) -> dict[str, Any]:
        feeds = {name: [block] for name, block in blocks(rank, "input").items()}
        sources = blocks(rank, "param", "state")
        worker = Worker(built.program(rank), built.schedule, world.transport(rank), np, sources)
        return {label: np.array(block) for label, block in worker.step(feeds).items()}

    worst = 0.0
    for rank, found in world.run(step).items():
        for label, value in lowered.outputs:
            attr = lowered.attrs[value.name]
            whole = expected[label]
            block = whole[attr.spec.slices(value.shape, attr.mesh, rank)]
            if block.shape != found[label].shape:
                raise AssertionError(
                    f"{case.name}: {label} on rank {rank} is {found[label].shape}, not {block.shape}"
                )
            if block.size:
                scale = max(float(np.abs(whole).max()), 1e-30) if is_float(value.dtype) else 1.0
                worst = max(
                    worst, float(np.abs(found[label].astype("f8") - block.astype("f8")).max()) / scale
                )
    return worst


def widened(case: Case) -> Case:
    """The same program on fp64 numbers."""
    wide = {"float32": "float64"}
    return replace(
        case, arguments=tuple(replace(a, dtype=wide.get(a.dtype, a.dtype)) for a in case.arguments)
    )


def draw(case: Case, seed: int = 0) -> dict[str, Any]:
    """Random arguments: weights and data of usual scale, positions inside the table that they index."""
    rng = np.random.default_rng(seed)
    table = next((a for a in case.arguments if a.path[-1] == "wte"), case.arguments[0])
    found = {}
    for a in case.arguments:
        if np.issubdtype(np.dtype(a.dtype), np.integer):
            found[a.name] = rng.integers(0, table.shape[0], a.shape).astype(a.dtype)
        else:
            data = rng.standard_normal(a.shape) * (1.0 if len(a.path) == 1 else 0.05)
            moment = len(a.path) == 3 and a.path[0] == 2  # second moments of Adam are not negative
            found[a.name] = (np.abs(data) if moment else data).astype(a.dtype)
    return found


def show(built: Build) -> Iterator[str]:
    """The lowered graph, an op a line."""
    for op in built.lowered.ops:
        for value in op.results:
            spec = built.lowered.attrs[value.name].spec
            operands = ", ".join(f"%{v.name}" for v in op.operands)
            yield f"%{value.name} : {value.type} {spec} = {op.kind}({operands})  # {op.role} {op.layout}"


def main() -> int:
    options = parse()
    cases = [c for c in read_cases(options.file) if re.search(options.only, c.name)]
    results, failed = [], []
    table = Table(
        "case",
        "ranks",
        "ours",
        "xla",
        "ratio",
        "complete s",
        "search s",
        *(["error"] if options.check else []),
    )
    for case in cases:
        try:
            result = measure(case, refine=options.refine, check=options.check)
        except (DistGraphError, AssertionError, KeyError, ArithmeticError, ValueError, TypeError) as error:
            if options.stop:
                raise
            failed.append((case.name, f"{type(error).__name__}: {error}"))
            continue
        results.append(result)
        if options.print:
            print("\n".join(show(result.build)))
        table.add_row(*row(result, options.check))
    console = Console(width=120)
    console.print(table)
    for name, why in failed:
        console.print(f"FAILED {name}: {why}", markup=False, style="red")
    figures = summary(results, failed)
    wrong = [r.case.name for r in results if r.error > TOLERANCE]
    console.print(
        f"worse {figures['worse']}  better {figures['better']}  of {len(results)}, failed {len(failed)}"
    )
    if wrong:
        console.print(f"WRONG RESULTS: {', '.join(wrong)}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if failed or wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=DATA)
    parser.add_argument("--only", default="", help="regular expression of case names")
    parser.add_argument(
        "--check", action="store_true", help="run every program and compare with the serial one"
    )
    parser.add_argument("--refine", choices=REFINE, default="always", help="as of Strategy")
    parser.add_argument("--print", action="store_true", help="the lowered graph of every case")
    parser.add_argument("--stop", action="store_true", help="raise at the first case that fails")
    parser.add_argument("--quick", action="store_true", help="accepted for uniformity; the full run is quick")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def row(result: Result, check: bool) -> list[str]:
    """Cells of one case."""
    colour = "red" if result.ratio > 1 + MARGIN else "green" if result.ratio < 1 - MARGIN else "default"
    cells = [result.case.name, str(result.case.mesh.size), f"{result.ours:,.0f}", f"{result.case.xla:,.0f}"]
    cells += [f"[{colour}]{result.ratio:.3f}[/]", *(f"{s:.2f}" for s in result.seconds)]
    return [*cells, f"{result.error:.1e}"] if check else cells


def summary(results: Sequence[Result], failed: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The figures: bytes a case, and how many cases are worse or better than XLA by more than the margin."""
    cases = [
        {
            "case": r.case.name,
            "ranks": r.case.mesh.size,
            "ours": r.ours,
            "xla": r.case.xla,
            "complete_seconds": r.seconds[0],
            "search_seconds": r.seconds[1],
            **({} if np.isnan(r.error) else {"relative_error": r.error}),
        }
        for r in results
    ]
    return {
        "cases": cases,
        "worse": sum(r.ratio > 1 + MARGIN for r in results),
        "better": sum(r.ratio < 1 - MARGIN for r in results),
        "failed": [{"case": name, "error": why} for name, why in failed],
    }


if __name__ == "__main__":
    sys.exit(main())
