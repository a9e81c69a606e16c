"""The claims of docs/running/security.md: what a file says is never executed; where code is made of text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.paths import ROOT

import distgraph
from distgraph.errors import DistGraphError
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.parser import parse_graph
from distgraph.plan.plan import Plan
from distgraph.serialization.yaml_reader import parse_yaml

PACKAGE = Path(distgraph.__file__).parent
DANGEROUS = {
    "eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "pickle.Unpickler", "numpy.load",
    "marshal.load", "marshal.loads", "shelve.open", "os.system", "os.popen", "runpy.run_path", "np.load",
    "runpy.run_module", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "subprocess.run",
    "subprocess.Popen", "subprocess.call", "subprocess.check_output",
    "importlib.util.spec_from_file_location",
}  # fmt: skip
HIDDEN = {"load", "loads", "system", "popen", "Popen", "run"}
ALLOWED = {
    "runtime/program/task_compiler.py": {"exec", "compile"},  # the program of a rank, from the compiled graph
    "runtime/program/code_cache.py": {
        "compile"
    },  # the same programs, compiled once for ranks with equal ones
    "runtime/profile/op_probes.py": {"exec", "compile"},  # the same program, with clocks
    "runtime/transport/mpi.py": {"pickle.loads"},  # objects of other ranks of the job
    "runtime/transport/departed_ranks.py": {"pickle.loads"},  # the same
    "runtime/transport/group_objects.py": {"pickle.loads"},  # the same
    "engine/search_driver/worker_pool.py": {"pickle.loads"},  # results of worker processes of this process
    "runtime/launch/mpiexec.py": {"subprocess.Popen"},  # mpiexec, with a list of arguments
    "runtime/launch/host_check.py": {
        "subprocess.Popen"
    },  # ssh to a host of the job, with a list of arguments
    "runtime/launch/host_heartbeats.py": {"subprocess.Popen"},  # the same
    "runtime/launch/mpi_rank.py": {"runpy.run_path"},  # the user's script
    "engine/commands/script_runner.py": {"runpy.run_path"},  # the user's script
    "serialization/yaml_loader.py": {"yaml.load"},  # with a loader of seven harmless tags
}
LAZY = {"import_module", "importlib.import_module"}


@cache
def texts() -> dict[str, str]:
    """Path in the package -> source; its folders that are links too."""
    paths = {*PACKAGE.rglob("*.py"), *(path for folder in PACKAGE.iterdir() for path in folder.rglob("*.py"))}
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


@cache
@collector_paused()
def sources() -> tuple[tuple[str, ast.Module], ...]:
    return tuple((name, ast.parse(text)) for name, text in texts().items())


@cache
@collector_paused()
def calls() -> tuple[tuple[str, str, ast.Call], ...]:
    """(path in the package, dotted name that is called, the call); "" where something else is called."""
    return tuple(
        (name, dotted(node.func), node)
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    )


@pytest.fixture(scope="module", autouse=True)
def syntax_trees() -> Iterator[None]:
    """They are freed with the last test that reads them: as long as they are there, every search for cycles
    in the tests that follow visits all their nodes."""
    yield
    calls.cache_clear()
    sources.cache_clear()


def dotted(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return f"{dotted(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def test_what_executes_text_or_bytes_stands_where_the_page_says() -> None:
    found: dict[str, set[str]] = {}
    for name, called, _ in calls():
        if called in DANGEROUS:
            found.setdefault(name, set()).add(called)
    found = {name: functions - ALLOWED.get(name, set()) for name, functions in found.items()}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_no_shell_and_no_name_that_hides_what_is_called() -> None:
    modules = ("pickle", "marshal", "os", "subprocess", "yaml")
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                assert not {alias.name for alias in node.names} & HIDDEN, name
    for name, _, call in calls():
        assert not any(word.arg in ("shell", "allow_pickle") for word in call.keywords), name


def test_modules_that_are_imported_by_name_have_names_in_the_source() -> None:
    """Or one from a table of the module, or of a module given to the launcher: none comes from a file."""
    computed = set()
    for name, called, node in calls():
        if called in LAZY:
            argument = node.args[0]
            texts = (argument.body, argument.orelse) if isinstance(argument, ast.IfExp) else (argument,)
            if not all(isinstance(text, ast.Constant) for text in texts):
                computed.add(f"{name}: {ast.unparse(argument)}")
    assert computed <= {
        "__init__.py: _HOMES[name]",
        "__init__.py: _MODULES[name]",
        "cli/application.py: _MODULES[name]",
        "engine/callbacks/training_output.py: module",
        "frontends/__init__.py: _FRONTENDS[name]",
    }


def test_files_are_read_by_the_modules_that_bound_them() -> None:
    """Parsers of JSON, YAML and CSV elsewhere read what this process or its launcher has written."""
    parsers = {"json.load", "json.loads", "yaml.safe_load", "csv.reader", "tomllib.load", "pickle.load"}
    found = {name for name, called, _ in calls() if called in parsers}
    assert found <= {
        "serialization/documents.py",
        "serialization/csv_reader.py",
        "ir/parser.py",  # strings of graph text, each a token
        "engine/callbacks/training_output.py",  # the head of a CSV file that is gone on with
        "runtime/profile/profiler.py",  # the request of the process that started this one
        "runtime/job/failure_report.py",  # files of the ranks of the job
        "runtime/job/job_files.py",  # the same
        "runtime/launch/host_probe.py",  # the answer of a host of the job
        "engine/commands/measure_plans.py",  # seconds that a rank of the job has written
        "runtime/launch/process_placement.py",  # of a plan of limited size, which the engine reads and checks
        *(name for name in found if name.startswith("runtime/execute/checkpoint/")),
        "runtime/job/losses.py",  # the folder of an elastic job
        "runtime/job/adaptations.py",  # the same
        "runtime/launch/elastic_configurations.py",
    }


CODE = "__import__('pathlib').Path('owned').touch()"


@pytest.mark.parametrize(
    "text",
    [
        f'a: !!python/object/apply:eval ["{CODE}"]',
        "a: !!python/object/apply:os.system ['touch owned']",
        "a: !!python/name:os.system",
        "a: !!python/module:os",
        "!!python/object/new:os.system [touch owned]",
    ],
)
def test_yaml_makes_no_objects(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DistGraphError, match="means nothing in a resource file"):
        parse_yaml(text, "x.yaml")
    assert not list(tmp_path.iterdir())


def test_a_graph_text_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, attributes and places in the source are texts whatever stands in them."""
    monkeypatch.chdir(tmp_path)
    odd = json.dumps(f'"\n{CODE}\n#')
    graph = parse_graph(f"graph @{odd} %{odd} : f32[2] = input {{name={odd}}} data in {odd} at {odd}")
    assert graph.name == json.loads(odd)
    with pytest.raises(DistGraphError):
        parse_graph(f"graph @g %x : f32[2] = input {{name={CODE}}} data")
    assert not list(tmp_path.iterdir())


