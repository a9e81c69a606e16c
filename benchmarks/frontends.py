"""What comes in from PyTorch and JAX, and how long a large model of PyTorch takes from its config to a plan.

    python benchmarks/frontends.py [--json FILE] [--quick] [--only NAME] [--profile FILE]

Tables: every module of `torch.nn`, function of `jax.nn` and module of `flax.linen` and `equinox.nn` is
imported and traced; those that are refused are listed with the first lines of the error. That outputs and
gradients are those of the frameworks is tested (`tests/frontends`); here they are counted.

Plans: a Llama of `transformers` on the meta device, without memory for parameters, becomes a plan by
`import_module`, `Engine` and a search with a limit, each in a process of its own. Seconds count everything
behind the imports of the libraries, CPU seconds are those of all processes, and the peak is of the largest.

    llama8b_64      Llama-3-8B, 128 sequences of 8,192, AdamW, for 64 H100, search of 35 s; aim 60 s, 4 GiB
    llama70b_512    Llama-3-70B, 1,024 sequences of 8,192, AdamW, for 512 H100, search of 90 s; aim 180 s

--quick imports the modules of `torch.nn` and functions of `jax.nn`, and plans the first model, with a search
of 10 s. `transformers`, `flax` and `equinox` are not dependencies: what needs one that is not installed is
left out, and the output says so. Figures: `torch` and `jax` {imported, total}, `llama8b_seconds`,
`llama8b_peak_gib`, `llama70b_512_seconds`, `plans` (with CPU seconds), `refused`.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import pstats
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

PER_MACHINE, POSITIONS = 8, 8192


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape of Llama 3, its batch, the devices, and the limit of the search in seconds."""

    shape: Mapping[str, int]
    batch: int
    devices: int
    limit: float


SHAPE_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": POSITIONS,
}  # fmt: skip
SHAPE_70B = SHAPE_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
CASES = {
    "llama8b_64": Case(SHAPE_8B, 128, 64, 35.0),
    "llama70b_512": Case(SHAPE_70B, 1024, 512, 90.0),
}


# what comes in


def imported_from_torch() -> tuple[int, dict[str, str]]:
    """Number of modules of `torch.nn`, and those that do not import with the reason."""
    import torch
    from support.frontends.torch_nn_cases import CASES as cases
    from support.frontends.torch_nn_cases import draw

    import distgraph as dg

    def import_case(name: str) -> None:
        torch.manual_seed(0)
        case, generator = cases[name], torch.Generator().manual_seed(1)
        inputs = tuple(draw(spec, generator) for spec in case.inputs)
        module = case.make()
        if name.startswith("Lazy"):  # its parameters get their shapes in the first call
            module(*(x.float() if x.is_floating_point() else x for x in inputs))
        model = dg.frontends.torch.import_module(module.double(), inputs, **(case.options or {}))
        dg.trace(model, *(x.numpy() for x in inputs))

    return len(cases), refused(list(cases), import_case)


def imported_from_jax(quick: bool) -> tuple[int, dict[str, str]]:
    """Number of functions and modules of JAX's libraries, and those that do not import with the reason."""
    from support.frontends.jax_nn_cases import CASES as cases

    import distgraph as dg

    libraries = ["jax"] if quick else ["jax", "flax", "equinox"]
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            print(f"  {library} is not installed: its modules are left out")
    names = [
        n for n in cases if (library := n.split(".")[0]) in libraries and importlib.util.find_spec(library)
    ]

    def import_case(name: str) -> None:
        function, params, inputs = cases[name]()
        dg.frontends.jax.import_function(function, params, *inputs)

    return len(names), refused(names, import_case)


def refused(names: list[str], import_case: Callable[[str], None]) -> dict[str, str]:
    """The names whose import is refused, with the reason."""
    from distgraph.errors import GraphError

    reasons = {}
    for name in names:
        try:
            import_case(name)
        except GraphError as error:
            lines = str(error).splitlines()
            reasons[name] = " ".join(line.strip() for line in lines[:2])
    return reasons


# from a config to a plan


