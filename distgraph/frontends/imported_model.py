"""ImportedModel: what models of all other frameworks share; Outputs: their results under names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.dtypes import is_float
from distgraph.nn import Buffer, Module, Parameter
from distgraph.ops import accumulate, stop_gradient
from distgraph.tracing.tracer import Trace


class Outputs(dict[str, Any]):
    """Named outputs of a model, also as attributes: `output["logits"]` and `output.logits`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __missing__(self, name: str) -> Any:
        raise GraphError(f"model has no output {name!r} but {', '.join(self)}")


class ImportedModel(Module):
    """A model of another framework, evaluated by rules for its ops.

    Args:
        name: of the model, for errors.
        tensors: parameters and buffers by name; a tied one may have several.
        inputs: names of the inputs of the example.
    """

    def __init__(self, name: str, tensors: Mapping[str, Parameter], inputs: Sequence[str]) -> None:
        self._name = name
        self._tensors = tensors
        self._forward = self._with_signature(inputs)

    @property
    def forward(self) -> Any:
        """What the model computes of the inputs of its example, by position or by name."""
        return self._forward

    def parameter(self, name: str) -> Parameter:
        """The parameter or buffer of a name in the other framework, such as "layers.0.w".

        Raises:
            GraphError: there is none of this name.
        """
        if name not in self._tensors:
            near = difflib.get_close_matches(name, self._tensors, 3)
            raise GraphError(
                f"{self._name} has no parameter or buffer {name!r}; "
                + (f"near are {', '.join(near)}" if near else "named_tensors() lists them")
            )
        return self._tensors[name]

    def _run(self, inputs: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def _with_signature(self, names: Sequence[str]) -> Any:
        """A function of inputs with these names, which calls `_run` with a dict of them."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                inputs = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise GraphError(
                    f"imported model takes the inputs of its example, ({', '.join(names)}): {error}"
                ) from None
            return self._run(inputs)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward

    def _update(self, name: str, new: Any) -> None:
        """Set a buffer at the end of the step to the mean of its new values over the micro-batches."""
        buffer = self._tensors[name]
        assert isinstance(buffer, Buffer)
        trace = Trace.current()
        value = trace.tensor(new)
        if any(op.role == "optimize" and value.value in op.results for op in trace.ops):
            buffer.update(value)  # computed once a step already
            return
        wide = value if is_float(value.dtype) else value.astype("f64")
        mean = accumulate(stop_gradient(wide))
        with trace.within(role="optimize"):
            buffer.update(mean if mean.dtype == buffer.dtype else mean.astype(buffer.dtype))


def returned(kind: str, outputs: Mapping[str, Any]) -> Any:
    """The outputs as the model returns them: the only one for `kind` "tensor", else a tuple or `Outputs`."""
    if kind == "tensor":
        return next(iter(outputs.values()))
    return tuple(outputs.values()) if kind == "tuple" else Outputs(outputs)
