"""The training specification: traces a model, a loss and an optimiser to serial graphs.

A batch has named fields. The fields of a tuple are its positions: the last one is the target, the others are
the arguments of the model. The fields of a dict go to the model's arguments of the same names; the remaining
fields go to the loss, after the output, in the order of the dict. Without a loss function the model returns
the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from distgraph.engine.compile.loss_scaling import scale_factor, unscaled
from distgraph.engine.compile.strategy_passes import strategy_pipeline
from distgraph.engine.data import POSITION, Field
from distgraph.engine.validation import check_call, check_held
from distgraph.errors import GraphError
from distgraph.errors.arguments import shown
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Graph
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.nn import Module, Parameter
from distgraph.nn.module import name_tree
from distgraph.optim import Optimizer
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.passes.serial.backward import depends_on, differentiate
from distgraph.plan.precision import MixedPrecision
from distgraph.plan.strategy import STORED_ORIGIN, ZERO_ORIGIN, Strategy
from distgraph.tracing.pytrees import leaves
from distgraph.tracing.tensor import Tensor, emit_one
from distgraph.tracing.tracer import Trace


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """The arguments of an engine that define its programs.

    Attributes:
        model: a Module, or any function of tensors.
        loss: (output, *targets) -> scalar, the mean over the samples; None if the model returns the loss.
        optimizer: None for an engine that does not train.
        metrics: name -> (output, *targets) -> scalar, a mean over the samples.
        strategy: see `Strategy`.
        parameters: name -> parameter or buffer, of the programs that were traced; filled by `trace`.
    """

    model: Callable[..., Any]
    loss: Callable[..., Any] | None
    optimizer: Optimizer | None
    metrics: Mapping[str, Callable[..., Any]]
    strategy: Strategy
    parameters: dict[str, Parameter] = field(default_factory=dict, compare=False, repr=False)

    def trace(
        self,
        mode: str,
        fields: Mapping[str, Field],
        layouts: Mapping[str, DistAttr],
        pruned: bool = True,
        recompute: Sequence[Sequence[str]] = (),
    ) -> Graph:
        """The serial graph of one micro-batch.

        Args:
            mode: "train", "evaluate" or "predict".
            fields: name -> shape and dtype of one micro-batch.
            layouts: layouts of parameters and states that are stored already.
            pruned: run the strategy's passes on serial graphs, which remove unused ops.
            recompute: for each block, names of forward ops that the backward part recomputes, as with
                `dg.recompute`; the model's own recomputed blocks stay.

        Raises:
            GraphError: shapes or dtypes do not fit; the mode needs a loss or an optimiser that is missing.
        """
        self._check(mode)
        trace, held = Trace(mode), self.held_tensors()
        trace.training = mode == "train"
        with trace.activate():
            names = self.names(tuple(fields), mode)
            inputs = {
                names[field]: trace.source("input", names[field], shape, dtype)
                for field, (shape, dtype) in fields.items()
            }
            self._place_inputs(trace, inputs)
            output, targets = self._split(inputs, mode, _is_tuple(tuple(fields)))
            outputs = (
                _labelled(trace, output)
                if mode == "predict"
                else self._loss_and_metrics(trace, output, targets)
            )
            check_held(self.model, held, trace)
            if mode == "train":
                assert self.optimizer is not None
                trace.recompute(recompute)
                scaled = self.strategy.scaling is not None
                loss = outputs["loss"]
                pairs = _gradients(trace, loss, scale_factor(trace, loss) if scaled else None)
                self.optimizer.update(trace, unscaled(trace, pairs) if scaled else pairs)
            if mode != "predict":
                outputs = {label: emit_one("accumulate", value) for label, value in outputs.items()}
            annotate_stored(trace, layouts)
        graph = self._finished(trace, outputs, pruned)
        if self.strategy.mode == "manual":
            _check_manual(graph)
        return graph

    def held_tensors(self) -> dict[str, Parameter]:
        """Name -> parameter or buffer that the attributes of the model, the loss and the metrics lead to.

        The model is the root of the names, even if it is a part of a larger one. Nothing says what a function
        holds.
        """
        if isinstance(self.model, Module):
            name_tree(self.model)
        held: dict[str, Parameter] = {}
        for module in self.modules():
            held = {tensor.name: tensor for _, tensor in module.named_tensors()} | held
        return held

    def modules(self) -> Iterator[Module]:
        """The model, the loss and the metrics, as far as they are modules."""
        for part in (self.model, self.loss, *self.metrics.values()):
            module = part.func if isinstance(part, partial) else part
            if isinstance(module, Module):
                yield module

    def trace_loss(self, fields: Mapping[str, Field]) -> tuple[Graph, int]:
        """Loss and metrics of a micro-batch in evaluation, and the number of ops of the model, which come
        first.

        Raises:
            GraphError: as `trace`.
        """
        trace = Trace("evaluate")
        trace.training = False
        with trace.activate():
            inputs = {
                name: trace.source("input", name, shape, dtype) for name, (shape, dtype) in fields.items()
            }
            output, targets = self._split(inputs, "evaluate", _is_tuple(tuple(fields)))
            count = len(trace.ops)
            scalars = self._loss_and_metrics(trace, output, targets)
        return trace.finish(scalars), count

    def _finished(self, trace: Trace, outputs: Mapping[str, Tensor], pruned: bool) -> Graph:
        """The graph of a trace, after the strategy's passes on serial graphs if it is to be pruned."""
        self.parameters.update(trace.parameters)
        passes = strategy_pipeline(self.strategy).reaching("serial") if pruned else ()
        context = PassContext(precision=self.strategy.mixed or MixedPrecision())
        graph: Graph = run_passes(trace.finish(outputs), passes, context, verified=False)
        return graph

    def _check(self, mode: str) -> None:
        if mode == "train" and self.optimizer is None:
            raise GraphError(
                "Engine has no optimizer but is to train; give it one, such as distgraph.optim.Adam()"
            )

    def _place_inputs(self, trace: Trace, inputs: Mapping[str, Tensor]) -> None:
        axes, mesh = self.strategy.batch_axes, self.strategy.mesh
        if not axes or mesh is None:
            return
        for tensor in inputs.values():
            if tensor.ndim:
                spec = ShardSpec.of([axes] + [None] * (tensor.ndim - 1))
                trace.annotate(tensor.value, DistAttr(mesh, spec, Origin("user", "Strategy.batch_axis")))

    def names(self, fields: Sequence[str], mode: str) -> dict[str, str]:
        """Field of a batch -> name of the graph's input.

        The inputs for the fields of a tuple are named after the model's arguments; the last one is "target".
        """
        if not _is_tuple(fields):
            return {name: name for name in fields}
        no_target = mode == "predict" or self.loss is None or len(fields) == 1
        count = len(fields) if no_target else len(fields) - 1
        declared = arguments(self.model)
        if declared and len(declared) >= count:
            names = declared[:count]
        else:
            names = tuple(f"x{i}" for i in range(count))
        target = "target"
        while target in names:  # an argument of the model has that name
            target += "_"
        return dict(zip(fields, (*names, target), strict=False))

    def _split(
        self, inputs: Mapping[str, Tensor], mode: str, is_tuple: bool
    ) -> tuple[Any, dict[str, Tensor]]:
        """Output of the model, and the targets by name."""
        if is_tuple:
            values = list(inputs.values())
            if mode == "predict" or self.loss is None or len(values) == 1:
                return self._call(values, {}), {}
            return self._call(values[:-1], {}), {f"{POSITION}{len(values) - 1}": values[-1]}
        names = arguments(self.model)
        of_model = {name: tensor for name, tensor in inputs.items() if names is None or name in names}
        if not of_model:
            raise GraphError(
                f"batch has the fields {', '.join(inputs)} but the model takes {', '.join(names or ())}; "
                f"rename one"
            )
        targets = {name: tensor for name, tensor in inputs.items() if name not in of_model}
        return self._call([], of_model), targets

    def _call(self, values: Sequence[Tensor], named: Mapping[str, Tensor]) -> Any:
        """The output of the model. Raises GraphError if its arguments do not match the inputs."""
        function = self.model.forward if isinstance(self.model, Module) else self.model
        try:
            inspect.signature(function).bind(*values, **named)
        except TypeError as error:
            advice = "pass (inputs, target), or a dict with the names of its arguments"
            if len(values) > 1 and all(value.ndim == 0 or value.shape == values[0].shape for value in values):
                advice += "; for rows of one array pass np.asarray(rows)"
            if self.loss is None:
                advice = f"the engine has no loss, so that every field is an input: give it one, or {advice}"
            raise GraphError(
                f"model takes ({', '.join(arguments(self.model) or ())}) but the batch gives it "
                f"{len(values) + len(named)} "
                f"inputs: {error}; {advice}"
            ) from None
        output = self.model(*values, **named)
        if output is None:
            name = getattr(self.model, "__name__", type(self.model).__name__)
            raise GraphError(
                f"model {name} returned None but must return a tensor, or a tuple or dict of them; its "
                f"forward may lack a return"
            )
        return output

    def _loss_and_metrics(
        self, trace: Trace, output: Any, targets: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if self.loss is None:
            loss, extra = (output[0], output[1:]) if isinstance(output, tuple) else (output, ())
            output = extra[0] if len(extra) == 1 else extra
        else:
            if not targets:
                raise GraphError(
                    "batch has no target but the loss needs one; pass (x, y), or an Engine without loss"
                )
            loss = _called("loss", self.loss, output, targets)
        check_loss(loss)
        scalars = {"loss": loss}
        for name, metric in self.metrics.items():
            value = _called(f"metric {name}", metric, output, targets)
            number = trace.tensor(value) if isinstance(value, (Tensor, int, float, np.generic)) else None
            if number is None or number.shape != ():
                actual = type(value).__name__ if number is None else number.value.type
                raise GraphError(f"metric {name} is {actual} but must be one number; take its mean")
            scalars[name] = number
        return scalars


def _called(subject: str, function: Callable[..., Any], output: Any, targets: Mapping[str, Tensor]) -> Any:
    """What a loss or metric returns. Raises GraphError where it does not take the targets."""
    values, named = _arranged(function, dict(targets))
    check_call(subject, function, 1 + len(values), tuple(named))
    return function(output, *values, **named)


def _arranged(
    function: Callable[..., Any], targets: dict[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Targets for the arguments of a loss or metric behind the first, by position and by name.

    A target that an argument names is that argument. The others are the remaining positional arguments in
    order, never one that can be given by name only, such as an option with a default.
    """
    called = function.forward if isinstance(function, Module) else function
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        return [*targets.values()], {}
    if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    kinds = {p.kind for p in parameters}
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named = {name: targets.pop(name) for name in list(targets) if name in names}
    values: list[Tensor] = []
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        if parameter.name in named:
            values.append(named.pop(parameter.name))
        elif targets:
            values.append(targets.pop(next(iter(targets))))
        else:
            break
    if inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return values, named | targets
    return [*values, *targets.values()], named


def check_loss(loss: Any) -> None:
    """Raises GraphError for a loss that is not one number."""
    if not isinstance(loss, Tensor) or loss.shape != () or not is_float(loss.dtype):
        actual = loss.value.type if isinstance(loss, Tensor) else type(loss).__name__
        raise GraphError(f"loss is {actual} but must be one number of a float dtype; take its mean")


def _is_tuple(fields: Sequence[str]) -> bool:
    """Whether the fields of a batch are positions."""
    return list(fields) == [f"{POSITION}{i}" for i in range(len(fields))]


def _labelled(trace: Trace, output: Any) -> dict[str, Tensor]:
    """The outputs of the model by name; those in nested dicts, lists and tuples by path, such as "heads.0".

    Raises:
        GraphError: one of them is no tensor, there is none, or two have one name.
    """
    labelled: dict[str, Tensor] = {}
    for name, leaf in _outputs(output):
        if name in labelled:
            raise GraphError(f"model returned two outputs named {name!r}; rename one")
        if not (isinstance(leaf, (bool, int, float)) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
            raise GraphError(
                f"{name} of the model is {shown(leaf)} but must be a tensor, or a dict, list or tuple of "
                f"them; leave it out"
            )
        labelled[name] = trace.tensor(leaf)
    if not labelled:
        raise GraphError(f"model returned {shown(output)} without a tensor but must return one or more")
    return labelled


def _outputs(output: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(output, (tuple, list)):
        output = {f"output{i}": part for i, part in enumerate(output)}
    for name, part in output.items() if isinstance(output, Mapping) else (("output", output),):
        for path, leaf in leaves(part):
            yield f"{name}.{path}" if path else name, leaf


def arguments(model: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of the arguments of a model; None if it takes any keyword argument."""
    function = model.forward if isinstance(model, Module) else model
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL)


def _gradients(trace: Trace, loss: Tensor, factor: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """(parameter, its gradient over the whole step) of every trainable parameter, times the factor."""
    sources = [op for op in trace.ops if op.kind == "param" and op.attrs.get("trainable", True)]
    parameters = [Tensor(op.result, trace) for op in sources]
    if not depends_on(trace, loss, parameters):
        raise GraphError(
            "model has no trainable parameter that the loss depends on; there is nothing to train. Numbers "
            "have no gradient behind stop_gradient, integers, comparisons and NumPy arrays"
        )
    pairs = []
    for op, parameter, gradient in zip(
        sources, parameters, differentiate(trace, loss, parameters, factor), strict=True
    ):
        with trace.within(role="backward"), trace.on_behalf_of(op.name, op.scope, op.source):
            pairs.append((parameter, emit_one("accumulate", gradient)))
    return pairs


def annotate_stored(trace: Trace, layouts: Mapping[str, DistAttr]) -> None:
    """Annotate parameters and states with their stored layouts: all programs share the blocks.

    A tensor that ZeRO has split although it is annotated as whole is stored in parts.
    """
    for op in trace.ops:
        attr = layouts.get(str(op.attrs["name"])) if op.kind in ("param", "state") else None
        if attr is not None and (op.name not in trace.attrs or ZERO_ORIGIN in attr.origin.where):
            origin = Origin("user", f"{STORED_ORIGIN}{attr.origin}")
            trace.attrs[op.name] = DistAttr(attr.mesh, attr.spec, origin)


def _check_manual(graph: Graph) -> None:
    for op in graph.sources("param"):
        annotated = op.name in graph.attrs or op.name in graph.axis_attrs
        if not annotated and len(op.result.shape) > 1:
            raise GraphError(
                f"parameter {op.attrs['name']} ({op.result.type}) has no annotation but the mode is "
                f"manual; annotate it "
                'with dg.shard_tensor, or use Strategy(mode="semi")'
            )


def metric_names(metrics: Sequence[Any] | Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Metrics by name; a metric in a sequence is named after its function."""
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        named = {getattr(m, "__name__", type(m).__name__).lower(): m for m in metrics}
        if len(named) != len(metrics):
            raise GraphError("metrics have equal names; pass a dict of name -> metric")
    for reserved in ("epoch", "loss", "skipped_steps", *(f"valid_{name}" for name in ("loss", *named))):
        if reserved in named:
            raise GraphError(
                f"a metric is named {reserved!r} but a history uses that name for another number; rename it: "
                f"pass a dict of name -> metric"
            )
    return named
