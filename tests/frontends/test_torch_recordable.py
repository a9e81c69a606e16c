"""Modules of PyTorch whose code asks for numbers or draws windows: the results are those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.frontends.torch_comparison import compare, engine_losses, torch_losses

import distgraph as dg
from distgraph.errors import GraphError

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
nn: Any = torch.nn
F: Any = torch.nn.functional


class Behind(nn.Module):  # type: ignore[misc]
    """A function of the inputs behind a linear layer or a convolution."""

    def __init__(self, first: Any, function: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self.first, self.function, self.parts = first, function, nn.ModuleDict(modules)

    def forward(self, x: Any, *rest: Any) -> Any:
        return self.function(self.first(x), *rest, **self.parts)


def drawn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def classes(count: int, *shape: int) -> Any:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(3))


def check(net: Any, example: tuple[Any, ...], training: bool, **options: Any) -> None:
    """Compare in f64, and in f32 with the tolerance of single precision."""
    options = {"size": None} | options
    compare(net.double().train(training), example, tolerance=1e-9, **options)
    singles = tuple(x.float() if x.is_floating_point() else x for x in example)
    compare(net.float().train(training), singles, tolerance=1e-5, **options)


# Gaussian loss, adaptive softmax

GAUSSIAN: dict[str, Any] = {
    "one variance each": (lambda h, y, loss: loss(h, y, h.exp() * 1e-6), (3,)),
    "one for a row": (lambda h, y, loss: loss(h, y, h[:, :1].exp()), (3,)),
    "one for a row without its dim": (lambda h, y, loss: loss(h, y, h[:, 0].exp()), (3,)),
    "a number": (lambda h, y, loss: loss(h, y, 0.3), (3,)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", GAUSSIAN)
def test_gaussian_loss(name: str, reduction: str, training: bool) -> None:
    torch.manual_seed(0)
    function, shape = GAUSSIAN[name]
    net = Behind(nn.Linear(5, 3), function, loss=nn.GaussianNLLLoss(full=True, eps=1e-6, reduction=reduction))
    check(net, (drawn(4, 5), drawn(4, *shape)), training, size=3)


def test_a_negative_variance_is_nan_in_place_of_an_error() -> None:
    net = Behind(nn.Identity(), lambda h, loss: loss(h, h, h), loss=nn.GaussianNLLLoss(reduction="none"))
    model = dg.frontends.torch.import_module(net, torch.zeros(2, 3))
    found = dg.Engine(model).predict(np.array([[1, -1, 0]], "f4"))
    np.testing.assert_array_equal(np.isnan(found), [[False, True, False]])


def test_a_variance_of_another_size_is_refused_with_its_line() -> None:
    net = Behind(nn.Linear(5, 3), lambda h, loss: loss(h, h, h[:, :2]), loss=nn.GaussianNLLLoss())
    with pytest.raises(GraphError, match=r"\(test_torch_recordable.py:\d+\).*var is \("):
        dg.frontends.torch.import_module(net, torch.zeros(2, 5))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_adaptive_softmax(bias: bool, training: bool) -> None:
    torch.manual_seed(0)
    net = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [4, 9, 15], div_value=2.0, head_bias=bias)
    check(net, (drawn(12, 16), torch.arange(12) * 7 % 20), training)


def test_outputs_of_adaptive_softmax_have_their_names() -> None:
    net = nn.AdaptiveLogSoftmaxWithLoss(6, 10, [4])
    model = dg.frontends.torch.import_module(net, (torch.zeros(2, 6), torch.tensor([3, 9])))
    engine = dg.Engine(model, lambda output, y: output.loss, dg.optim.SGD(0.1))
    found = engine.predict({"input_": np.zeros((3, 6), "f4"), "target_": np.array([0, 5, 10])})
    np.testing.assert_array_equal(np.isnan(found["output"]), [False, False, True])


# fractional pooling


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("dims", "window", "size"),
    [(2, 2, (5, 4)), (2, (3, 2), (1, 7)), (3, 2, (3, 2, 4)), (3, (1, 2, 3), (2, 1, 3))],
)
def test_fractional_pooling(dims: int, window: Any, size: Any, training: bool) -> None:
    torch.manual_seed(0)
    pool = getattr(nn, f"FractionalMaxPool{dims}d")
    samples = torch.rand(4, 3, dims)
    net = Behind(
        getattr(nn, f"Conv{dims}d")(2, 3, 1),
        lambda h, pool: pool(h),
        pool=pool(window, output_size=size, return_indices=True, _random_samples=samples),
    )
    check(net, (drawn(4, 2, 9, 8, 7)[(..., *(0,) * (3 - dims))],), training)


def test_places_of_fractional_pooling_and_what_is_put_back_there() -> None:
    torch.manual_seed(0)
    net = Behind(
        nn.Conv2d(2, 3, 1),
        lambda h, pool: F.max_unpool2d(*pool(h), 2, output_size=(8, 6)),
        pool=nn.FractionalMaxPool2d(
            1, output_size=(4, 3), return_indices=True, _random_samples=torch.rand(4, 3, 2)
        ),
    )
    check(net, (drawn(4, 2, 8, 6),), False)


@pytest.mark.parametrize("training", [True, False])
def test_windows_of_fractional_pooling_are_drawn(training: bool) -> None:
    """Their starts grow from 0 to the last possible one, and differ from channel to channel."""
    net = nn.FractionalMaxPool2d((1, 3), output_size=(1, 8)).train(training)
    model = dg.frontends.torch.import_module(net, torch.zeros(2, 5, 1, 20))
    graph = dg.trace(model, np.zeros((3, 5, 1, 20), "f4"))
    assert [op.kind for op in graph.ops].count("random_uniform") == 1
    line = np.broadcast_to(np.arange(20, dtype="f4"), (3, 5, 1, 20))
    starts = dg.Engine(model).predict(line)[:, :, 0] - 2
    assert np.all(starts[..., 0] == 0)
    assert np.all(starts[..., -1] == 17)
    assert np.all(np.diff(starts) >= 1)
    assert len({tuple(row) for row in starts.reshape(15, 8)}) > 1


# connectionist temporal classification


def alignment(h: Any, *rest: Any, loss: Any) -> Any:
    return loss(h.log_softmax(-1).transpose(0, 1), *rest)


T, N, C, S = 7, 4, 5, 3
LABELS = torch.tensor([[1, 2, 2], [3, 3, 3], [4, 1, -100], [2, -100, -100]])
CTC: dict[str, Any] = {
    "equal lengths": (LABELS.abs() % 4 + 1, torch.full((N,), T), torch.full((N,), S)),
    "shorter labels": (LABELS, torch.full((N,), T), torch.tensor([3, 3, 2, 1])),
    "shorter inputs": (LABELS, torch.tensor([7, 5, 6, 1]), torch.tensor([3, 3, 2, 1])),
    "no labels": (LABELS, torch.tensor([7, 5, 6, 1]), torch.tensor([3, 3, 2, 0])),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", CTC)
def test_ctc(name: str, reduction: str, training: bool) -> None:
    torch.manual_seed(0)
    net = Behind(nn.Linear(6, C), alignment, loss=nn.CTCLoss(reduction=reduction))
    check(net, (drawn(N, T, 6), *CTC[name]), training)


def test_ctc_with_lengths_that_are_constants_or_numbers() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([3, 3, 2, 1])
    for given in (lengths, lengths.tolist()):
        whole = [T] * N if isinstance(given, list) else torch.full((N,), T)
        loss = nn.CTCLoss(blank=2)
        net = Behind(
            nn.Linear(6, C), lambda h, y, loss, g=given, w=whole: alignment(h, y, w, g, loss=loss), loss=loss
        )
        check(net, (drawn(N, T, 6), torch.where(LABELS == 2, 0, LABELS)), True)


def test_ctc_of_one_sample_and_of_one_step() -> None:
    torch.manual_seed(0)
    one = Behind(
        nn.Linear(6, C),
        lambda h, y, loss: loss(h.log_softmax(-1), y, (T,), (S,)),
        loss=nn.CTCLoss(reduction="none"),
    )
    check(one, (drawn(T, 6), LABELS[0]), True, dynamic_batch=False)
    step = Behind(nn.Linear(6, C), alignment, loss=nn.CTCLoss())
    check(
        step, (drawn(N, 1, 6), LABELS[:, :1].abs() % 4 + 1, torch.ones(N).long(), torch.ones(N).long()), True
    )


def test_ctc_of_scores_that_are_no_logarithms_of_probabilities() -> None:
    """The gradient of torch has a term for log_softmax, which is 0 behind it."""
    torch.manual_seed(0)
    net = Behind(nn.Linear(6, C), lambda h, *rest, loss: loss(h.transpose(0, 1), *rest), loss=nn.CTCLoss())
    check(net, (drawn(N, T, 6), *CTC["shorter inputs"]), True)


def test_ctc_without_an_alignment() -> None:
    """Three equal labels need five steps. The loss is infinite, or zero on request, then with no gradient."""
    torch.manual_seed(0)
    example = (drawn(N, T, 6), LABELS, torch.tensor([7, 4, 6, 1]), torch.tensor([3, 3, 2, 1]))
    check(Behind(nn.Linear(6, C), alignment, loss=nn.CTCLoss(zero_infinity=True)), example, True)
    net = Behind(nn.Linear(6, C), alignment, loss=nn.CTCLoss(reduction="none")).double()
    model = dg.frontends.torch.import_module(net, example)
    found = dg.Engine(model).predict({f"x{n or ''}": x.numpy() for n, x in enumerate(example)})
    np.testing.assert_array_equal(np.isinf(found), [False, True, False, False])


def test_ctc_of_labels_in_one_dim_is_refused() -> None:
    net = Behind(nn.Linear(6, C), alignment, loss=nn.CTCLoss())
    example = (drawn(N, T, 6).float(), torch.ones(9).long(), torch.full((N,), T), torch.tensor([3, 3, 2, 1]))
    model = dg.frontends.torch.import_module(net, example, dynamic_batch=False)
    with pytest.raises(
        GraphError, match=r"targets of 4 samples in one dim, .*; give them as \[samples, labels\]"
    ):
        dg.trace(model, *(x.numpy() for x in example))


def test_ctc_trains_as_in_torch_with_samples_split_over_ranks() -> None:
    torch.manual_seed(0)

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.loss = nn.Linear(6, C), nn.CTCLoss(reduction="none")

        def forward(self, x: Any) -> Any:
            labels = x[:, :S, 0].abs().long() % 4 + 1
            lengths = torch.full((x.shape[0],), T), torch.full((x.shape[0],), S)
            return alignment(self.first(x), labels, *lengths, loss=self.loss)

    net, batches = Net().double(), [(drawn(8, T, 6) * (1 + n), torch.zeros(8)) for n in range(3)]
    model = dg.frontends.torch.import_module(net, batches[0][0])
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp")
    engine = dg.Engine(model, lambda losses, y: dg.ops.mean(losses), dg.optim.SGD(lr=0.1), strategy=strategy)
    theirs = torch_losses(
        net, lambda losses, y: losses.mean(), torch.optim.SGD(net.parameters(), 0.1), batches
    )
    assert engine_losses(engine, batches) == pytest.approx(theirs, rel=1e-9)


# instance norm

INSTANCES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (nn.InstanceNorm1d, (3, 5)),
    "2d": (nn.InstanceNorm2d, (3, 4, 5)),
    "3d": (nn.InstanceNorm3d, (3, 2, 3, 4)),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", INSTANCES)
def test_running_statistics_of_instances_follow_those_of_torch(
    name: str, micro_batches: int, ranks: int
) -> None:
    """In training, with weights of the norm; then in evaluation by the statistics."""
    kind, shape = INSTANCES[name]
    net = nn.Sequential(nn.Linear(shape[-1], shape[-1]), kind(3, affine=True, track_running_stats=True))
    net = net.double()
    batches = [(drawn(8, *shape) * (1 + n), drawn(8, *shape)) for n in range(3)]
    model = dg.frontends.torch.import_module(net, batches[0][0])
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=ranks), batch_axis="dp", micro_batches=micro_batches)
    engine = dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.1), strategy=strategy)
    losses = [engine.run((x.numpy(), y.numpy()))["loss"] for x, y in batches]
    theirs = torch_losses(net, F.mse_loss, torch.optim.SGD(net.parameters(), 0.1), batches)
    assert losses == pytest.approx(theirs, rel=1e-9)
    state, expected = engine.parameters(), net.state_dict()
    for statistic in ("1.running_mean", "1.running_var"):
        np.testing.assert_allclose(state[statistic], expected[statistic].numpy(), rtol=1e-9)
    x = drawn(4, *shape)
    np.testing.assert_allclose(engine.predict(x.numpy()), net.eval()(x).detach().numpy(), rtol=1e-9)


# what does not import


def test_the_backward_of_cross_map_normalisation_is_not_its_derivative() -> None:
    """The reason in the table of modules that do not import."""
    net = nn.CrossMapLRN2d(3, alpha=1.0).double()
    assert not torch.autograd.gradcheck(net, drawn(1, 6, 2, 2).requires_grad_(), raise_exception=False)
    inside = Behind(nn.Identity(), lambda h, norm: norm(h), norm=net)
    with pytest.raises(
        GraphError, match=r"CrossMapLRN2d \(test_torch_recordable.py:\d+\) has a backward in torch"
    ):
        dg.frontends.torch.import_module(inside, drawn(1, 6, 2, 2))
