"""Index rules: parsing, binding to shapes, legal layouts, and what they mean for operands and results."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distgraph.errors import GraphError
from distgraph.ir.index_rule import (
    OpLayout,
    bind,
    choices,
    make_rule,
    operand_spec,
    representable,
    reshape_rule,
    result_spec,
)
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.ops.contraction import parse_einsum

MESH = ProcessMesh.grid(x=2, y=3)


def layout(**axes: str) -> OpLayout:
    return OpLayout(MESH, tuple((index, tuple(value.split("*"))) for index, value in sorted(axes.items())))


def test_matmul_split_over_k_is_partial() -> None:
    rule = bind("m k, k n -> m n", ((4, 6), (6, 5)))
    assert rule.sizes == {"m": 4, "k": 6, "n": 5}
    assert rule.reduced(0) == {"k"}
    chosen = layout(m="x", k="y")
    assert str(operand_spec(rule, 0, chosen)) == "[x, y]"
    assert str(operand_spec(rule, 1, chosen)) == "[y, _]"
    assert str(result_spec(rule, 0, chosen)) == "[x, _] partial(y)"
    assert str(result_spec(rule, 0, chosen, "max")) == "[x, _] partial(y:max)"


def test_partial_operands_pass_through_linear_groups() -> None:
    rule = bind("m k, k n -> m n", ((4, 6), (6, 5)))
    chosen = OpLayout(MESH, (("m", ("x",)),), (("y", 1),))
    linear = ((0,), (1,))
    assert str(operand_spec(rule, 0, chosen, linear)) == "[x, _]"
    assert str(operand_spec(rule, 1, chosen, linear)) == "[_, _] partial(y)"
    assert str(result_spec(rule, 0, chosen)) == "[x, _] partial(y)"


def test_ellipsis_broadcasts_and_length_one_is_never_split() -> None:
    rule = bind("... m k, ... k n -> ... m n", ((2, 1, 3, 4), (5, 4, 1)))
    assert rule.results == ((("z0",), ("z1",), ("m",), ()),)
    assert rule.operands == ((("z0",), (), ("m",), ("k",)), (("z1",), ("k",), ()))
    assert {name for option in choices(rule, MESH) for name, _ in option.axes} == {"z0", "z1", "m", "k"}


def test_flags_of_whole_and_located_indices() -> None:
    rule = bind("v@ d!, ...! -> ... d!", ((7, 4), (2, 3)))
    assert rule.located == {"v"}
    assert rule.whole == {"d", "z0", "z1"}
    assert {name for option in choices(rule, MESH) for name, _ in option.axes} == {"v"}


def test_sources_take_their_dims_from_the_result() -> None:
    rule = bind("-> ...", (), ((4, 1, 5),))
    assert rule.results == ((("z0",), (), ("z2",)),)
    assert rule.sizes["z2"] == 5


def test_composite_dims_split_only_where_blocks_nest() -> None:
    rule = bind("(a b) -> a b", ((12,),), None, (("a", 4),))
    assert rule.sizes == {"a": 4, "b": 3}
    assert representable(rule, layout(a="x"))
    assert not representable(rule, layout(b="y"))  # every other element of 12: not a block
    assert not representable(rule, layout(a="y"))  # 3 does not divide 4


def test_joint_indices_are_split_together_and_into_single_positions() -> None:
    sizes, terms = {"p": 2, "q": 3}, ((("p",), ("q",)),)
    rule = make_rule("joint", terms, terms, sizes, joint={"p": 2, "q": 3})
    mesh = ProcessMesh.grid(x=2, y=3)
    assert representable(rule, OpLayout(mesh))
    assert representable(rule, OpLayout(mesh, (("p", ("x",)), ("q", ("y",)))))
    assert not representable(rule, OpLayout(mesh, (("p", ("x",)),)))
    assert not representable(rule, OpLayout(mesh, (("p", ("y",)), ("q", ("x",)))))


def test_a_joint_index_may_be_split_into_uneven_parts_of_a_given_number() -> None:
    terms = ((("p",),),)
    rule, mesh = make_rule("joint", terms, terms, {"p": 7}, joint={"p": 3}), ProcessMesh.grid(x=2, y=3)
    assert representable(rule, OpLayout(mesh, (("p", ("y",)),)))
    assert not representable(rule, OpLayout(mesh, (("p", ("x",)),)))
    assert not representable(rule, OpLayout(mesh.weighted(y=(2, 1, 1)), (("p", ("y",)),)))


def test_uneven_minor_blocks_do_not_nest() -> None:
    # a is split to single elements, but blocks of 3 and 2 within 5 are not those of ceil(10 / 4) of the whole
    rule = bind("(a b) -> a b", ((10,),), None, (("a", 2),))
    mesh = ProcessMesh.grid(x=2, y=2)
    assert not representable(rule, OpLayout(mesh, (("a", ("x",)), ("b", ("y",)))))


def test_an_index_is_never_cut_in_more_parts_than_it_has() -> None:
    rule = bind("i -> i", ((2,),))
    assert {str(option) for option in choices(rule, MESH)} == {"{}", "{i:x}"}


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("m k, k n -> m n", ((4, 6), (5, 3)), "index k is 5 in operand 1 but k=6 elsewhere"),
        ("m k -> m", ((4, 6, 2),), "names 2 dims but the operand has shape"),
        ("m, n -> m", ((4,),), "has 2 operands but 1 were given"),
        ("m k", ((4, 6),), "has no '->'"),
    ],
)
def test_errors(text: str, shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        bind(text, shapes)


@pytest.mark.parametrize("spec", ["ij,jk->iz", "ii->i", "i1->i", "i..->i"])
def test_malformed_einsum(spec: str) -> None:
    with pytest.raises(GraphError, match="einsum"):
        parse_einsum(spec)


FACTORS = st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=4)


@given(FACTORS, st.randoms(use_true_random=False))
def test_reshape_factors_both_shapes(factors: list[int], random: object) -> None:
    """Indices of a dim multiply to its length; a split through the rule cuts equal blocks on both sides."""
    flat = [p for n in factors for p in ([2, 2] if n == 4 else [n])]
    cuts = sorted(random.sample(range(1, len(flat)), random.randint(0, len(flat) - 1)))  # type: ignore[attr-defined]
    after = tuple(int(np.prod(flat[a:b])) for a, b in itertools.pairwise([0, *cuts, len(flat)]))
    before = tuple(factors)
    rule = reshape_rule(before, after)
    for term, shape in ((rule.operands[0], before), (rule.results[0], after)):
        assert tuple(int(np.prod([rule.sizes[i] for i in dim])) for dim in term) == shape
    data = np.arange(np.prod(before)).reshape(before)
    for option in choices(rule, MESH):
        left, right = operand_spec(rule, 0, option), result_spec(rule, 0, option)
        assert not right.partial
        for rank in MESH.members:
            block = data[left.slices(before, MESH, rank)]
            again = data.reshape(after)[right.slices(after, MESH, rank)]
            assert np.array_equal(block.ravel(), again.ravel())


def test_reshape_keeps_splits_of_merged_heads() -> None:
    rule = reshape_rule((8, 6, 4), (8, 24))
    heads = rule.operands[0][1][0]
    chosen = OpLayout(MESH, ((heads, ("x",)),))
    assert operand_spec(rule, 0, chosen) == ShardSpec.of([None, "x", None])
    assert result_spec(rule, 0, chosen) == ShardSpec.of([None, "x"])
