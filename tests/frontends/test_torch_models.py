"""Models of several families, written in plain torch or built by `transformers`: numbers as torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.files.clusters import cluster_of
from support.frontends.torch_comparison import compare, engine_losses, torch_losses
from support.frontends.torch_models import LSTMLanguageModel, MoE, TinyGPT, TinyLlama, Translator, UNet, ViT
from support.programs.searched import slow

import distgraph as dg
from distgraph import ops

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


def ids(*shape: int, below: int = 20) -> Any:
    return torch.arange(int(np.prod(shape))).reshape(shape) % below


def numbers(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


PLAIN: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "vit": (ViT, (numbers(4, 3, 12, 8),)),
    "moe": (MoE, (numbers(4, 7, 6),)),
    "unet": (UNet, (numbers(4, 3, 12, 8),)),
    "llama": (TinyLlama, (ids(4, 6),)),
    "lstm": (LSTMLanguageModel, (ids(4, 5),)),
    "translator": (Translator, (ids(4, 6), ids(4, 5))),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_in_plain_torch_computes_what_torch_computes(name: str) -> None:
    make, example = PLAIN[name]
    compare(make().double(), example, tolerance=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_patterns_of_a_llama_are_fused_ops(dtype: str) -> None:
    net = TinyLlama().to(getattr(torch, dtype)).eval()
    model = dg.frontends.torch.import_module(net, ids(4, 6))
    graph = dg.trace(model, np.zeros((3, 6), np.int64))
    kinds = [op.kind for op in graph.ops]
    assert (kinds.count("rms_norm"), kinds.count("attention"), kinds.count("rsqrt")) == (5, 2, 0)
    groups = [op.operands[1].shape[1] for op in graph.ops if op.kind == "attention"]
    assert groups == [2, 2]
    assert "broadcast_to" not in kinds
    assert {name for name, _ in model.named_tensors()} == set(
        net.state_dict()
    )  # not the constant frequencies


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "vocab_size": 20, "max_position_embeddings": 32,
}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "use_cache": False}


def gpt2(t: Any) -> Any:
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return t.GPT2LMHeadModel(
        t.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=20, use_cache=False, **drop)
    )


def vit(t: Any) -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return t.ViTForImageClassification(t.ViTConfig(image_size=8, patch_size=4, num_labels=5, **sizes))


def mixtral(t: Any) -> Any:
    model = t.MixtralForCausalLM(t.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2))
    model.set_experts_implementation("batched_mm")
    return model


class T5(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, t: Any) -> None:
        super().__init__()
        sizes = {
            "num_layers": 2,
            "num_decoder_layers": 2,
            "d_model": 16,
            "d_ff": 24,
            "d_kv": 8,
            "num_heads": 2,
        }
        config = t.T5Config(
            **sizes, vocab_size=20, use_cache=False, dropout_rate=0.0, decoder_start_token_id=0
        )
        self.t5 = t.T5ForConditionalGeneration(config)

    def forward(self, source: Any, target: Any) -> Any:
        return self.t5(input_ids=source, decoder_input_ids=target).logits


TRANSFORMERS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "gpt2": (gpt2, (ids(4, 8),)),
    "llama": (lambda t: t.LlamaForCausalLM(t.LlamaConfig(**DECODER)), (ids(4, 8),)),
    "qwen3": (lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**DECODER, head_dim=8)), (ids(4, 8),)),
    "mixtral": (mixtral, (ids(4, 8),)),
    "vit": (vit, (numbers(4, 3, 8, 8),)),
    "t5": (T5, (ids(4, 8), ids(4, 5))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_of_transformers_computes_what_torch_computes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    make, example = TRANSFORMERS[name]
    model = compare(make(transformers).double().train(), example)
    assert len(model.parameters()) > 10


@pytest.mark.slow
def test_outputs_of_transformers_have_their_names_and_train() -> None:
    transformers = pytest.importorskip("transformers")
    net = gpt2(transformers)
    model = dg.frontends.torch.import_module(net, {"input_ids": ids(4, 8)})
    peer = copy.deepcopy(net)
    optimizer = torch.optim.Adam(peer.parameters(), lr=1e-2)
    batches = [(ids(4, 8) + k, ids(4, 8, below=7)) for k in range(2)] * 4
    batches = [(x % 20, y) for x, y in batches]

    def loss(output: Any, labels: Any) -> Any:
        return ops.mean(ops.cross_entropy(output.logits, labels))

    engine = dg.Engine(model, loss, dg.frontends.torch.import_optimizer(optimizer))
    theirs = torch_losses(lambda x: peer(x).logits, mean_of_torch, optimizer, batches)
    np.testing.assert_allclose(engine_losses(engine, batches), theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generated_tokens_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    make, _ = TRANSFORMERS[name]
    net = make(transformers).double().eval()
    for parameter in net.parameters():
        parameter.data *= 3  # so that no two logits are alike
    prompts = ids(2, 5)
    whole = {"attention_mask": torch.ones_like(prompts), "pad_token_id": 0, "eos_token_id": None}
    expected = net.generate(prompts, max_new_tokens=8, do_sample=False, **whole)
    engine = dg.Engine(dg.frontends.torch.import_module(net, {"input_ids": ids(2, 13)}))
    assert [row.tolist() for row in engine.generate(prompts.numpy(), 8, length=13)] == expected.tolist()


def mean_of_torch(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def searched(name: str) -> tuple[Any, Any]:
    """A model and batches for a search on four ranks."""
    made = torch.Generator().manual_seed(3)
    if name == "gpt":
        net, make = TinyGPT(), lambda: torch.randint(0, 23, (8, 6), generator=made)
    else:
        net, make = MoE(), lambda: torch.randn(8, 6, 6, generator=made)
    return net, [(make(), torch.randint(0, 5, (8, 6), generator=made)) for _ in range(4)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_training_by_a_searched_plan_follows_the_loss_curve_of_torch(name: str) -> None:
    net, batches = searched(name)
    model = dg.frontends.torch.import_module(net, batches[0][0])
    peer = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-2)
    engine = dg.Engine(
        model,
        lambda logits, labels: ops.mean(ops.cross_entropy(logits, labels)),
        dg.frontends.torch.import_optimizer(optimizer),
        strategy=dg.Strategy(mode="auto"),
        cluster=cluster_of(slow(2, 2)),
    )
    theirs = torch_losses(peer, mean_of_torch, optimizer, batches)
    np.testing.assert_allclose(engine_losses(engine, batches), theirs, rtol=0, atol=1e-4)


def test_tensor_parallel_training_follows_the_loss_curve_of_torch() -> None:
    net, batches = searched("gpt")
    model = dg.frontends.torch.import_module(net, batches[0][0])
    mesh = dg.ProcessMesh.grid(dp=2, tp=2)
    for block in range(2):
        dg.shard_tensor(model.parameter(f"blocks.{block}.mlp.0.weight"), mesh, ["tp", None])
        dg.shard_tensor(model.parameter(f"blocks.{block}.mlp.2.weight"), mesh, [None, "tp"])
    peer = copy.deepcopy(net)
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1, momentum=0.9)
    engine = dg.Engine(
        model,
        lambda logits, labels: ops.mean(ops.cross_entropy(logits, labels)),
        dg.frontends.torch.import_optimizer(optimizer),
        strategy=dg.Strategy(mesh=mesh, batch_axis="dp", micro_batches=2),
    )
    theirs = torch_losses(peer, mean_of_torch, optimizer, batches)
    np.testing.assert_allclose(engine_losses(engine, batches), theirs, rtol=0, atol=1e-4)
