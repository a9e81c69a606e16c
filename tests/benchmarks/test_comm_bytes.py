"""Bytes that completed programs send, against what XLA's partitioners send for the same annotations.

The numbers of XLA stand in `benchmarks/support/data/gspmd_comm.json` (JAX 0.10.2 on CPU).
"""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import comm_bytes as cb
from benchmarks.support.communication_programs import program_of

CASES = {case.name: case for case in cb.read_cases(cb.DATA)}
SUBSET = [
    "mlp_fwdbwd/dp",
    "mlp_fwdbwd_xgrad/tp",
    "mlp_fwdbwd_xgrad/tp_seqpar",
    "mlp4_residual_fwdbwd/dp_tp",
    "attention_fwdbwd_xgrad/dp_tp",
    "attention_fwdbwd_xgrad/tp_seqpar",
    "attention_packed_qkv_fwd/tp",
    "attention_ulysses_fwd",
    "embed_xent_take_fwdbwd/dp_vocab",
    "embed_xent_onehot_fwdbwd/vocab",
    "embed_xent_take_fwdbwd/hidden",
    "zero3_fwdbwd",
    "zero1_adam",
    "zero3_x_tp_fwdbwd",
    "moe_fwdbwd/ep",
    "moe_fwd/dp_ep",
    "matmul/summa_2d",
    "matmul/row_col_out_rep",
    "matmul/2d_contract_b_out_ab",
    "add/row_plus_col_out_row",
    "reshard/2d_swap",
    "op/softmax_on_sharded_dim",
    "op/layernorm_on_sharded_dim",
    "op/gather_rows_sharded_table",
    "op/batchnorm_stats",
    "op/flip_sharded_dim",
    "op/slice_sharded_dim",
    "chain/only_first_weight",
    "gpt2layers_fwdbwd/dp",
]
CHECKED = [
    "mlp_fwdbwd_xgrad/tp_seqpar",
    "matmul/summa_2d",
    "op/argmax_sharded_dim",
    "op/flip_sharded_dim",
    "moe_fwdbwd/ep",
]


def collectives(result: cb.Result) -> Counter[str]:
    kinds = (op.kind for op in result.build.lowered.ops)
    return Counter(kind.removeprefix("comm.") for kind in kinds if kind.startswith("comm."))


def with_batch(case: cb.Case, rows: int) -> cb.Case:
    """The case with a longer batch: its last argument, a bare array, gets so many rows."""
    *rest, x = case.arguments
    return replace(case, arguments=(*rest, replace(x, shape=(rows, *x.shape[1:]))))


@pytest.mark.parametrize("name", SUBSET)
def test_no_more_bytes_than_xla(name: str) -> None:
    result = cb.measure(CASES[name])
    assert result.ours <= CASES[name].xla * (1 + cb.MARGIN)


@pytest.mark.parametrize("name", CHECKED)
def test_results_are_those_of_the_serial_program(name: str) -> None:
    assert cb.measure(CASES[name], check=True).error <= cb.TOLERANCE


def test_check_sees_a_program_that_computes_something_else() -> None:
    case = CASES["reshard/row_to_col"]
    other = cb.trace_case(replace(case, name="op/softmax_other_dim"))
    result = cb.measure(case)
    assert cb.largest_error(case, other, result.build) > cb.TOLERANCE


def test_every_case_has_a_program() -> None:
    assert len(CASES) == 139
    for name in CASES:
        assert callable(program_of(name))


def test_data_parallel_reduces_every_gradient_once() -> None:
    """With many more rows than weights plain data parallelism is cheapest: 4 gradients and the loss."""
    result = cb.measure(with_batch(CASES["mlp_fwdbwd/dp"], 1 << 18))
    assert collectives(result) == {"all_reduce": 5}
    weights = sum(4 * math.prod(a.shape) for a in result.case.arguments[:-1])
    assert result.ours == 2 * 3 / 4 * (weights + 4)


def test_zero1_scatters_gradients_and_gathers_parameters() -> None:
    """Sharded moments: what an all-reduce of the gradients would send, in two halves around the update."""
    result = cb.measure(with_batch(CASES["zero1_adam"], 1 << 18))
    assert collectives(result) == {"reduce_scatter": 16, "all_gather": 16, "all_reduce": 1, "slice": 16}
    weights = sum(4 * math.prod(a.shape) for a in result.case.arguments if a.kind == "param")
    assert result.ours == 2 * 3 / 4 * (weights + 4)


def test_malformed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text('{"cases": [{"case": "add/x"}]}')
    with pytest.raises(SystemExit, match=r"cases\.json is no file of cases: KeyError 'mesh'"):
        cb.read_cases(path)


def test_paths_of_arguments_nest() -> None:
    paths = [(0, 0, "w"), (0, 1, "w"), (1,)]
    assert cb.nested(paths, ["a", "b", "c"]) == [[{"w": "a"}, {"w": "b"}], "c"]
