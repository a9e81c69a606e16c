"""Modules: names, shapes and numbers against formulas, and whole models against PyTorch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from support.programs.serial_training import GPT, Step, forward, initial, mean_cross_entropy, step_of

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.nn.parameter import Buffer
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tracer import Trace


def sequence(rng: np.random.Generator, classes: int, *shape: int) -> Any:
    return rng.integers(0, classes, shape).astype(np.int32)


# names


def test_parameters_are_named_by_their_path_a_modules_own_first() -> None:
    model = GPT(11, 8, 2, 2, 5)
    names = [name for name, _ in model.named_parameters()]
    assert names[:2] == ["positions", "tokens.weight"]
    assert names[2:8] == [
        "blocks.0.norm1.weight", "blocks.0.norm1.bias", "blocks.0.attn.q.weight", "blocks.0.attn.q.bias",
        "blocks.0.attn.k.weight", "blocks.0.attn.k.bias",
    ]  # fmt: skip
    assert names[-1] == "head.weight"
    assert [p.name for p in model.parameters()] == names
    width, inner, tokens = 8, 4 * 8, 11
    block = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    assert model.parameter_count() == 2 * block + 2 * tokens * width + 5 * width + 2 * width


def test_parts_in_private_attributes_are_parts_of_the_model() -> None:
    class Private(nn.Module):
        def __init__(self) -> None:
            self._up, self._rest = nn.Linear(3, 4), [nn.Linear(4, 4), nn.Linear(4, 2)]

        def forward(self, x: Any) -> Any:
            return self._rest[1](self._rest[0](self._up(x)))

    names = [name for name, _ in Private().named_parameters()]
    assert names == [
        f"{part}.{name}" for part in ("_up", "_rest.0", "_rest.1") for name in ("weight", "bias")
    ]


def test_a_part_that_a_public_attribute_holds_too_has_its_path_there() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            self._all = [nn.Linear(3, 3), nn.Linear(3, 3)]
            self.first, self._own = self._all[0], self

        def forward(self, x: Any) -> Any:
            return self._all[1](self.first(x))

    names = [name for name, _ in Stacked().named_parameters()]
    assert names == [f"{part}.{name}" for part in ("first", "_all.1") for name in ("weight", "bias")]


def test_a_prediction_and_a_target_of_other_shapes_have_no_squared_difference() -> None:
    column, row = np.zeros((4, 1), "f4"), np.zeros(4, "f4")
    with pytest.raises(GraphError, match=r"shape \(4, 1\) and a target of shape \(4,\) but"):
        dg.trace(nn.MeanSquaredError(), column, row)


def test_ops_carry_the_path_of_their_module() -> None:
    trace = Trace()
    with trace.activate():
        GPT(11, 8, 2, 2, 5)(trace.source("input", "x", (3, 5), "i32"))
    scopes = {op.kind: op.scope for op in trace.ops}
    assert scopes["attention"] == "blocks.1.attn"
    assert {op.scope for op in trace.ops if op.kind == "gelu"} == {"blocks.0.mlp", "blocks.1.mlp"}
    assert {op.scope for op in trace.ops if op.kind == "matmul"} >= {
        "blocks.0.attn.q",
        "blocks.1.mlp.down",
        "head",
    }


def test_parts_of_a_named_model_keep_their_names_when_called_alone() -> None:
    model = GPT(11, 8, 2, 1, 5)
    assert model.named_parameters()
    trace = Trace()
    with trace.activate():
        x = model.tokens(trace.source("input", "x", (3, 5), "i32"))
        model.head(model.norm(x))
    assert {op.attrs["name"] for op in trace.ops if op.kind == "param"} == {
        "tokens.weight", "norm.weight", "norm.bias", "head.weight",
    }  # fmt: skip
    assert next(name for name, _ in model.blocks[0].mlp.named_parameters()) == "up.weight"
    assert model.blocks[0].mlp.up.weight.name == "blocks.0.mlp.up.weight"


def test_parts_added_after_the_first_call_are_named_at_the_next() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    for expected in (
        ["steps.0.weight", "steps.0.bias"],
        ["steps.0.weight", "steps.0.bias", "steps.1.weight"],
    ):
        trace = Trace()
        with trace.activate():
            model(trace.source("input", "x", (2, 3), "f32"))
        assert [op.attrs["name"] for op in trace.ops if op.kind == "param"] == expected
        model.steps.append(nn.Linear(4, 2, bias=False))


def test_two_roots_with_one_name_are_refused() -> None:
    trace = Trace()
    with trace.activate():
        x = trace.source("input", "x", (2, 3), "f32")
        y = nn.Linear(3, 3)(x)
        with pytest.raises(GraphError, match="two parameters are named 'weight' in trace 'main'"):
            nn.Linear(3, 3)(y)


def test_a_tied_parameter_is_one_parameter_and_its_gradients_sum(rng: np.random.Generator) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            self.embed = nn.Embedding(6, 4, dtype="f64")
            self.table = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return ops.matmul(self.embed(ids), self.table.T)

    model, ids = Tied(), np.array([2, 5, 2])
    assert [name for name, _ in model.named_parameters()] == ["table"]
    trace = Trace()
    with trace.activate():
        logits = model(trace.source("input", "x", (3,), "i64"))
        (grad,) = differentiate(trace, ops.reduce("sum", logits), [trace.tensor(model.table)])
        graph = trace.finish({"g": grad})
    w = rng.standard_normal((6, 4))
    found, _ = interpret(graph, {"x": ids}, {model.table.name: w})
    expected = np.tile(w[ids].sum(0), (6, 1))  # as the output matrix
    np.add.at(expected, ids, w.sum(0))  # as the table
    np.testing.assert_allclose(found["g"], expected)


def test_an_annotated_parameter_is_pinned_in_every_trace() -> None:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    layer = nn.Linear(4, 6)
    layer.weight.annotation = DistAttr(mesh, ShardSpec.of([None, "tp"]), Origin("user", "train.py:12"))
    for _ in range(2):
        trace = Trace()
        with trace.activate():
            layer(trace.source("input", "x", (2, 4), "f32"))
        assert str(trace.attrs["weight"].spec) == "[_, tp]"
    layer.weight.annotation = DistAttr(mesh, ShardSpec.of(["tp"]), Origin("user", "train.py:13"))
    trace = Trace()
    with trace.activate(), pytest.raises(ShardingError, match=r"has 1 dims but shape \(4, 6\) has 2"):
        layer(trace.source("input", "x", (2, 4), "f32"))


def test_a_parameter_acts_as_a_tensor() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            self.a = nn.Parameter((3,), "f64", ("constant", 2.0))
            self.frozen = nn.Parameter((3,), "f64", ("ones",), trainable=False)

        def forward(self, x: Any) -> Any:
            return (1 + self.a) * x @ self.a.reshape(3, 1) - self.frozen.sum() + np.sqrt(self.a)[0]

    model, x = Scale(), np.arange(3.0)
    found = forward(model, x, params=initial(model))
    np.testing.assert_allclose(found, [3 * 3 * 2 - 3 + np.sqrt(2)])


def test_a_module_that_defines_call_instead_of_forward_is_refused() -> None:
    with pytest.raises(GraphError, match=r"^Called defines __call__, .* define forward instead"):
        type("Called", (nn.Module,), {"__call__": lambda self, x: x})


def test_a_parameter_outside_of_a_module_is_refused() -> None:
    trace = Trace()
    with trace.activate(), pytest.raises(GraphError, match="used outside of a module"):
        nn.Parameter((3,)) + 1.0


# numbers


def test_dropout_and_batch_norm_differ_between_training_and_evaluation(rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 3, 4, 5))
    drop = nn.Dropout(0.5)
    np.testing.assert_array_equal(forward(drop, x, params={}), x)
    assert (forward(drop, x, params={}, training=True) == 0).mean() > 0.3
    norm = nn.BatchNorm2d(3, dtype="f64")
    params = initial(norm) | {
        "running_mean": np.array([1.0, 2.0, 3.0]),
        "running_var": np.array([4.0, 9.0, 1.0]),
    }
    expected = (x - params["running_mean"][:, None, None]) / np.sqrt(params["running_var"] + 1e-5)[
        :, None, None
    ]
    np.testing.assert_allclose(forward(norm, x, params=params), expected)
    batch = (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)
    np.testing.assert_allclose(forward(norm, x, params=params, training=True), batch)


@pytest.mark.parametrize(("top_k", "normalize"), [(1, None), (1, True), (2, None), (2, False), (3, None)])
def test_mixture_of_experts_against_tokens_one_by_one(
    rng: np.random.Generator, top_k: int, normalize: bool | None
) -> None:
    groups, tokens, width, hidden, experts = 2, 7, 4, 5, 3
    options = {"top_k": top_k, "normalize": normalize, "dtype": "f64"}
    model = nn.MoE(width, hidden, experts, capacity_factor=0.6, activation=ops.tanh, **options)
    divided = top_k > 1 if normalize is None else normalize
    params = {name: rng.standard_normal(p.shape) for name, p in model.named_parameters()}
    x = rng.standard_normal((groups, tokens, width))
    capacity = int(np.ceil(top_k * 0.6 * tokens / experts))
    expected, auxiliary, dropped = np.zeros_like(x), [], 0
    for group in range(groups):
        scores = x[group] @ params["gate"]
        gates = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        order = np.argsort(-gates, 1)
        count = np.zeros(experts, int)
        for choice in range(top_k):
            for t in range(tokens):
                e = order[t, choice]
                if count[e] < capacity:
                    weight = gates[t, e] / (gates[t, order[t, :top_k]].sum() if divided else 1.0)
                    expected[group, t] += weight * np.tanh(x[group, t] @ params["up"][e]) @ params["down"][e]
                else:
                    dropped += 1
                count[e] += 1
        share = np.bincount(order[:, 0], minlength=experts) / tokens
        auxiliary.append(experts * (share * gates.mean(0)).sum())
    assert dropped  # the capacity matters in this case

    class Both(nn.Module):
        def __init__(self) -> None:
            self.moe = model

        def forward(self, x: Any) -> Any:
            y = self.moe(x)
            scalars = [ops.reshape(each, (1,)) for each in (self.moe.loss, self.moe.dropped)]
            return ops.concat([ops.reshape(y, (-1,)), *scalars], 0)

    found = forward(Both(), x, params={f"moe.{name}": p for name, p in params.items()})
    np.testing.assert_allclose(
        found[:-2].reshape(x.shape), expected, rtol=1e-6, atol=1e-8
    )  # 1e-9 in the share
    np.testing.assert_allclose(found[-2], np.mean(auxiliary))
    np.testing.assert_allclose(found[-1], dropped / (groups * tokens * top_k))


def test_running_statistics_follow_the_batches(rng: np.random.Generator) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            self.norm = nn.BatchNorm2d(3, momentum=0.25, dtype="f64")

        def forward(self, x: Any) -> Any:
            return self.norm(x)

    data = [(rng.standard_normal((4, 3, 2, 2)) + 1, rng.standard_normal((4, 3, 2, 2))) for _ in range(3)]
    step = step_of(Net(), lambda y, target: ops.mean(ops.square(y - target)), optim.SGD(lr=0.0), data[0])
    _, state = step.train(data)
    mean, var = np.zeros(3), np.ones(3)
    for x, _ in data:
        mean = 0.75 * mean + 0.25 * x.mean((0, 2, 3))
        var = 0.75 * var + 0.25 * x.var((0, 2, 3), ddof=1)
    np.testing.assert_allclose(state["norm.running_mean"], mean)
    np.testing.assert_allclose(state["norm.running_var"], var)


def test_shapes_that_do_not_fit_a_layer_name_the_line_of_the_user() -> None:
    trace = Trace()
    with (
        trace.activate(),
        pytest.raises(GraphError, match=r"test_modules.py:\d+.*index k is 5 in the left operand but 4"),
    ):
        nn.Linear(4, 6)(trace.source("input", "x", (2, 5), "f32"))
    with pytest.raises(GraphError, match="width 8, heads 3 and key_heads 3 do not fit"):
        nn.MultiHeadAttention(8, 3)


# PyTorch


def torch_block(torch: Any, width: int, heads: int) -> Any:
    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            names = ("q", "k", "v", "out")
            self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.attn = torch.nn.ModuleDict({name: torch.nn.Linear(width, width) for name in names})
            up, down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
            self.mlp = torch.nn.ModuleDict({"up": up, "down": down})

        def forward(self, x: Any) -> Any:
            h, (b, s, _) = self.norm1(x), x.shape
            q, k, v = (self.attn[n](h).view(b, s, heads, -1).transpose(1, 2) for n in "qkv")
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attn["out"](o.transpose(1, 2).reshape(b, s, width))
            return x + self.mlp["down"](torch.nn.functional.gelu(self.mlp["up"](self.norm2(x))))

    return Block()


def torch_gpt(torch: Any, vocabulary: int, width: int, heads: int, layers: int, length: int) -> Any:
    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(vocabulary, width)
            self.positions = torch.nn.Parameter(torch.empty(length, width))
            self.blocks = torch.nn.ModuleList([torch_block(torch, width, heads) for _ in range(layers)])
            self.norm = torch.nn.LayerNorm(width)
            self.head = torch.nn.Linear(width, vocabulary, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Model()


def torch_losses(
    torch: Any, model: Any, optimizer: Any, start: Any, batches: Any, linear: Any
) -> list[float]:
    """Train a PyTorch model from our initial weights; its linear layers keep weights transposed."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = torch.from_numpy(np.array(start[name]))
            p.copy_(value.T if name.endswith(".weight") and linear(name) else value)
    losses, steps = [], optimizer(model.parameters())
    for x, y in batches:
        logits = model(torch.from_numpy(x))
        labels = torch.from_numpy(y).long().reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels)
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses


