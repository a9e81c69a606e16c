"""Generation with a cache of keys and values: the tokens are those of predictions of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.generation import CHUNK, Sampling
from distgraph.errors import GraphError
from distgraph.models import GPT, GPTConfig, Llama, LlamaConfig, annotate, stages

LENGTH, VOCABULARY = 24, 40
GRID = dg.ProcessMesh.grid


def gpt(**changes: Any) -> GPT:
    sizes = {"hidden": 16, "layers": 2, "heads": 4, "vocabulary": VOCABULARY, "sequence": LENGTH}
    return GPT(GPTConfig(**{**sizes, "dtype": "f64", **changes}))


def llama() -> Llama:
    sizes = {"hidden": 16, "layers": 2, "heads": 4, "key_heads": 2, "vocabulary": VOCABULARY, "inner": 32}
    return Llama(LlamaConfig(**sizes, dtype="f64"))


class Written(nn.Module):
    """A model as a user writes it, with a table of positions that is added whole."""

    def __init__(self) -> None:
        self.token = nn.Embedding(VOCABULARY, 16, dtype="f64")
        self.place = nn.Parameter((LENGTH, 16), "f64")
        self.block = nn.TransformerBlock(16, 4, dtype="f64", dropout=0.1)
        self.head = nn.Linear(16, VOCABULARY, dtype="f64")

    def forward(self, text: dg.Tensor) -> dg.Tensor:
        return self.head(self.block(self.token(text) + self.place))


def trained(model: nn.Module, strategy: dg.Strategy | None = None) -> dg.Engine:
    """An engine after two steps, so that no two logits are alike."""
    engine = dg.Engine(model, nn.CrossEntropy(), optim.Adam(lr=0.03), strategy=strategy)
    ids = text(LENGTH + 1, 8)
    for _ in range(2):
        engine.run((ids[:, :-1], ids[:, 1:]))
    return engine


def text(length: int, count: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (count, length)).astype("i4")


def predicted(engine: dg.Engine, prompt: np.ndarray, count: int) -> list[int]:
    """The most probable tokens, each from a prediction of the whole sequence."""
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, LENGTH), "i4")
        padded[0, : len(tokens)] = tokens
        tokens.append(int(engine.predict(padded)[0, len(tokens) - 1].argmax()))
    return [int(token) for token in tokens]


def lists(rows: list[np.ndarray]) -> list[list[int]]:
    return [[int(token) for token in row] for row in rows]


def packed() -> GPT:
    return gpt(packed=True, tied=True)


class Flattened(nn.Module):
    """Batch and positions are one dim in the linear layers, as in many models of PyTorch."""

    def __init__(self) -> None:
        self.token, self.attend = nn.Embedding(VOCABULARY, 16, dtype="f64"), nn.Linear(16, 48, dtype="f64")
        self.head = nn.Linear(16, VOCABULARY, dtype="f64")

    def forward(self, ids: dg.Tensor) -> dg.Tensor:
        (b, n), flat = ids.shape, (-1, 16)
        x = self.token(ids)
        q, k, v = (
            ops.transpose(ops.reshape(part, (b, n, 4, 4)), (0, 2, 1, 3))
            for part in ops.split(ops.reshape(self.attend(ops.reshape(x, flat)), (b, n, 48)), 3, -1)
        )
        y = ops.transpose(ops.attention(q, k, v, causal=True), (0, 2, 1, 3))
        return ops.reshape(self.head(ops.reshape(y, flat)), (b, n, VOCABULARY))


@pytest.mark.parametrize("make", [gpt, packed, llama, Written, Flattened])
def test_tokens_are_those_of_whole_predictions(make: Callable[[], nn.Module]) -> None:
    engine = trained(make())
    prompts = [text(4)[0], text(7)[1]]
    expected = [predicted(engine, prompt, 6) for prompt in prompts]
    assert lists(engine.generate(prompts, 6)) == expected
    engine.run((text(LENGTH), text(LENGTH)))  # the parameters are those of now, and the cache starts anew
    assert lists(engine.generate(prompts[:1], 6)) == [predicted(engine, prompts[0], 6)]


def on_mesh(**sizes: int) -> Callable[[], tuple[nn.Module, dg.Strategy]]:
    def make() -> tuple[nn.Module, dg.Strategy]:
        model = llama()
        annotate(model, GRID(**sizes))
        return model, dg.Strategy(mesh=GRID(**sizes))

    return make


def in_stages(*meshes: dg.ProcessMesh) -> Callable[[], tuple[nn.Module, dg.Strategy]]:
    def make() -> tuple[nn.Module, dg.Strategy]:
        model = llama()
        stages(model, meshes)
        return model, dg.Strategy(micro_batches=2)

    return make


@pytest.mark.parametrize(
    "make",
    [
        on_mesh(tp=2),
        on_mesh(dp=2, tp=2),
        in_stages(GRID(tp=1), GRID(1, tp=1)),
        in_stages(GRID(tp=2), GRID(2, tp=2)),
    ],
    ids=["tp2", "dp2tp2", "pp2", "pp2tp2"],
)
def test_every_layout_generates_the_tokens_of_one_rank(
    make: Callable[[], tuple[nn.Module, dg.Strategy]],
) -> None:
    prompts = [text(4)[0], text(7)[1]]
    expected = lists(trained(llama()).generate(prompts, 8))
    model, strategy = make()
    engine = trained(model, strategy)
    assert lists(engine.generate(prompts, 8)) == expected
    caches = engine.memory.caches.values()
    assert len(caches) == 4  # keys and values of two layers
    split = [record.attr.spec.dims[1] == ("tp",) for record in caches if record.attr.mesh.sizes["tp"] > 1]
    assert all(split)  # like the heads
    programs = [c for c in engine._session.programs.values() if c.mode == "generate"]
    assert len(programs) == 2  # of a chunk of the prompt, of one position
    for compiled in programs:  # positions are written into the caches, which are not copied
        written = {name for worker in compiled.workers.values() for name in worker.storage.in_place}
        assert written == set(engine.memory.caches)


def test_a_long_prompt_is_read_in_chunks_of_which_the_last_overlaps() -> None:
    length = CHUNK + 10
    engine = dg.Engine(gpt(sequence=length, hidden=8, layers=1))
    ids = text(length)
    whole = engine.predict(ids)
    prompts = [ids[0, : CHUNK + 5], ids[1, :-1]]
    produced = engine.generate(prompts, 1)
    assert [int(row[-1]) for row in produced] == [
        int(logits[len(prompt) - 1].argmax()) for logits, prompt in zip(whole, prompts, strict=True)
    ]


def test_end_tokens_end_their_sequence_only() -> None:
    engine = trained(gpt())
    prompts = [text(4)[0], text(7)[1]]
    free = lists(engine.generate(prompts, 8))
    end = free[0][6]
    assert end not in free[0][4:6]
    ended = lists(engine.generate(prompts, 8, end_token=end))
    assert ended[0] == free[0][:7]
    tail = free[1][7:]
    assert ended[1] == free[1][: 7 + (tail.index(end) + 1 if end in tail else 8)]


def test_used_up_positions_are_refused_or_start_anew_from_the_last_tokens() -> None:
    engine = trained(gpt())
    prompt = text(LENGTH - 2)[:1]
    with pytest.raises(GraphError, match=r"take 31 positions but the model has 24; .* or give keep=N"):
        engine.generate(prompt, 10)
    produced = lists(engine.generate(prompt, 10, keep=8))[0]
    assert len(produced) == LENGTH + 8
    anew = lists(engine.generate([produced[LENGTH - 7 : LENGTH + 1]], 7))[0]
    assert produced[LENGTH + 1 :] == anew[8:]


def test_a_loaded_engine_has_the_positions_of_its_model(tmp_path: Any) -> None:
    """Without samples: as after training where the positions are used up, else those that a call needs."""
    engine = trained(gpt())
    engine.save(tmp_path / "saved")
    loaded = dg.Engine(gpt(), nn.CrossEntropy(), optim.Adam(lr=0.03))
    loaded.load(tmp_path / "saved")
    prompt, short = text(LENGTH - 2)[:1], text(5)[:1]
    with pytest.raises(GraphError, match=r"take 31 positions but the model has 24; .* or give keep=N"):
        loaded.generate(prompt, 10)
    with pytest.raises(GraphError, match=r"length is 25 but the model has 24 positions; give length=24 or"):
        loaded.generate(prompt, 10, length=LENGTH + 1)
    for tokens, count in ((prompt, 10), (short, 30), (short, 2)):
        assert lists(loaded.generate(tokens, count, keep=8)) == lists(engine.generate(tokens, count, keep=8))
    assert lists(loaded.generate(short, 4)) == lists(engine.generate(short, 4))


def test_sampling_follows_the_probabilities() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]]))
    many = np.repeat(logits, 4000, 0)

    def shares(**how: Any) -> np.ndarray:
        drawn = Sampling(**how).choose(many, np.random.default_rng(1))
        return np.bincount(drawn, minlength=4) / len(many)

    np.testing.assert_allclose(shares(temperature=1.0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.6), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.5), [1, 0, 0, 0])
    flat = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(shares(temperature=0.5), flat / flat.sum(), atol=0.03)
    assert Sampling().choose(logits, np.random.default_rng(0)).tolist() == [0]


def test_small_integers_of_a_prompt_do_not_limit_the_tokens() -> None:
    model = gpt(vocabulary=1000, layers=1)
    expected = lists(dg.Engine(model).generate([[5, 1, 7]], 6, length=16))
    assert max(expected[0]) > 255
    assert lists(dg.Engine(model).generate([np.array([5, 1, 7], "u1")], 6, length=16)) == expected


def test_a_seed_repeats_its_choices() -> None:
    engine = trained(gpt())
    first, again, other = (lists(engine.generate(text(4), 12, temperature=1.0, seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_caches_are_in_no_checkpoint_and_freed_with_another_batch(tmp_path: Any) -> None:
    engine = trained(gpt())
    engine.generate(text(4), 2)
    engine.save(tmp_path / "checkpoint")
    assert not any("cache" in name for name in engine.memory.records)
    expected = lists(engine.generate(text(4), 4))
    engine.run((text(LENGTH), text(LENGTH)))
    engine.load(tmp_path / "checkpoint")
    assert lists(engine.generate(text(4), 4)) == expected
    engine.generate(text(4, 3), 2)
    assert {record.shape[0] for record in engine.memory.caches.values()} == {3}


def test_cross_attention_to_what_does_not_change_is_not_cached() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            self.token = nn.Embedding(VOCABULARY, 16)
            self.memory = nn.Parameter((2, 5, 16))
            self.attend, self.head = nn.MultiHeadAttention(16, 4), nn.Linear(16, VOCABULARY)

        def forward(self, ids: dg.Tensor) -> dg.Tensor:
            return self.head(self.attend(self.token(ids), self.memory.tensor()))

    engine = dg.Engine(Reader())
    ids = text(6)
    assert [int(row[-1]) for row in engine.generate(ids, 1)] == engine.predict(ids)[:, -1].argmax(-1).tolist()
    assert not engine.memory.caches


class Small(nn.Module):
    """Tokens to logits by a function of hidden states."""

    def __init__(self, mix: Callable[[dg.Tensor], Any]) -> None:
        self.token, self.head, self.mix = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), mix

    def forward(self, ids: dg.Tensor) -> Any:
        y = self.mix(self.token(ids))
        return self.head(y) if y.shape[-1] == 8 else y


def heads(x: dg.Tensor) -> dg.Tensor:
    return ops.reshape(x, (x.shape[0], 1, *x.shape[1:]))


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (lambda x: ops.softmax(x, 1), r"reads .* at all positions, so no position can be computed alone"),
        (lambda x: x - ops.mean(x, 1, keepdims=True), r"reads .* at all positions"),
        (
            lambda x: ops.reshape(ops.attention(heads(x), heads(x), heads(x)), x.shape),
            r"attention .* has no causal mask, so every position depends on later ones",
        ),
        (
            lambda x: ops.mean(x, -1),
            r"model returns output f32\[2, 5\] .* needs one tensor of logits \[2, 5, ",
        ),
    ],
    ids=["softmax", "mean", "attention", "shape"],
)
def test_models_that_are_not_causal_are_refused(mix: Callable[[dg.Tensor], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        dg.Engine(Small(mix)).generate(text(5), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1, 2], []]}, "prompts must be a sequence of sequences of token numbers"),
        ({"prompts": [[0.5]]}, "prompts must be a sequence of sequences of token numbers"),
        ({"prompts": []}, "prompts must be"),
        ({"prompts": 5}, "prompts must be"),
        ({"prompts": [[2**40]]}, r"prompts have token numbers up to 1099511627776 but the model takes 0 to"),
        (
            {"prompts": [[1, 2], [-3, 2**40]]},
            "prompts have token numbers down to -3 but the model takes 0 to .*; ",
        ),
        ({"seed": -1}, "seed of generate is -1 but must be an integer of at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens of generate is 0 but must be an integer of at least 1"),
        ({"temperature": -1.0}, r"temperature of generate is -1.0 but must be a number of at least 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k of generate is 0 but must be an integer of at least 1"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p of generate is 1.5 but must be a number"),
        ({"top_k": 5}, "top_k or top_p is given but temperature is 0"),
        ({"keep": 24}, "keep is 24 but must be less than the 24 positions of the model"),
        ({"end_token": 0.5}, "end_token of generate is 0.5 but must be an integer"),
        ({"end_token": 9999}, "end_token is 9999 but the model gives logits of tokens 0 to"),
        ({"end_token": -1}, "end_token is -1 but the model gives logits of tokens 0 to"),
        ({"length": 0}, "length of generate is 0 but must be an integer of at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    engine = dg.Engine(gpt())
    engine.predict(text(LENGTH))
    given = {"prompts": [[1, 2, 3]], "max_new_tokens": 2, **arguments}
    with pytest.raises(GraphError, match=message):
        engine.generate(**given)


def test_a_model_of_numbers_that_are_no_tokens_is_refused() -> None:
    engine = dg.Engine(nn.Linear(3, 2), nn.MeanSquaredError(), optim.SGD(lr=0.1))
    engine.run((np.zeros((4, 3), "f4"), np.zeros((4, 2), "f4")))
    with pytest.raises(GraphError, match="samples of f32 but generation gives it token numbers; use a model"):
        engine.generate([[1]], 3)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_engines_with_parts_of_states_generate(zero: int) -> None:
    ids, tokens = text(LENGTH), []
    for level in (0, zero):
        strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", zero=level)
        model = gpt()
        engine = dg.Engine(model, model.loss, optim.AdamW(0.01), strategy=strategy)
        engine.fit((ids[:2], ids[:2]), batch_size=2, progress=False)
        tokens.append([row.tolist() for row in engine.generate(ids[:2, :3], 4)])
    assert tokens[0] == tokens[1]
