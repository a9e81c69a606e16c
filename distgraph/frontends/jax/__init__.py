"""Functions of JAX: a function of parameters and inputs becomes a module that trains, plans and exports.

    model = dg.frontends.jax.import_function(apply, params, example)
    engine = dg.Engine(model, nn.CrossEntropy(), optim.AdamW(1e-3))

`jax.make_jaxpr` gives the primitives of the function (`jaxpr_tracing`), which `jaxpr_evaluator` runs on
traced tensors with one rule for each primitive (`rule_registry`, `lax/`). Calls and branches are inlined
(`control_flow`), short scans unrolled and long ones loops (`jaxpr_loops`). What depends on no input and no
parameter is computed by JAX itself and becomes a constant (`folded_constant`).
"""

from __future__ import annotations

from distgraph.errors import RuntimeFault, installing

try:
    import jax as jax
except ModuleNotFoundError as error:
    raise RuntimeFault(
        f"jax is not installed but distgraph.frontends.jax imports its functions; {installing('jax')}"
    ) from error

from distgraph.frontends.jax import lax as lax
from distgraph.frontends.jax.imported_function import ImportedFunction, import_function
from distgraph.frontends.jax.optax_optimizers import import_optimizer
from distgraph.frontends.jax.rule_registry import register_jax_primitive

__all__ = ["ImportedFunction", "import_function", "import_optimizer", "register_jax_primitive"]