def ours(model: Any, optimizer: Any, batches: Any) -> tuple[list[float], Step]:
    step = step_of(model, mean_cross_entropy, optimizer, batches[0], seed=4)
    return step.train(batches)[0], step


@pytest.mark.torch
def test_gpt_follows_the_loss_curve_of_pytorch(rng: np.random.Generator) -> None:
    import torch

    shape = (23, 24, 4, 2, 10)
    batches = [(sequence(rng, 23, 3, 10), sequence(rng, 23, 3, 10)) for _ in range(5)] * 4
    losses, step = ours(GPT(*shape), optim.AdamW(lr=3e-3, weight_decay=0.1), batches)
    theirs = torch_losses(
        torch,
        torch_gpt(torch, *shape),
        lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
        step.start,
        batches,
        lambda name: "attn" in name or "mlp" in name or "head" in name,
    )
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2
    np.testing.assert_allclose(losses, theirs, atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize(("momentum", "rate"), [(0.0, 0.5), (0.9, 0.1)])
def test_mlp_follows_the_loss_curve_of_pytorch(
    rng: np.random.Generator, momentum: float, rate: float
) -> None:
    import torch

    model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 5))
    layers = [
        torch.nn.Linear(7, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 16),
        torch.nn.SiLU(),
        torch.nn.Linear(16, 5),
    ]
    peer = torch.nn.Sequential(OrderedDict(steps=torch.nn.Sequential(*layers)))
    batches = [(rng.standard_normal((9, 7)).astype(np.float32), sequence(rng, 5, 9)) for _ in range(5)] * 4
    losses, step = ours(model, optim.SGD(lr=rate, momentum=momentum, nesterov=momentum > 0), batches)
    theirs = torch_losses(
        torch,
        peer,
        lambda p: torch.optim.SGD(p, lr=rate, momentum=momentum, nesterov=momentum > 0),
        step.start,
        batches,
        lambda name: True,
    )
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1  # the same five batches, three passes later
    np.testing.assert_allclose(losses, theirs, atol=1e-4)


