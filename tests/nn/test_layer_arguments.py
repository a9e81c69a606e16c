"""Arguments of layers that make no sense: refused where the layer is made, with the way to write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distgraph import nn
from distgraph.errors import GraphError


@pytest.mark.parametrize("init", [("normal",), ("gauss", 1.0), (), ("zeros", 1)])
def test_malformed_initial_values_are_refused(init: Any) -> None:
    with pytest.raises(GraphError, match=r"init is .* but must"):
        nn.Parameter((3,), init=init)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (np.ones((8, 4)), r"an array of shape \(8, 4\) and dtype float64 .*; .* parameter.assign"),
        (3, r'3 but must be a tuple; write \("constant", 3\)$'),
        ("zeros", r"'zeros' but must be a tuple; write \(.zeros.,\)$"),
        (
            ("normal", "x"),
            r"\('normal', 'x'\) but must have one finite number of at least 0 .*; write \(.normal., std\)$",
        ),
        (
            ("normal", -0.1),
            r"\('normal', -0.1\) but must have one finite number of at least 0 after 'normal'; ",
        ),
        (
            ("uniform", -1),
            r"\('uniform', -1\) but must have one finite number of at least 0 after 'uniform'; ",
        ),
        (
            ("uniform", float("nan")),
            r"\('uniform', nan\) but must have one finite number of at least 0 after",
        ),
        (
            ("constant", 1e300),
            r"\('constant', 1e\+300\) but the parameter is f32, which cannot hold that number",
        ),
        (("ones", 1.0), r"\('ones', 1.0\) but must have nothing after 'ones'; write \(.ones.,\)$"),
        (("like", "w"), r"\('like', 'w'\) but must have the name of a parameter and its init after 'like'; "),
        (("gauss", 1.0), r'.* but must be \("normal", std\), .*\("zeros",\) or \("ones",\); choose'),
    ],
)
def test_malformed_initial_values_are_explained(init: Any, message: str) -> None:
    with pytest.raises(GraphError, match=f"^init is {message}"):
        nn.Parameter((8, 4), init=init)


@pytest.mark.parametrize(
    ("dtype", "number"), [("i32", 0.5), ("i32", 1e12), ("u8", -1), ("bool", 2), ("f16", 1e6)]
)
def test_numbers_that_a_parameter_cannot_hold_are_refused(dtype: str, number: float) -> None:
    with pytest.raises(
        GraphError, match=f"but the parameter is {dtype}, which cannot hold that number; give"
    ):
        nn.Parameter((2,), dtype, ("constant", number))


@pytest.mark.parametrize("init", [("normal", 0.02), ("uniform", 3.0)])
def test_random_fractions_of_an_integer_parameter_are_refused(init: Any) -> None:
    with pytest.raises(GraphError, match="the parameter is i32, which cannot hold fractions; give a float"):
        nn.Parameter((2,), "i32", init)
    with pytest.raises(GraphError, match="the parameter is bool, which cannot hold fractions"):
        nn.Linear(2, 3, init=init, dtype=bool)


@pytest.mark.parametrize(("dtype", "number"), [("i64", 2**53 + 1), ("u8", 255), ("bool", 1), ("f16", -6e4)])
def test_numbers_that_a_parameter_holds(dtype: str, number: float) -> None:
    assert nn.Parameter((2,), dtype, ("constant", number)).init == ("constant", number)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.Linear, nn.MLP])
@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("zeros", r"^init is 'zeros' but must be a tuple; write \(.zeros.,\)$"),
        (0.5, r'^init is 0.5 but must be a tuple; write \("constant", 0.5\)$'),
        (np.zeros, r'but must be \("normal", std\), .*; choose one of these$'),
    ],
)
def test_layers_explain_an_init_as_parameters_do(layer: Any, init: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        layer(2, 3, init=init)


@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(6, 6, 4), (6, 4, 3), (4, 6, 3), (2, 4, 4)])
def test_groups_of_a_convolution_divide_its_channels(inputs: int, outputs: int, groups: int) -> None:
    message = f"Conv2d has {inputs} inputs and {outputs} outputs but {groups} groups, which must divide both"
    with pytest.raises(GraphError, match=message):
        nn.Conv2d(inputs, outputs, 3, groups=groups)


@pytest.mark.parametrize("padding", [(1,), (1, 1, 1), [(0, 1)]])
def test_padding_has_an_entry_for_each_dim(padding: Any) -> None:
    for layer in (lambda: nn.Conv2d(2, 2, 3, padding=padding), lambda: nn.MaxPool2d(3, padding=padding)):
        with pytest.raises(
            GraphError, match=r"padding of \w+2d is .* but images have 2 dims; give one number"
        ):
            layer()
