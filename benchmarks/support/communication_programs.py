"""The programs of `data/gspmd_comm.json` in distgraph.

The mathematics of each, without a layout except where the program itself constrains one. A program takes the
arguments of its case (tensors in nested dicts and lists) and returns its results in the same form; `leaves`
gives them in the order of the file: sequences in order, dicts by key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from distgraph import numpy as dnp
from distgraph import ops, reshard, shard_tensor
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

Program = Callable[..., Any]
HEADS = 8  # of the attention programs whose projections are packed; the shapes do not tell


@dataclass(frozen=True, slots=True)
class Setting:
    """What a program may need beside its arguments: the mesh of its constraints and the number of heads."""

    mesh: ProcessMesh
    heads: int = HEADS


SETTING: ContextVar[Setting] = ContextVar("setting")


def leaves(tree: Any) -> list[Tensor]:
    """Tensors of nested dicts and sequences, in order."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def rebuild(tree: Any, flat: Sequence[Any]) -> Any:
    """The tree with its leaves replaced, in the order of `leaves`."""
    queue = iter(flat)

    def fill(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: fill(part[key]) for key in sorted(part)}
        if isinstance(part, (list, tuple)):
            return [fill(p) for p in part]
        return next(queue)

    return fill(tree)


def tree_map(function: Callable[..., Any], *trees: Any) -> Any:
    """A function of corresponding leaves."""
    return rebuild(trees[0], [function(*parts) for parts in zip(*map(leaves, trees), strict=True)])


def value_and_grad(function: Program, wrt: Sequence[int] | int = 0) -> Program:
    """The program that returns the loss and the gradients of the arguments at `wrt`, shaped like those."""

    def run(*args: Any) -> Any:
        loss = function(*args)
        chosen = args[wrt] if isinstance(wrt, int) else [args[i] for i in wrt]
        found = differentiate(Trace.current(), loss, leaves(chosen))
        return [loss, rebuild(chosen, found)]

    return run


def constrain(x: Tensor, *dims: Any) -> Tensor:
    """The value lies so: pinned where it is made, or moved when it lies elsewhere already."""
    full = tuple(_present(d) for d in dims) + (None,) * (x.ndim - len(dims))
    producer = next(op for op in reversed(x.trace.ops) if any(v.name == x.value.name for v in op.results))
    if x.value.name in x.trace.attrs or not producer.operands:
        return reshard(x, SETTING.get().mesh, full)
    return shard_tensor(x, SETTING.get().mesh, full)  # type: ignore[no-any-return]


def _present(dim: Any) -> Any:
    """A constraint written for axis "x" names the first axis of a mesh that has no such axis."""
    axes = SETTING.get().mesh.axes
    return axes[0] if dim == "x" and "x" not in axes else dim


# ---------------------------------------------------------------- multi-layer perceptron


def mlp(p: Any, x: Tensor) -> Tensor:
    return ops.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def mlp_loss(p: Any, x: Tensor) -> Tensor:
    return (mlp(p, x) ** 2).mean()


def stack_loss(layers: Any, x: Tensor) -> Tensor:
    for p in layers:
        x = x + mlp(p, x)
    return (x**2).mean()


# ---------------------------------------------------------------- attention


def attention(p: Any, x: Tensor) -> Tensor:
    q, k, v = (ops.einsum("bsd,dhe->bhse", x, p[n]) for n in ("wq", "wk", "wv"))
    scores = ops.einsum("bhse,bhte->bhst", q, k) * q.shape[-1] ** -0.5
    causal = ops.tril(ops.ones(scores.shape[-2:], "bool"))
    weights = ops.softmax(ops.where(causal, scores, -1e9), -1)
    mixed = ops.einsum("bhst,bhte->bhse", weights, v)
    return x + ops.einsum("bhse,hed->bsd", mixed, p["wo"])


def attention_loss(p: Any, x: Tensor) -> Tensor:
    return (attention(p, x) ** 2).mean()