def test_a_plan_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "distgraph plan", "version": 1, "cluster": CODE, "layers": [CODE]}))
    with pytest.raises(DistGraphError, match=r"plan.json: program: missing"):
        Plan.load(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_the_page_names_every_environment_variable() -> None:
    page = (ROOT / "docs" / "running" / "security.md").read_text(encoding="utf-8")
    used = {
        variable for text in texts().values() for variable in re.findall(r"\"(DISTGRAPH_[A-Z_]+)\"", text)
    }
    assert len(used) > 5
    assert {name for name in used if f"`{name}`" not in page} == set()


def test_the_limits_on_the_page_are_those_of_the_readers() -> None:
    from distgraph.ir import parser, range_notation
    from distgraph.plan import schema as plan_schema
    from distgraph.resources import schema, units
    from distgraph.runtime.execute import measured_timeline
    from distgraph.serialization import documents, yaml_loader, yaml_reader

    assert (documents.MOST_BYTES, measured_timeline.MOST_BYTES) == (64 << 20, 256 << 20)
    assert (yaml_reader.MOST_BYTES, yaml_loader.MOST_ITEMS) == (512 << 10, 200_000)
    assert (documents.MOST_DEPTH, documents.MOST_NUMBER) == (64, 10**40)
    assert (schema.MOST_DEVICES, schema.MOST_DIMS, schema.MOST_LEVELS) == (65_536, 8, 16)
    assert plan_schema.MOST_RANKS == parser.MOST_RANKS == range_notation.MOST_NAMES == 1_048_576
    assert (units.LEAST, units.MOST) == (1e-24, 1e24)