@pytest.mark.torch
def test_conv_net_follows_the_loss_curve_of_pytorch(rng: np.random.Generator) -> None:
    import torch

    def build(m: Any, norm: Any, flatten: Any) -> list[Any]:
        return [
            m.Conv2d(2, 6, 3, padding=1), norm(6), m.ReLU(), m.MaxPool2d(2),
            m.Conv2d(6, 8, (2, 3), stride=(1, 2), groups=2), m.AvgPool2d((2, 1)), flatten, m.Linear(16, 4),
        ]  # fmt: skip

    model = nn.Sequential(*build(nn, nn.BatchNorm2d, nn.Flatten()))
    layers = build(torch.nn, torch.nn.BatchNorm2d, torch.nn.Flatten())
    peer = torch.nn.Sequential(OrderedDict(steps=torch.nn.Sequential(*layers)))
    batches = [
        (rng.standard_normal((6, 2, 6, 10)).astype(np.float32), sequence(rng, 4, 6)) for _ in range(5)
    ] * 4
    losses, step = ours(model, optim.Adam(lr=1e-2), batches)
    theirs = torch_losses(
        torch,
        peer,
        lambda p: torch.optim.Adam(p, lr=1e-2),
        step.start,
        batches,
        lambda name: name == "steps.7.weight",
    )
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2
    np.testing.assert_allclose(losses, theirs, atol=1e-4)