def planned(case: Case, profile: str | None) -> dict[str, Any]:
    """One case in this process: seconds of import and of the search, peak memory, the plan."""
    warnings.simplefilter("ignore")
    os.environ["DISTGRAPH_CACHE"] = "off"
    import numpy as np
    import torch
    import transformers
    import yaml

    import distgraph as dg
    from distgraph.resources.cluster_builder import build_cluster
    from distgraph.resources.schema import check

    file = ROOT / "resources" / "files" / "dgx_h100_pod.yaml"
    document = yaml.safe_load(file.read_text())
    document["machines"][0]["count"] = case.devices // PER_MACHINE
    cluster = build_cluster(check(document, str(file)), str(file))

    def plan() -> dict[str, Any]:
        start, cpu = time.perf_counter(), _cpu_seconds()
        with torch.device("meta"):
            net = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **case.shape))
        ids = torch.zeros(2, POSITIONS, dtype=torch.int64)
        model = dg.frontends.torch.import_module(net, {"input_ids": ids})
        imported, imported_cpu = time.perf_counter() - start, _cpu_seconds() - cpu
        strategy = dg.Strategy(mode="auto", devices=case.devices, seconds=case.limit)
        engine = dg.Engine(model, _loss, dg.optim.AdamW(1e-4), strategy=strategy, cluster=cluster)
        batch = np.zeros((case.batch, POSITIONS), np.int32)
        searched = engine.prepare((batch, batch)).portable
        text = str(searched)
        seconds, used = time.perf_counter() - start, _cpu_seconds() - cpu
        assert searched.forecast is not None
        return {
            "seconds": seconds,
            "cpu_seconds": used,
            "import_seconds": imported,
            "import_cpu_seconds": imported_cpu,
            "step_seconds": searched.forecast.seconds,
            "stages": len(searched.stages),
            "micro_batches": searched.micro_batches,
            "explanation_lines": len(text.splitlines()),
        }

    profiler = cProfile.Profile(time.process_time) if profile else None
    result = profiler.runcall(plan) if profiler else plan()
    if profiler is not None and profile is not None:
        with Path(profile).open("w") as out:
            pstats.Stats(profiler, stream=out).sort_stats("cumulative").print_stats(150)
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    result["peak_gib"] = max(resource.getrusage(each).ru_maxrss for each in who) / 2**20
    return result


def _loss(output: Any, labels: Any) -> Any:
    from distgraph import ops

    return ops.mean(ops.cross_entropy(output.logits, labels))


def _cpu_seconds() -> float:
    """Of this process and of those that it had work for it."""
    return sum(os.times()[:4])


def show_counts(name: str, total: int, without: Mapping[str, str]) -> dict[str, int]:
    """Print what comes in from a framework, and return its figures."""
    imported = total - len(without)
    print(f"{name}: {imported} of {total} import ({imported / total:.0%}); these do not:")
    for each, why in sorted(without.items()):
        print(f"  {each:<36}{why}")
    return {"imported": imported, "total": total}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="less of it, see above")
    parser.add_argument("--only", choices=["torch", "jax", *CASES], help="one part")
    parser.add_argument("--profile", help="write where CPU time of the last plan goes, there")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print(f"load {os.getloadavg()[0]:.1f}")
    figures: dict[str, Any] = {"refused": {}, "plans": {}}
    if given.only in (None, "torch"):
        total, figures["refused"]["torch"] = imported_from_torch()
        figures["torch"] = show_counts("torch.nn", total, figures["refused"]["torch"])
    if given.only in (None, "jax"):
        total, figures["refused"]["jax"] = imported_from_jax(given.quick)
        figures["jax"] = show_counts("JAX", total, figures["refused"]["jax"])
    cases = {n: case for n, case in CASES.items() if given.only in (None, n)}
    if given.quick:
        cases = {n: dataclasses.replace(c, limit=10.0) for n, c in list(cases.items())[:1]}
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: no Llama is planned")
        cases = {}
    if cases:
        names = "seconds", "CPU s", "import", "CPU s", "peak GiB", "step s", "stages", "micro"
        print(f"{'model':<16}" + "".join(f"{name:>10}" for name in names))
    for name, case in cases.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            row = pool.submit(planned, case, given.profile).result()
        keys = "seconds", "cpu_seconds", "import_seconds", "import_cpu_seconds", "peak_gib", "step_seconds"
        decimals = "".join(f"{row[key]:>10.2f}" for key in keys)
        print(f"{name:<16}{decimals}{row['stages']:>10}{row['micro_batches']:>10}", flush=True)
        figures["plans"][name] = row
        key = {"llama8b_64": "llama8b", "llama70b_512": "llama70b_512"}[name]
        figures[f"{key}_seconds"] = row["seconds"]
        figures[f"{key}_peak_gib"] = row["peak_gib"]
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
