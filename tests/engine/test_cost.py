"""The model of cost against real tensors, real graphs and published sizes. Two processes: tests/distributed/test_cost.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification

from accord.config import Config, Lora
from accord.data.packing import make_pack, pack_trees
from accord.data.trees import single
from accord.engine.cost import Lengths, _packs, activations, cost, models_of, weight_part
from accord.engine.generate import SamplingParams
from accord.engine.generate.decoding import DecoderGenerator
from accord.models.forward import FrozenModel, PackedModel
from accord.models.heads import keep_head_in_float32
from accord.models.lora import add_lora
from accord.models.quantized import QuantizedLinear, quantize_base
from accord.models.shape import Weight, shape_of
from tests.conftest import FAMILIES, build_tiny

PUBLISHED = [  # numbers in all, as the model's makers' files have them
    (134_515_008, "llama", (576, 1536, 30, 9, 3, 49152, True)),  # SmolLM2-135M
    (6_738_415_616, "llama", (4096, 11008, 32, 32, 32, 32000, False)),  # Llama 2 7B
    (7_615_616_512, "qwen2", (3584, 18944, 28, 28, 4, 152064, False)),  # Qwen2.5 7B
    (70_553_706_496, "llama", (8192, 28672, 80, 64, 8, 128256, False)),  # Llama 3 70B
]


def config_of(family: str, sizes: tuple[Any, ...]) -> Any:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return AutoConfig.for_model(family, **dict(zip(names, sizes[:-1], strict=True)), tie_word_embeddings=sizes[-1])


def settings(stage: str, **changes: Any) -> Config:
    model = {"path": "somewhere", **changes.pop("model", {})}
    return Config(model=model, reward_model={"path": "elsewhere"}, data={"train": "rows"}, **changes).for_stage(stage)


def held(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parametrize(("numbers", "family", "sizes"), PUBLISHED)
def test_published_models_have_their_published_size(numbers, family, sizes):
    assert sum(weight.numbers for weight in shape_of(config_of(family, sizes)).weights) == numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_has_the_bytes_of_the_real_model(family):
    module = build_tiny(family)
    shape = shape_of(module.config)
    assert sum(weight.bytes for weight in shape.weights) == held(module)
    assert shape.layers == 2
    assert shape.vocabulary == len(module.get_output_embeddings().weight)


def test_so_does_one_that_is_frozen_rounded_scalar_or_adapted():
    config = build_tiny("llama").config

    frozen = build_tiny("llama")
    FrozenModel(frozen, precision="bf16")
    shape = shape_of(config, trained=False, rounded=torch.bfloat16)
    assert sum(weight.bytes for weight in shape.weights) == held(frozen)
    assert not shape.trained

    config.num_labels = 1
    scalar = AutoModelForSequenceClassification.from_config(config).float()
    keep_head_in_float32(scalar, torch.bfloat16)
    shape = shape_of(config, scalar=True, trained=False, dtype=torch.bfloat16)
    assert sum(weight.bytes for weight in shape.weights) == held(scalar)
    assert shape.vocabulary == 0

    base = build_tiny("llama").to(torch.bfloat16).requires_grad_(False)
    adapted = add_lora(base, Lora(rank=4), seed=0)
    shape = shape_of(build_tiny("llama").config, lora=Lora(rank=4), dtype=torch.bfloat16)
    assert sum(weight.bytes for weight in shape.weights) == held(adapted)
    assert sum(weight.numbers for weight in shape.trained) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, 1000])
def test_the_parts_of_all_ranks_are_the_whole(ranks):
    for size in ((512, 64), (3,), (1, 64), (1000, 2), (1001, 7)):
        weight = Weight(size, 4, True, True)
        parts = [weight_part(weight, ranks, rank) for rank in range(ranks)]
        assert sum(parts) == weight.numbers
        assert parts[0] == max(parts)


@pytest.mark.parametrize(
    ("trees", "tokens", "budget", "multiple"),
    [(5, 7, 20, 1), (16, 7, 20, 4), (3, 7, 20, 8), (600, 10, 40, 8), (700, 10, 40, 600), (1100, 10, 40, 400), (520, 10, 40, 200)],
)
def test_packs_are_counted_as_they_are_made(trees, tokens, budget, multiple):
    made = pack_trees([single([1] * tokens, [True] * tokens) for _ in range(trees)], budget, multiple)
    assert _packs(trees, tokens, budget, multiple) == len(made)


# -- what a forward keeps ------------------------------------------------------------------------------------------------


def kept_by_a_forward(module: Any, tokens: int, precision: str) -> tuple[int, int]:
    """(bytes of all distinct storages that the graph of a pack keeps, weights aside; trained positions)."""
    model = PackedModel(module, precision=precision)
    pack = make_pack([single(np.arange(tokens) % 500, [True] * tokens)], [0])
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}
    alive, sizes = [], {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)  # or its address would be another's later
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.token_logprobs(pack)
    return sum(sizes.values()), pack.num_targets


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("precision", "tokens"), [("float32", 256), ("bf16", 64)])
def test_activations_are_within_two_percent_of_what_the_graph_keeps(family, precision, tokens):
    module = build_tiny(family, hidden_size=64, intermediate_size=160, num_hidden_layers=4, head_dim=16).train()
    found, targets = kept_by_a_forward(module, tokens, precision)
    shape, bf16 = shape_of(module.config), precision == "bf16"
    wanted = activations(shape, tokens, bf16=bf16, gpu=False, checkpointing=False) + targets * shape.hidden * 4
    if bf16:
        wanted += cost(
            settings("sft", train={"precision": precision}), models_of(settings("sft"), module.config), Lengths(8, 8)
        ).training.casts
    assert found == pytest.approx(wanted, rel=0.02)


def test_with_checkpointing_only_the_inputs_of_blocks_are_kept():
    module = build_tiny("llama", hidden_size=64, num_hidden_layers=6).train()
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, targets = kept_by_a_forward(module, 256, "float32")
    shape = shape_of(module.config)
    one_block = activations(shape, 256, bf16=False, gpu=False, checkpointing=True) - 256 * 6 * 64 * 4  # computed again, later
    last = 256 * (2 * 4 * 64 + 2 * 4 * shape.head_dim)
    assert found == pytest.approx(256 * 6 * 64 * 4 + last + targets * 64 * 4, rel=0.03)
    assert one_block > last


# -- work and sampling ---------------------------------------------------------------------------------------------------


def test_operations_of_a_training_pass_are_those_that_torch_counts():
    module = build_tiny("llama", hidden_size=64, num_hidden_layers=4).train()
    tokens = 16
    model = PackedModel(module)
    pack = make_pack([single(np.arange(tokens), [True] * tokens)], [0])
    with FlopCounterMode(display=False) as counter:
        model.token_logprobs(pack).logprobs.sum().backward()
    config = settings("sft", train={"batch_size": 1, "max_tokens": 1024})
    models = models_of(config, module.config)
    wanted = cost(config, models, Lengths(1, tokens - 1)).work
    not_counted = 2 * 512 * 64 * (tokens - 1)  # a product that is written into its place: the head's gradient
    not_counted += 3 * 2 * models.policy.queries * tokens * tokens * 4  # the CPU's attention
    assert counter.get_total_flops() + not_counted == wanted.train
    assert wanted.read == wanted.sample == 0


def test_the_samplers_memory_is_what_it_takes(tiny_tokenizer):
    module = build_tiny("llama")
    generator = DecoderGenerator(module, tiny_tokenizer)
    generator.generate([[5] * 20] * 6, SamplingParams(max_new_tokens=30, min_new_tokens=30))
    config = settings("ppo", train={"batch_size": 6})
    sampling = cost(config, models_of(config, module.config), Lengths(20, 30), gpu=False).sampling
    assert sampling.cache == generator.cache.nbytes
    assert sampling.copies == pytest.approx(generator.nbytes - generator.cache.nbytes, rel=0.02)


# -- settings ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seven_billion() -> Any:
    return config_of(*PUBLISHED[2][1:])


def test_ppo_holds_four_models_dpo_two_and_lora_one():
    architecture = config_of("qwen2", (3584, 18944, 2, 28, 4, 152064, False))
    numbers = sum(weight.numbers for weight in shape_of(architecture).weights)
    lengths = Lengths(512, 512)

    def of(stage: str, **changes: Any) -> Any:
        config = settings(stage, train={"max_tokens": 8192, "batch_size": 8}, **changes)
        return cost(config, models_of(config, architecture), lengths).training

    assert of("sft").weights == of("sft").gradients == 4 * numbers
    assert of("sft").moments == 8 * numbers
    assert of("dpo").frozen == 4 * numbers
    assert of("dpo", reference={"precompute": True}).frozen == 0
    assert of("dpo", dpo={"loss_type": "orpo"}).frozen == 0
    head = 152064 * 3584 - 3584  # a scalar model has another
    assert of("ppo").weights == 8 * numbers - 4 * head
    assert of("ppo").frozen == 8 * numbers - 4 * head
    assert of("ppo", ppo={"advantage": "grpo", "samples_per_prompt": 4}).weights == 4 * numbers
    lora = of("dpo", model={"lora": {}})
    assert lora.frozen == 0
    own, shared = (of("ppo", model={"lora": {"share_base": share}}) for share in (False, True))
    assert own.weights - shared.weights == 4 * numbers - 4 * head  # a base
    assert shared.frozen == 0 and own.frozen == 4 * numbers - 4 * head
    assert lora.moments < of("dpo").moments / 100
    four = of("dpo", model={"lora": {}, "quantization": "nf4"})
    matrices = shape_of(architecture).products
    assert lora.weights - four.weights == pytest.approx((4 - 0.515869) * matrices, rel=1e-5)
    assert (lora.casts, four.casts) == (0, 4 * 3584 * 18944)  # the largest matrix, made for its product


def test_a_base_in_4_bits_holds_what_is_said():
    pytest.importorskip("bitsandbytes")
    base = build_tiny("llama", hidden_size=256, intermediate_size=512).requires_grad_(False)
    config = base.config
    quantize_base(base, torch.device("cpu"))
    adapted = add_lora(base, Lora(rank=4), seed=0)
    shape = shape_of(config, lora=Lora(rank=4), quantized=True)
    buffers = sum(b.numel() * b.element_size() for m in adapted.modules() if isinstance(m, QuantizedLinear) for b in m.buffers())
    assert sum(weight.bytes for weight in shape.weights) == pytest.approx(held(adapted) + buffers, rel=1e-3)


def test_graphs_of_actor_and_critic_are_there_together_where_an_experience_is_one_optimizer_step(seven_billion):
    def kept(ranks: int = 1, batch_size: int = 8, **ppo: Any) -> int:
        config = settings("ppo", train={"max_tokens": 8192, "batch_size": batch_size}, ppo=ppo)
        return cost(config, models_of(config, seven_billion), Lengths(512, 512), ranks).training.activations

    one = kept(ppo_epochs=2)
    assert kept() == kept(batch_size=32) == 2 * one  # in one pack and in four
    assert (
        kept(ranks=2, batch_size=16) == kept(batch_size=32, mini_batches=4) == kept(advantage="grpo", samples_per_prompt=7) == one
    )


def test_more_ranks_hold_less_and_a_frozen_root_stays_whole(seven_billion):
    config = settings("dpo", train={"max_tokens": 8192, "batch_size": 5000})
    models = models_of(config, seven_billion)
    one, eight = (cost(config, models, Lengths(512, 512), ranks) for ranks in (1, 8))
    assert one.traffic.total == one.training.gathered == 0
    assert eight.training.weights == one.training.weights // 8
    assert eight.training.moments == one.training.moments // 8
    assert eight.training.gathered > 2 * 4 * 2 * 152064 * 3584
    assert eight.checkpoint == 12 * 7_615_616_512 // 8


def test_whole_copies_send_gradients_alone(seven_billion):
    config = settings("sft", train={"shard": "never"})
    traffic = cost(config, models_of(config, seven_billion), Lengths(512, 512), 8).traffic
    assert traffic.gathers == traffic.sampling == 0
    assert traffic.reductions == 2 * 7 * 4 * 7_615_616_512 // 8


def test_offloaded_parts_are_in_the_cpus_memory(seven_billion):
    config = settings("sft", train={"offload": "params", "shard": "always"})
    found = cost(config, models_of(config, seven_billion), Lengths(512, 512), 8)
    assert found.training.weights == found.training.moments == 0
    assert found.host == 16 * 7_615_616_512 // 8