@pytest.mark.torch
def test_grouped_query_attention_is_that_of_pytorch(rng: np.random.Generator) -> None:
    import torch

    model = nn.MultiHeadAttention(12, 6, key_heads=2, causal=False, dtype="f64")
    params = {name: rng.standard_normal(p.shape) for name, p in model.named_parameters()}
    x = rng.standard_normal((2, 5, 12))
    q, k, v = (x @ params[f"{n}.weight"] + params[f"{n}.bias"] for n in "qkv")
    split = [torch.from_numpy(t.reshape(2, 5, -1, 2)).transpose(1, 2) for t in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*split, enable_gqa=True)
    expected = o.transpose(1, 2).reshape(2, 5, 12).numpy() @ params["out.weight"] + params["out.bias"]
    np.testing.assert_allclose(forward(model, x, params=params), expected, rtol=1e-10)


def test_buffers_that_take_the_value_of_another_tensor() -> None:
    """Of the weight before the step, and of each other."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.layer = nn.Linear(3, 2, bias=False, dtype="f64")
            self.last = Buffer((3, 2), "f64")
            self.a, self.b = Buffer((), "f64", ("ones",)), Buffer((), "f64")

        def forward(self, x: Any) -> Any:
            self.last.update(self.layer.weight.tensor())
            self.a.update(self.b.tensor())
            self.b.update(self.a.tensor())
            return self.layer(x)

    engine = dg.Engine(Model(), nn.MeanSquaredError(), dg.optim.SGD(lr=0.1))
    weight = np.empty(0)
    for step in range(3):
        engine.run((np.ones((4, 3)), np.full((4, 2), 5.0)))
        last, a, b = (engine.memory.block(name, 0) for name in ("last", "a", "b"))
        assert not step or np.array_equal(last, weight)
        assert (float(a), float(b)) == (step % 2, 1 - step % 2)
        weight = engine.memory.block("layer.weight", 0).copy()
