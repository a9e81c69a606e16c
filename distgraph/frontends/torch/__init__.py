"""Models of PyTorch: a `torch.nn.Module` becomes a module that trains, plans and exports like any other.

    model = dg.frontends.torch.import_module(net, example)
    engine = dg.Engine(model, nn.CrossEntropy(), dg.frontends.torch.import_optimizer(optimizer))

`torch.export` gives the graph of ATen ops of the module (`exporting`), which `graph_evaluator` runs on traced
tensors with one rule for each op (`rule_registry`, `aten/`). Parts of the graph that depend on no input and
no parameter are computed by torch itself and become constants (`folded_constant`).
"""

from __future__ import annotations

from distgraph.errors import RuntimeFault, installing

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise RuntimeFault(
        f"torch is not installed but distgraph.frontends.torch imports its modules; {installing('torch')}"
    ) from error

from distgraph.frontends.torch import aten as aten
from distgraph.frontends.torch.imported_module import ImportedModule, import_module
from distgraph.frontends.torch.opaque_ops import OpaqueOp
from distgraph.frontends.torch.rule_registry import register_torch_op
from distgraph.frontends.torch.torch_optimizers import import_optimizer

__all__ = ["ImportedModule", "OpaqueOp", "import_module", "import_optimizer", "register_torch_op"]
