"""Files of every kind that distgraph reads, seeded damage to them, and what each reader must do with it.

A reader either refuses a file with a house error that names the file, or what it reads can be used: it is
described, printed, priced, exported, each of which may in turn end in a house error only. What it reads must
say all that the file says: a changed value that makes no difference is a silent acceptance.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from support.programs.plan_cases import CASES

from benchmarks.support.iopddl_reader import read_contest
from distgraph.errors import DistGraphError
from distgraph.ir.parser import parse_graph, print_graph
from distgraph.ir.verifier import verify
from distgraph.passes.search.intra_op.solution_cache import Cache, digest
from distgraph.passes.search.solver.problem import Problem, Solution, Use
from distgraph.plan.plan import Plan
from distgraph.resources import CollectiveCost, describe, load_cluster
from distgraph.resources.schema import check
from distgraph.runtime.execute.measured_timeline import (
    MeasuredMessage,
    MeasuredRank,
    MeasuredRun,
    MeasuredStep,
    MeasuredTimeline,
)
from distgraph.runtime.profile.evaluation import evaluate
from distgraph.runtime.profile.profiler import Request, Store
from distgraph.runtime.report.chrome_trace import measured_events

ROOT = Path(__file__).parents[2]
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**18, 10**30, 10**39, -(2**63), 0.5, -0.0, 1e-300, 1e300,
    "", " ", "x", "\0", "\n", "\u03bc\u202e", "0-999999999", "9-0", "-1", "{0..999999999}", "9" * 5000,
    "a" * 20_000, "1e999 GB", "0 s", "nan", "inf", "[dp, dp] @0", "[_, tp] @9", "../../etc/passwd", [], {},
    [[]], {"": None}, [0] * 2000, {"x": {}}, DEEP,
)  # fmt: skip
TOKENS = (
    "NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-1", "0", "null", "true", "{", "}", "[", "]", ":",
    ",", '"', "'", "#", "&a", "*a", "<<: *a", "!!python/object:os.system", "---", "\0", "\x1b[31m", "\ufeff",
    "0..999999999", "0-999999999", '"a": 1, "a": 2,', "%", "@", "[" * 200, "\n", "\r", "\u2028", "\u03bc",
)  # fmt: skip
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]", re.ASCII)


@dataclass(frozen=True)
class Sample:
    """A whole file.

    Attributes:
        name: of the kind of file.
        file: name under which it is written.
        text: what is in it.
        read: reads the file and uses it; gives what it says, for comparison.
        loose: keys that a reader need not keep, such as a line for people; of a foreign format all ("*"), as
            it says more than distgraph reads.
        structured: whether it is JSON or YAML.
        meaning: of plain data, equal where only the spelling differs, as of `0.9 us` and `.9 us`.
    """

    name: str
    file: str
    text: str
    read: Callable[[Path], Any]
    loose: tuple[str, ...] = ()
    structured: bool = True
    meaning: Callable[[Any], Any] = lambda data: data


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def original(sample: Sample) -> Any:
    """Plain data of a whole sample; not to be changed."""
    return document_of(sample, sample.text)


def document_of(sample: Sample, text: str) -> Any:
    """Plain data of a text that its reader has accepted, or that is a sample with one kind of damage."""
    if not sample.file.endswith(".yaml"):
        return json.loads(text)
    try:
        return yaml.load(text, _Loader)
    except (
        yaml.YAMLError
    ):  # libyaml refuses some plain scalars with colons that the readers' own parser accepts
        return yaml.load(text, yaml.SafeLoader)


# Damage


def mutated(sample: Sample, random_: random.Random) -> bytes:
    """A sample with one to three kinds of damage."""
    data = sample.text.encode()
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        level = random_.random()
        if level < 0.5 and sample.structured:
            data = _with_other_node(sample, data, random_)
        elif level < 0.8:
            data = _with_other_token(data, random_)
        else:
            data = _with_other_bytes(data, random_)
    return data


def _with_other_node(sample: Sample, data: bytes, random_: random.Random) -> bytes:
    try:
        first = data == sample.text.encode()
        document = original(sample) if first else document_of(sample, data.decode())
    except (ValueError, RecursionError, yaml.YAMLError):
        return _with_other_bytes(data, random_)
    ways = list(_nodes(document))
    if not ways:
        return data
    document = copy.deepcopy(document)
    way = random_.choice(ways)
    here = document
    for step in way[:-1]:
        here = here[step]
    last, act = way[-1], random_.randrange(6)
    if act < 3:
        here[last] = random_.choice(NASTY)
    elif act == 3:
        del here[last]
    elif act == 4:
        other = random_.choice(ways)
        there = document
        for step in other:
            there = there[step] if not isinstance(there, (str, int, float)) and there is not None else None
        here[last] = copy.deepcopy(there)
    elif isinstance(here, dict):
        here[random_.choice(("colour", "", str(last) + "s"))] = copy.deepcopy(here[last])
    else:
        here.insert(random_.randrange(len(here) + 1), copy.deepcopy(here[last]))
    return json.dumps(document, indent=random_.choice((None, 1))).encode()


def _nodes(document: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    stack: list[tuple[Any, tuple[Any, ...]]] = [(document, ())]
    while stack:
        here, way = stack.pop()
        if way:
            found.append(way)
        if len(way) < 30 and len(found) < 20_000:
            items = (
                here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
            )
            stack.extend((child, (*way, key)) for key, child in items)
    return found


def _with_other_token(data: bytes, random_: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    tokens = _TOKEN.findall(text)
    if not tokens:
        return data
    at = random_.randrange(len(tokens))
    act = random_.randrange(5)
    if act < 2:
        tokens[at] = random_.choice(TOKENS)
    elif act == 2:
        tokens.insert(at, random_.choice(TOKENS))
    elif act == 3:
        tokens[at] = random_.choice(tokens)
    else:
        del tokens[at : at + random_.choice((1, 1, 2, 10))]
    return "".join(tokens).encode()


def _with_other_bytes(data: bytes, random_: random.Random) -> bytes:
    if not data:
        return b"\xff"
    at, length = random_.randrange(len(data)), random_.choice((1, 1, 2, 16, 200))
    act = random_.randrange(5)
    if act == 0:
        return data[:at] + bytes([data[at] ^ (1 << random_.randrange(8))]) + data[at + 1 :]
    if act == 1:
        return data[:at] + data[at + length :]
    if act == 2:
        return data[:at] + random_.randbytes(length) + data[at:]
    if act == 3:
        return data[: at + length] + data[at:]
    return data[:at]


# Readers


def _cluster(path: Path) -> Any:
    found = load_cluster(path)
    describe(found)
    cost = CollectiveCost(found)
    for count in {2, min(5, len(found.devices)), len(found.devices)} & set(range(2, 65)):
        _attempt(lambda count=count: cost.time("all_reduce", range(count), 1e6))
    _attempt(lambda: cost.time("send", (0, len(found.devices) - 1), 1e6))
    numbers = found.machines, found.devices, found.links, found.network, found.launch, found.measured
    return *numbers, found.name, found.origins, found.errors


def _plan(path: Path) -> Any:
    found = Plan.load(path)
    text = found.text()
    assert Plan.parse(text) == found, "a plan is not what it is written as"
    str(found)
    for framework in ("jax", "torch", "megatron"):
        _attempt(lambda framework=framework: found.export(framework).source)
    for name in [*found.tensors, *found.decisions, "layer 0", "stage 0"][:6]:
        _attempt(lambda name=name: found.explain(name))
        _attempt(lambda name=name: found.instead(name))
    return text


def _graph(path: Path) -> Any:
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    if "\udcff" in text or any("\udc80" <= sign <= "\udcff" for sign in text):
        raise DistGraphError(
            f"{path}: is refused by the reader of files, which tests/serialization/test_documents.py shows"
        )
    found = parse_graph(text, str(path))
    printed = print_graph(found)
    assert print_graph(parse_graph(printed)) == printed, "a graph is not what it is printed as"
    _attempt(lambda: verify(found))
    return printed


def _timeline(path: Path) -> Any:
    found = MeasuredTimeline.read(path)
    measured_events(found, 0)
    return found


def _measurements(path: Path) -> Any:
    request = Request(str(path.with_name(path.name.replace(".measurements.json", ".yaml"))), ranks=2)
    store = Store.open(request, "1 ranks a core")
    _attempt(lambda: evaluate(request.cluster(), store.runs, 2))
    return store.runs


def _cached(path: Path) -> Any:
    problem = _problem()
    name = digest(problem)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path.replace(path.with_name(f"{name}.json"))
        found = Cache(path.parent).get(name, problem)
    if found is None:
        raise DistGraphError(str(caught[0].message) if caught else str(path))
    choice = found.solution.choice
    assert choice == (0, 1), "an entry gives another choice than the best"
    return choice, found.solution.bound, found.seconds


def _attempt(use: Callable[[], Any]) -> None:
    """What was read may turn out to be of no use, which a house error says."""
    with contextlib.suppress(DistGraphError):
        use()


# Samples

LOOSE = ("about", "error", "kind", "levels")
"""Of a cluster: for people; kinds of links name them in messages; a level above the top says nothing."""


def _entries(document: Any) -> Any:
    return check(document, "cluster")


@cache
def _problem() -> Problem:
    uses = ((Use(0, 2, np.array([4.0, 1.0])),), (Use(1, 3, np.array([3.0, 2.0])),))
    edges = (np.array([[9.0, 0.0], [0.0, 9.0]]),)
    return Problem("two", (np.array([1.0, 5.0]), np.array([4.0, 2.0])), ((0, 1),), edges, uses, 6.0)


@cache
def samples() -> tuple[Sample, ...]:
    """Every kind, some of them several times."""
    folder = ROOT / "resources" / "files"
    made = [
        Sample(
            "cluster",
            f"{name}.yaml",
            (folder / f"{name}.yaml").read_text(),
            _cluster,
            LOOSE,
            meaning=_entries,
        )
        for name in ("local", "tpu_v4_16x16", "mixed_a100_v100", "vtrain_a100")
    ]
    device = {
        "global_id": 0,
        "local_id": 0,
        "type": "GPU",
        "model": "V100",
        "memory": "32",
        "sp_gflops": 15700,
    }
    ends = {"source_global_id": 0, "target_global_id": 1, "type": "NVL", "bandwidth": 235, "latency": "2"}
    machine = {
        "hostname": "a", "addr": "10.0.0.1", "port": "80",
        "devices": [device, {**device, "global_id": 1}, {**device, "global_id": 2, "type": "NIC"}],
        "links": [ends, {**ends, "target_global_id": 2, "type": "PHB"}],
    }  # fmt: skip
    paddle = json.dumps({"machines": [machine], "alpha_latency": {"inter": {"ring": "NET"}}}, indent=1)
    made.append(Sample("paddle", "paddle.json", paddle, _cluster, ("*",)))
    for name in ("gpt", "pipeline, tied"):
        case = CASES[name]
        engine = case.engine()
        engine.prepare(case.first())
        made.append(Sample("plan", f"{name[:3]}.json", engine.plan.portable.text(), _plan))
        texts = {"lowered": engine.plan.build.lowered, "completed": engine.plan.build.completed}
        if name != "gpt":
            made += [
                Sample("graph", f"{k}.dg", print_graph(g), _graph, structured=False) for k, g in texts.items()
            ]
    return (*made, *_measured(), _entry(), _contest())


def _measured() -> list[Sample]:
    runs = (MeasuredRun("forward", 0, 0.1, 0.4), MeasuredRun("backward", 0, 0.5, 0.9))
    message = MeasuredMessage("send", "backward", 0, 0.9, 1.0, 0.1)
    step = MeasuredStep(1, {0: MeasuredRank(runs, (message,)), 1: MeasuredRank(runs, ())})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        MeasuredTimeline({"forward": "forward", "backward": "backward"}, 1, (step, step)).write(path)
        timeline = path.read_text()
    work = {
        "kind": "matmul", "flops": 1e6, "nbytes": 1e4, "dtype": "f32", "dims": [1, 8, 8, 8], "op": "einsum",
        "patches": [0.0, 0.0],
    }  # fmt: skip
    send = {"kind": "all_reduce", "groups": [[0, 1]], "nbytes": 1024, "work": 0.0}
    entries = {
        "machines[0].devices|einsum/8": {
            "works": [work],
            "runs": [[1e-4], [2e-4]],
            "others": [{"host": "a", "share": 0.1}, {"host": "a", "share": 0.0}],
        },
        "machines[0].devices|beside": {
            "tasks": 3,
            "runs": [[1e-5]],
            "others": [{"host": "a", "share": None}],
        },
        "|all_reduce/0-1/1024": {"message": send, "runs": [[3e-5]], "others": [{"host": "a", "share": 0.0}]},
        "|all_reduce/0-1/4096": {
            "message": {**send, "nbytes": 4096},
            "runs": [[5e-5]],
            "others": [{"host": "a", "share": 0.0}],
        },
    }
    header = {"source": "", "ranks": 2, "places": "1 ranks a core", "format": 7}
    text = json.dumps({"header": header, "runs": entries}, indent=1)
    return [
        Sample("timeline", "timeline.json", timeline, _timeline),
        Sample("measurements", "here.measurements.json", text, _measurements),
    ]


def _entry() -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        name = digest(_problem())
        Cache(Path(folder)).put(name, Solution((0, 1), 3.0, 3.0, 0.0, "optimal", {"dual": 0.1}), 1.0)
        return Sample("cache", f"{name}.json", (Path(folder) / f"{name}.json").read_text(), _cached)


def _contest() -> Sample:
    nodes = {"intervals": [[0, 2], [1, 1]], "costs": [[3, 1], [7]], "usages": [[1, 6], [5]]}
    edges = {"nodes": [[0, 1]], "costs": [[10, 20]]}
    text = json.dumps({"problem": {"name": "p", "nodes": nodes, "edges": edges, "usage_limit": 6}})
    return Sample("contest", "p.json", text, lambda path: repr(read_contest(path)), ("*",))