def attention_packed(p: Any, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    inner = p["wo"].shape[0]
    packed = (x @ p["wqkv"]).reshape(batch, length, 3, SETTING.get().heads, inner // SETTING.get().heads)
    q, k, v = dnp.moveaxis(packed, 2, 0)
    weights = ops.softmax(ops.einsum("bshe,bthe->bhst", q, k), -1)
    return ops.einsum("bhst,bthe->bshe", weights, v).reshape(batch, length, inner) @ p["wo"]


def ulysses(p: Any, x: Tensor) -> Tensor:
    q, k, v = (
        constrain(ops.einsum("bsd,dhe->bhse", x, p[n]), None, "x", None, None) for n in ("wq", "wk", "wv")
    )
    weights = ops.softmax(ops.einsum("bhse,bhte->bhst", q, k) * q.shape[-1] ** -0.5, -1)
    mixed = constrain(ops.einsum("bhst,bhte->bhse", weights, v), None, None, "x", None)
    return ops.einsum("bhse,hed->bsd", mixed, p["wo"])


# ---------------------------------------------------------------- embedding and cross-entropy


def embed_take(p: Any, ids: Tensor, labels: Tensor) -> Tensor:
    logits = ops.embedding(p["wte"], ids) @ p["head"]
    return -ops.pick(ops.log_softmax(logits, -1), labels).mean()


def embed_onehot(p: Any, ids: Tensor, labels: Tensor) -> Tensor:
    logits = ops.embedding(p["wte"], ids) @ p["head"]
    chosen = (logits * ops.one_hot(labels, logits.shape[-1])).sum(-1)
    return (ops.logsumexp(logits, -1) - chosen).mean()


# ---------------------------------------------------------------- a training step with Adam


def adam(p: Any, m: Any, v: Any, x: Tensor, shard: Callable[[Tensor], Tensor] | None = None) -> Any:
    loss, g = value_and_grad(stack_loss)(p, x)
    if shard is not None:
        g = tree_map(shard, g)
    with Trace.current().within(role="optimize"):
        m = tree_map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
        v = tree_map(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
        p = tree_map(lambda a, b, c: a - 1e-3 * b / (ops.sqrt(c) + 1e-8), p, m, v)
    return [p, m, v, loss]


def adam_constrained(p: Any, m: Any, v: Any, x: Tensor) -> Any:
    return adam(p, m, v, x, lambda g: constrain(g, "x"))


# ---------------------------------------------------------------- mixture of experts


def moe(p: Any, x: Tensor, by_expert: Program | None = None, by_group: Program | None = None) -> Tensor:
    """Top-1 routing with the dispatch and combine contractions of GShard; x [groups, tokens, width]."""
    tokens, experts = x.shape[1], p["wg"].shape[1]
    capacity = 2 * tokens // experts
    gates = ops.softmax(x @ p["wg"], -1)
    chosen = ops.one_hot(ops.argmax(gates, -1), experts)
    position = (ops.cumsum(chosen, 1) - 1) * chosen
    fits = ops.cast(position < capacity, "f32")[..., None]
    dispatch = chosen[..., None] * ops.one_hot(ops.cast(position, "i32"), capacity, outside="zeros") * fits
    combine = dispatch * (gates * chosen)[..., None]
    routed = ops.einsum("gsec,gsm->egcm", dispatch, x)
    routed = routed if by_expert is None else by_expert(routed)
    hidden = ops.relu(ops.einsum("egcm,emf->egcf", routed, p["wi"]))
    out = ops.einsum("egcf,efm->egcm", hidden, p["wo"])
    out = out if by_group is None else by_group(out)
    return ops.einsum("gsec,egcm->gsm", combine, out)


def moe_constrained(p: Any, x: Tensor) -> Tensor:
    return moe(p, x, lambda a: constrain(a, "x"), lambda o: constrain(o, None, "x"))


def moe_loss(p: Any, x: Tensor) -> Tensor:
    return (moe(p, x) ** 2).mean()


# ---------------------------------------------------------------- GPT


def standardise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * ops.rsqrt(variance + 1e-5) * w + b


def gpt_loss(p: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Pre-norm transformer; heads, queries, keys and values packed [heads, 3, width of a head]."""
    (batch, length), width, heads = ids.shape, p["wte"].shape[1], SETTING.get().heads
    head = width // heads
    h = ops.embedding(p["wte"], ids) + p["wpe"]
    causal = ops.tril(ops.ones((length, length), "bool"))
    for layer in range(sum(name.endswith("_qkv_w") for name in p)):
        w = {name.split("_", 1)[1]: p[name] for name in p if name.startswith(f"h{layer}_")}
        packed = standardise(h, w["ln1_w"], w["ln1_b"]) @ w["qkv_w"] + w["qkv_b"]
        packed = packed.reshape(batch, length, heads, 3, head)
        q, k, v = (dnp.moveaxis(t, 1, 2) for t in dnp.moveaxis(packed, 3, 0))
        scores = q @ dnp.swapaxes(k, -1, -2) * head**-0.5
        weights = ops.softmax(ops.where(causal, scores, -1e9), -1)
        h = h + dnp.moveaxis(weights @ v, 1, 2).reshape(batch, length, width) @ w["o_w"] + w["o_b"]
        up = standardise(h, w["ln2_w"], w["ln2_b"]) @ w["fc_w"] + w["fc_b"]
        h = h + ops.gelu(up, approximate=True) @ w["pr_w"] + w["pr_b"]
    logits = standardise(h, p["lnf_w"], p["lnf_b"]) @ p["head"]
    chosen = (logits * ops.one_hot(labels, logits.shape[-1])).sum(-1)
    return (ops.logsumexp(logits, -1) - chosen).mean()


# ---------------------------------------------------------------- single operators


def same_conv(x: Tensor, w: Tensor) -> Tensor:
    sides = [((k - 1) // 2, k // 2) for k in w.shape[2:]]
    return ops.conv(x, w, padding=sides)


def layer_statistics(a: Tensor) -> Tensor:
    return (a - a.mean(-1, keepdims=True)) * ops.rsqrt(a.var(-1, keepdims=True) + 1e-5)


def batch_statistics(x: Tensor) -> Tensor:
    dims = (0, 2, 3)
    return (x - x.mean(dims, keepdims=True)) * ops.rsqrt(x.var(dims, keepdims=True) + 1e-5)


def split_rows(a: Tensor) -> Tensor:
    return a.reshape(8, a.shape[0] // 8, a.shape[1])


def split_columns(a: Tensor) -> Tensor:
    return a.reshape(a.shape[0], 3, a.shape[1] // 3)


OPERATORS: dict[str, Program] = {
    "op/softmax_on_sharded_dim": lambda a: ops.softmax(a, -1),
    "op/softmax_other_dim": lambda a: ops.softmax(a, -1),
    "op/layernorm_on_sharded_dim": layer_statistics,
    "op/sum_sharded_dim": lambda a: a.sum(1),
    "op/sum_other_dim": lambda a: a.sum(0),
    "op/sum_all": lambda a: a.sum(),
    "op/max_all": lambda a: a.max(),
    "op/mean_then_broadcast": lambda a: a - a.mean(),
    "op/argmax_sharded_dim": lambda a: a.argmax(-1),
    "op/cumsum_sharded_dim": lambda a: ops.cumsum(a, 1),
    "op/sort_sharded_dim": lambda a: ops.sort(a, 1),
    "op/transpose": lambda a: a.T,
    "op/reshape_merge": lambda a: a.reshape(-1),
    "op/reshape_merge_minor": lambda a: a.reshape(-1),
    "op/reshape_split": split_rows,
    "op/reshape_split_minor": split_columns,
    "op/slice_sharded_dim": lambda a: a[: a.shape[0] // 2],
    "op/slice_other_dim": lambda a: a[:, :100],
    "op/shift_roll": lambda a: ops.roll(a, 1, 0),
    "op/concat_sharded_dim": lambda a: ops.concat([a, a], 0),
    "op/concat_other_dim": lambda a: ops.concat([a, a], 1),
    "op/pad_sharded_dim": lambda a: ops.pad(a, (1, 0), (1, 0)),
    "op/flip_sharded_dim": lambda a: a[::-1],
    "op/outer_product_norm": lambda a: a / ops.sqrt((a * a).sum()),
    "op/gram": lambda a: a.T @ a,
    "op/gram_out_row": lambda a: a.T @ a,
    "op/uneven_rows": lambda a, b: a @ b,
    "op/conv_spatial": same_conv,
    "op/conv_batch": same_conv,
    "op/conv_outchannel": same_conv,
    "op/conv_inchannel": same_conv,
    "op/conv_fwdbwd_batch": lambda w, x: value_and_grad(lambda k: (same_conv(x, k) ** 2).mean())(w)[1],
    "op/gather_rows_sharded_table": lambda t, i: t[i],
    "op/gather_cols_sharded_table": lambda t, i: t[i],
    "op/scatter_add_rows": ops.scatter_add,
    "op/batchnorm_stats": batch_statistics,
}

PROGRAMS: dict[str, Program] = {
    **OPERATORS,
    "mlp_fwd": mlp,
    "mlp_fwdbwd": value_and_grad(mlp_loss),
    "mlp_fwdbwd_xgrad": value_and_grad(mlp_loss, (0, 1)),
    "mlp_fwdbwd_free_out": value_and_grad(mlp_loss),
    "mlp4_residual_fwdbwd": value_and_grad(stack_loss),
    "attention_fwd": attention,
    "attention_fwdbwd_xgrad": value_and_grad(attention_loss, (0, 1)),
    "attention_packed_qkv_fwd": attention_packed,
    "attention_ulysses_fwd": ulysses,
    "embed_xent_take_fwd": embed_take,
    "embed_xent_take_fwdbwd": value_and_grad(embed_take),
    "embed_xent_onehot_fwd": embed_onehot,
    "embed_xent_onehot_fwdbwd": value_and_grad(embed_onehot),
    "zero3_fwdbwd": value_and_grad(stack_loss),
    "zero3_x_tp_fwdbwd": value_and_grad(stack_loss),
    "zero3_adam": adam,
    "zero1_adam": adam,
    "dp_adam": adam,
    "zero2_adam_constraint": adam_constrained,
    "moe_fwd": moe,
    "moe_fwd/ep_constraints": moe_constrained,
    "moe_fwdbwd": value_and_grad(moe_loss),
    "matmul": lambda a, b: a @ b,
    "add": lambda a, b: a + b,
    "reshard": lambda a: a * 2.0,
    "chain": lambda x, a, b, c: ((x @ a) @ b) @ c,
    "gpt2layers_fwdbwd": value_and_grad(gpt_loss),
}


def program_of(case: str) -> Program:
    """The program of a case: its whole name, else the longest registered beginning of it. Raises KeyError."""
    if case in PROGRAMS:
        return PROGRAMS[case]
    family = case.split("/")[0]
    if family in PROGRAMS:
        return PROGRAMS[family]
    known = [name for name in PROGRAMS if case.startswith(name)]
    if not known:
        raise KeyError(f"case {case!r} has no program; there are {', '.join(sorted(PROGRAMS))}")
    return PROGRAMS[max(known, key=len)]
