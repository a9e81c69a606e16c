"""Plan: everything that is decided about a distributed program, as data apart from the program.

A plan says which ranks form which stage, which layers a stage computes, into how many micro-batches a batch
is cut, which layers are recomputed in the backward part, and the layout of every tensor and op. It is
written as JSON (docs/planning/plan.md) with one item a line and equal layers in one entry, so that the plan
of a 96-layer model stays small and two plans can be compared line by line.

`engine/compile/plan_apply.py` makes a program from a plan, `engine/compile/plan_extract.py` a plan from a
program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_hexdigest

from distgraph.errors import GraphError, RuntimeFault, ShardingError, installing
from distgraph.errors.arguments import checked_arguments
from distgraph.ir.range_notation import fold, unfold
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.decisions import Decisions
from distgraph.plan.export.module_interface import Surface
from distgraph.plan.placement import PlacedRanks
from distgraph.plan.plan_components import (
    DECIDED,
    VERSION,
    Computed,
    Decision,
    Estimate,
    Layer,
    LayerOps,
    Program,
    Rest,
    SearchRecord,
    Stage,
    Stored,
    document,
)
from distgraph.plan.plan_diff import changed
from distgraph.plan.report import CHANGED, Comparison, compared, decision_lines, shown, stage_cells
from distgraph.serialization.atomic_files import write_atomically
from distgraph.serialization.documents import dumps, parse_json, read_json

if TYPE_CHECKING:
    from distgraph.plan.apply.distributed_module import DistributedModule
    from distgraph.plan.apply.jax_application import DistributedFunction
    from distgraph.plan.export.result import Export

__all__ = [
    "Plan", "Comparison", "Program", "Stage", "Layer", "Stored", "Computed", "LayerOps", "Estimate",
    "Decision", "SearchRecord", "Rest", "VERSION",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Decisions):
    """What is decided about a program. Immutable; print it.

    Attributes, besides those of `Decisions`:
        program: what it is for.
        cluster: name of the cluster that it was made for; empty where there was none.
        batch: samples of a step.
        layers: runs of the forward ops in program order; together they are all of them.
        stages: in order of layers; those without layers last.
        tensors: name -> stage and layout of an input, parameter or state.
        ops: per layer how its ops are computed.
        rest: the same for ops that belong to no layer.
        placement: machine and device of every rank; empty where there was no cluster.
        surface: shapes, and borders of modules, which `export` needs; None where nobody looked.
        forecast: of a step; None where there is no cluster.
        baselines: name -> seconds of a step of a plan to compare with, or why it has none.
        search: how the plan was found.
        decisions: what was decided -> the choice and its runner-up. A key is the name of a tensor, which may
            stand for several ("blocks.{0..3}.weight"), or a word such as "micro_batches" or "stage 0".

    Example:
        >>> from distgraph.ir.mesh import ProcessMesh
        >>> from distgraph.ir.sharding_spec import ShardSpec
        >>> mesh = ProcessMesh.grid(dp=2)
        >>> plan = Plan(
        ...     program=Program(name="Linear", fingerprint="0", parameters=3, inputs={"x": "f32[2, 3]"}),
        ...     batch=4, micro_batches=1, schedule="1f1b", layers=(Layer(first="1"),),
        ...     stages=(Stage(mesh=mesh, first=0, last=1),),
        ...     tensors={"x": Stored("input", 0, ShardSpec.of(["dp", None]))}, ops=(LayerOps((), ()),),
        ... )
        >>> print(plan.explain("x"))
        x (input): [dp, _] on stage 0, mesh(dp=2)
          no other choice is recorded: the plan was taken from annotations, not searched
    """

    program: Program
    cluster: str = ""
    batch: int
    layers: tuple[Layer, ...]
    stages: tuple[Stage, ...]
    tensors: Mapping[str, Stored]
    ops: tuple[LayerOps, ...]
    rest: Rest = field(default_factory=Rest)
    placement: tuple[PlacedRanks, ...] = ()
    surface: Surface | None = None
    forecast: Estimate | None = None
    baselines: Mapping[str, float | str] = field(default_factory=dict)
    search: SearchRecord = field(default_factory=SearchRecord)
    decisions: Mapping[str, Decision] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of every stage, ascending."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.mesh.members}))

    @checked_arguments()
    def stage_of(self, layer: int) -> int:
        """Number of the stage that computes a layer. Raises GraphError when there is no such layer."""
        for number, stage in enumerate(self.stages):
            if stage.first <= layer < stage.last:
                return number
        raise GraphError(
            f"layer {layer} is not in the plan of {self.program.name}, which has layers 0 to "
            f"{self.stages[-1].last - 1}"
        )

    @property
    def digest(self) -> str:
        """Hash of what the plan decides: equal for plans that run in the same way."""
        decided = {name: part for name, part in document(self).items() if name in DECIDED}
        return xxh3_64_hexdigest(dumps(decided).encode())

    @property
    def is_changed(self) -> bool:
        """Whether the plan was changed after it was forecast, as by an edit of its file."""
        return self.forecast is not None and self.forecast.plan not in ("", self.digest)

    # Files

    @checked_arguments()
    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; readers see the old file or the new one, never a part.

        Raises:
            GraphError: it cannot be written there.
        """
        write_atomically(path, self.text(), GraphError)

    @classmethod
    @checked_arguments()
    def load(cls, path: str | Path) -> Plan:
        """A plan from a file.

        Raises:
            GraphError: it cannot be read, is no plan, of another version, or malformed; names file and path.
        """
        from distgraph.plan.schema import read_fields  # noqa: PLC0415 (loads pydantic)

        return cls(**read_fields(read_json(path, GraphError), str(path)))

    @classmethod
    @checked_arguments()
    def parse(cls, text: str) -> Plan:
        """Inverse of `text`. Raises GraphError: as `load`."""
        from distgraph.plan.schema import read_fields  # noqa: PLC0415 (loads pydantic)

        return cls(**read_fields(parse_json(text, "plan", GraphError), "plan"))

    def text(self) -> str:
        """The plan as JSON; equal plans have equal text."""
        return dumps(document(self))

    @checked_arguments()
    def export(self, framework: str) -> Export:
        """The plan in the terms of another framework: docs/planning/export.md.

        Args:
            framework: "jax", "torch" or "megatron".

        Raises:
            GraphError: the framework is unknown, or the plan has no surface.
            ShardingError: the framework has no way to do what the plan says; the message lists why.
        """
        from distgraph.plan.export.exporters import EXPORTERS  # noqa: PLC0415 (few programs export)

        if framework not in EXPORTERS:
            names = ", ".join(EXPORTERS)
            raise GraphError(f"framework {framework!r} is unknown; a plan is exported to {names}")
        return EXPORTERS[framework](self)

    def apply_to_torch(
        self,
        module: Any,
        optimizer: Any = None,
        device_mesh: Any = None,
        example_inputs: Mapping[str, Any] | None = None,
    ) -> DistributedModule:
        """A model of torch that runs as the plan says, on processes of `torchrun`: docs/planning/apply.md.

        Collective: every process calls it with the same model.

        Args:
            module: the `torch.nn.Module` that the plan was made for, with `frontends.torch.import_module`; it
                is changed in place.
            optimizer: a `torch.optim.Optimizer` of its parameters, which then trains those of this rank.
            device_mesh: a DeviceMesh whose ranks are those of the plan in ascending order; by default all
                processes, on GPUs where the process group is NCCL's.
            example_inputs: name -> tensor, of a batch, by which torch traces the model for a pipeline; by
                default zeros of the plan's shapes.

        Returns:
            a module with `train_step`, `rows`, `optimizer`, and `notes` about what runs in another way.

        Raises:
            GraphError, ShardingError: the plan cannot be applied to the model; the message names the tensor
                or module and why. Nothing was run.
            ResourceError: there are not as many processes as ranks of the plan.
            RuntimeFault: torch is not installed.
        """
        _require("torch", "apply_to_torch")
        from distgraph.plan.apply.torch_application import apply_to_torch  # noqa: PLC0415 (imports torch)

        return apply_to_torch(self, module, optimizer, device_mesh, example_inputs)

    def apply_to_jax(self, function: Callable[..., Any], mesh: Any = None) -> DistributedFunction:
        """A function of JAX that is compiled with the plan's shardings: docs/planning/apply.md.

        Args:
            function: (params, *inputs) -> outputs, for which the plan was made with
                `frontends.jax.import_function`.
            mesh: a `jax.sharding.Mesh` with the plan's axes; by default on the first devices of JAX.

        Returns:
            a function of the same arguments, with `place` for parameters, `param_shardings`, and `notes`
            about what JAX does in another way.

        Raises:
            GraphError, ShardingError: the plan cannot be applied; it has several stages, or other axes.
            ResourceError: JAX has too few devices.
            RuntimeFault: jax is not installed.
        """
        _require("jax", "apply_to_jax")
        from distgraph.plan.apply.jax_application import apply_to_jax  # noqa: PLC0415 (imports jax)

        return apply_to_jax(self, function, mesh)

    # Questions

    @checked_arguments()
    def explain(self, name: str) -> str:
        """What was chosen, what it costs, and what the runner-up would cost.

        Args:
            name: of an input, parameter or state, those of equal layers also together as they are printed;
                "stage 0", "layer 3"; or of a decision such as "micro_batches".

        Raises:
            GraphError: the plan has nothing of that name.
        """
        fact, decision = self._fact(name), self._decision(name)
        if fact is None and decision is None:
            raise GraphError(
                f"plan of {self.program.name} has nothing named {name!r}; it has {self._near(name)}"
            )
        if decision is None:
            return f"{fact}\n  no other choice is recorded: {self._unsearched()}"
        before = (
            [f"  {CHANGED}: what follows is of the plan before"] if self._disagrees(name, decision) else []
        )
        return "\n".join([fact or name, *before, *decision_lines(self, decision)])

    @checked_arguments()
    def instead(self, name: str) -> Plan:
        """The plan with the runner-up in place of a choice, and what goes with it; its forecast is not known.

        Args:
            name: of a decision that `explain` shows with a runner-up.

        Raises:
            GraphError: there is no such decision, or its runner-up is another program altogether.
        """
        decision = self._decision(name)
        if decision is None or not decision.instead:
            names = ", ".join(key for key, other in self.decisions.items() if other.instead) or "no decision"
            raise GraphError(
                f"plan of {self.program.name} does not say what {name!r} would be instead; it does of {names}"
            )
        search = SearchRecord(mode=f"{self.search.mode}, instead of {decision.chosen} of {name}")
        other = changed(self, decision.instead)
        return replace(other, surface=None, forecast=None, baselines={}, search=search, decisions={})

    def compare(self, other: Plan) -> Comparison:
        """What differs between this plan and another one.

        Raises:
            GraphError: the other is no plan.
        """
        if not isinstance(other, Plan):
            raise GraphError(
                f"plan of {self.program.name} compares with plans, not with a {type(other).__name__}; read a "
                "file with dg.Plan.load, take that of an engine from engine.plan.portable"
            )
        return compared(self, other)

    def _near(self, name: str) -> str:
        """Names that there are: those most like one that there is not, where some are."""
        counted = [f"stage 0 to {len(self.stages) - 1}", f"layer 0 to {len(self.layers) - 1}"]
        if name.startswith(("stage", "layer")):
            return ", ".join(counted)
        folded = dict.fromkeys([*self.decisions, *fold(dict.fromkeys(self.tensors))])
        near = get_close_matches(name, dict.fromkeys([*folded, *self.tensors]))
        return ", ".join(near or [*folded, *counted])

    def _fact(self, name: str) -> str | None:
        """What the plan says of a tensor, a stage or a layer."""
        every = {each: self.tensors.get(each) for each in (unfold(name) if "{" in name else [name])}
        if None not in every.values():
            return "\n".join(
                self._layout_text(names, stored) for names, stored in fold(every).items() if stored
            )
        word, _, text = name.partition(" ")
        number = int(text) if text.isdecimal() else -1
        if word == "stage" and 0 <= number < len(self.stages):
            return f"{name}: {', '.join(filter(None, stage_cells(self, number)))}"
        if word != "layer" or not 0 <= number < len(self.layers):
            return None
        again = ", recomputed in the backward part" if number in self.recompute else ""
        head = f"{name} (from {self.layers[number]}) on stage {self.stage_of(number)}{again}"
        return "\n".join([head, *(f"  {op}" for op in self.ops[number].ops)])

    def _layout_text(self, name: str, stored: Stored) -> str:
        return (
            f"{name} ({stored.kind}): {stored.spec} on stage {stored.stage}, {self.stages[stored.stage].mesh}"
        )

    def _decision(self, name: str) -> Decision | None:
        decision = self.decisions.get(name)
        if decision is not None:
            return decision
        return next((d for key, d in self.decisions.items() if "{" in key and name in unfold(key)), None)

    def _disagrees(self, name: str, decision: Decision) -> bool:
        """Whether a decision is of the plan before it was changed; of tensors the layout tells that too."""
        if self.is_changed:
            return True
        try:
            chosen = ShardSpec.parse(decision.chosen)
        except (ValueError, ShardingError):
            return False
        stored = [self.tensors[each] for each in unfold(name) if each in self.tensors]
        return any(each.spec != chosen for each in stored)

    def _unsearched(self) -> str:
        if self.search.mode == "annotations":
            return "the plan was taken from annotations, not searched"
        return f"the search ({self.search.mode}) weighed none"

    def __str__(self) -> str:
        return shown(self)


def _require(package: str, method: str) -> None:
    """Raises RuntimeFault where a package that a method needs is not installed."""
    if find_spec(package) is None:
        raise RuntimeFault(
            f"{package} is not installed but {method} runs a plan with it; {installing(package)}"
        )
