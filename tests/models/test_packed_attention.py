"""Packed and shared = separate forwards, for every family, in logits, log-probabilities and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accord.data.packing import make_pack, pack_trees
from accord.data.trees import Segment, Tree, branching, single
from accord.models.forward import PackedModel
from tests.models.families import FAMILIES, OUTSIDE_THE_INTERFACE, VOCABULARY, tiny


def some_trees(seed: int = 0) -> list[Tree]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()

    deep = Tree(  # prompt → turn → {two answers}: ancestors of ancestors
        (
            Segment(np.array(tokens(9), dtype=np.int32), np.zeros(9, dtype=bool)),
            Segment(np.array(tokens(4), dtype=np.int32), np.zeros(4, dtype=bool), 0),
            Segment(np.array(tokens(7), dtype=np.int32), np.ones(7, dtype=bool), 1),
            Segment(np.array(tokens(5), dtype=np.int32), np.ones(5, dtype=bool), 1),
        )
    )
    return [
        branching(tokens(13), [tokens(6), tokens(11)]),
        single(tokens(23), [False] * 4 + [True] * 19),
        branching(tokens(6), [tokens(3), tokens(1), tokens(17), tokens(3)]),
        branching([], [tokens(5), tokens(8)]),
        deep,
        branching(tokens(120), [tokens(100), tokens(2)]),  # longer than a small group takes
    ]


def alone(model, tree: Tree, leaf: int):
    """log π of the trained tokens of one sequence, by a plain forward of it alone: the independent computation."""
    ids = torch.from_numpy(tree.sequence(leaf).astype("int64"))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    trained = torch.from_numpy(tree.sequence_trained(leaf))
    logp = torch.log_softmax(logits, -1)
    return torch.stack([logp[t - 1, ids[0, t]] for t in range(1, ids.shape[1]) if trained[t]])


def all_alone(model, trees):
    return torch.cat([alone(model, tree, leaf) for tree in trees for leaf in tree.leaves])


def assert_same_gradients(one: torch.nn.Module, other: torch.nn.Module, tolerance: float = 1e-5) -> None:
    """Relative to each tensor's largest gradient; a tensor whose gradient is zero in exact arithmetic (a key's bias) to the model's."""
    pairs = [(name, a.grad, b.grad) for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True)]
    largest = max(float(a.abs().max()) for _, a, _ in pairs if a is not None)
    for name, a, b in pairs:
        assert (a is None) == (b is None), name
        if a is not None:
            assert float((a - b).abs().max()) <= tolerance * max(float(a.abs().max()), 0.05 * largest), name


def weights_for(n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_shared_equals_separate_forwards(family: str) -> None:
    trees = some_trees()
    plain, packed = tiny(family), PackedModel(tiny(family))
    assert packed.packed == (family not in OUTSIDE_THE_INTERFACE)
    want = all_alone(plain, trees)
    (weights_for(len(want)) * want).sum().backward()
    pack = make_pack(trees, range(len(trees)))
    got = packed.token_logprobs(pack).logprobs
    assert (got - want).detach().abs().max() <= 1e-5 * max(1.0, float(want.detach().abs().max()))
    (weights_for(len(want)) * got).sum().backward()
    assert_same_gradients(plain, packed.module)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "opt", "gpt_neox", "qwen3"])
def test_the_same_through_gradient_checkpointing(family: str) -> None:
    trees = some_trees()
    pack = make_pack(trees, range(len(trees)))
    gradients = []
    for checkpointing in (False, True):
        model = tiny(family)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        packed = PackedModel(model)
        assert packed.packed
        model.train()
        got = packed.token_logprobs(pack).logprobs
        (weights_for(len(got)) * got).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is None or torch.allclose(gradient, gradients[1][name], rtol=1e-5, atol=1e-6), name


def test_a_layout_is_cut_into_calls_that_hold_every_row_once() -> None:
    from accord.models.packed import SegmentLayout

    pack = make_pack(some_trees(), range(len(some_trees())))
    layout = SegmentLayout(pack.segments, pack.position_ids)
    assert not layout.plain
    assert torch.equal(layout.queries[layout.order], torch.arange(len(pack)))
    long = make_pack([single(range(120), [True] * 120), single(range(130), [True] * 130)], [0, 1])
    assert SegmentLayout(long.segments, long.position_ids).plain  # nothing is copied for long sequences that share nothing


def test_a_frozen_model_in_bf16_holds_rounded_linears_and_answers_the_same() -> None:
    from accord.models.forward import FrozenModel

    pack = make_pack(some_trees(), range(len(some_trees())))
    frozen = FrozenModel(tiny("llama"), precision="bf16")
    other = PackedModel(tiny("llama"), precision="bf16")
    with torch.no_grad():
        want = other.token_logprobs(pack).logprobs
    assert torch.equal(frozen.token_logprobs(pack).logprobs, want)
    dtypes = {name: p.dtype for name, p in frozen.module.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert dtypes["model.embed_tokens.weight"] == dtypes["lm_head.weight"] == torch.float32


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_packed_under_bf16_autocast_is_near_the_same_in_float32(family: str) -> None:
    pack = make_pack(some_trees(), range(len(some_trees())))
    exact, rounded = PackedModel(tiny(family)), PackedModel(tiny(family), precision="bf16")
    want, got = exact.token_logprobs(pack).logprobs, rounded.token_logprobs(pack).logprobs
    assert got.dtype == torch.float32 and (got - want).abs().max() < 0.1
    (weights_for(len(want)) * want).sum().backward()
    (weights_for(len(got)) * got).sum().backward()
    assert_same_gradients(exact.module, rounded.module, tolerance=0.2)


def with_lora(model):
    import peft

    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    )
    return adapted


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "gemma3_text", "bloom"])
def test_the_same_through_lora(family: str) -> None:
    trees = some_trees()
    plain = with_lora(tiny(family)).eval()
    packed = PackedModel(with_lora(tiny(family)).eval())
    want = all_alone(plain, trees)
    got = packed.token_logprobs(make_pack(trees, range(len(trees)))).logprobs
    assert (got - want).detach().abs().max() <= 1e-5 * max(1.0, float(want.detach().abs().max()))
    (weights_for(len(want)) * want).sum().backward()
    (weights_for(len(got)) * got).sum().backward()
    assert_same_gradients(plain, packed.module)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OUTSIDE_THE_INTERFACE])
def test_changing_one_packed_example_leaves_the_others_untouched(family: str) -> None:
    trees = some_trees()
    packed = PackedModel(tiny(family))
    before = make_pack(trees, range(len(trees)))
    changed = list(trees)
    changed[0] = branching(
        [(t + 5) % VOCABULARY for t in trees[0].segments[0].tokens],
        [(trees[0].segments[i].tokens + 7) % VOCABULARY for i in (1, 2)],
    )
    after = make_pack(changed, range(len(trees)))
    with torch.no_grad():
        a, b = (packed.token_logprobs(p).logprobs for p in (before, after))
    own = torch.tensor([before.index[s] == 0 for s in before.sequence])
    assert torch.equal(a[~own], b[~own])
    assert (a[own] - b[own]).abs().max() > 1e-3


def test_a_model_switched_to_segment_attention_still_generates_as_before() -> None:
    for family in ("llama", "mistral", "gpt2"):
        plain, switched = tiny(family), tiny(family)
        assert PackedModel(switched).packed
        ids = torch.arange(3, 15)[None]
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        mask = torch.ones_like(ids)
        assert torch.equal(
            plain.generate(ids, attention_mask=mask, **options), switched.generate(ids, attention_mask=mask, **options)
        )


def test_a_pair_holds_prompt_chosen_and_rejected_and_no_more() -> None:
    pack = make_pack([branching(range(3, 13), [[20, 21, 22], [30, 31]])], [0])
    assert len(pack) == 10 + 3 + 2
    assert pack.input_ids.tolist() == [*range(3, 13), 20, 21, 22, 30, 31]
    assert pack.position_ids.tolist() == [*range(10), 10, 11, 12, 10, 11]
    assert pack.targets.tolist() == [20, 21, 22, 30, 31]
    assert pack.predict.tolist() == [9, 10, 11, 9, 13]  # the prompt's last token predicts both answers' first
    assert pack.sequence.tolist() == [0, 0, 0, 1, 1]
    assert pack.ends.tolist() == [12, 14]


def test_the_packs_hold_every_tree_once_within_the_budget() -> None:
    trees = some_trees()
    packs = pack_trees(trees, 230)
    assert sorted(i for pack in packs for i in pack.tree_index) == list(range(len(trees)))
    assert all(len(pack) <= 230 for pack in packs)
    assert sum(len(pack) for pack in packs) == sum(tree.num_tokens for tree in trees)


@pytest.mark.parametrize("kept", [0, 11 * 60, 11 * VOCABULARY])  # no block of the vocabulary, the first ones, all
@pytest.mark.parametrize("extras", [False, True])
def test_log_probabilities_entropy_and_mean_have_the_right_gradients(monkeypatch, kept: int, extras: bool) -> None:
    from accord.models import logprobs as module

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, 8, generator=generator, requires_grad=True)
    bias = torch.randn(VOCABULARY, generator=generator, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (11,), generator=generator)
    targets[:3] = torch.tensor([0, VOCABULARY - 1, 27])
    w = torch.randn(3, 11, generator=generator, dtype=torch.float64)
    h, m, b = (x.detach().double().requires_grad_() for x in (hidden, weight, bias))
    logp = torch.log_softmax((h @ m.T + b) / 0.7, -1)
    want = (logp[torch.arange(11), targets], -(logp.exp() * logp).sum(-1), logp.mean(-1))
    asked = 3 if extras else 1
    sum((w[i] * want[i]).sum() for i in range(asked)).backward()
    # Several blocks of 27 columns, the last one narrower.
    monkeypatch.setattr(module, "_LEAST_COLUMNS", 27)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(module, "KEPT_ELEMENTS", kept)
    out = module.chunked_logprobs(hidden, weight, bias, targets, 0.7, extras, extras)
    got = (out.logprobs, out.entropy, out.mean_logprobs)[:asked]
    for a, e in zip(got, want, strict=False):
        assert torch.allclose(a.double(), e, atol=1e-5)
    total = sum((w[i] * got[i]).sum() for i in range(asked))
    total.backward(retain_graph=True)
    for a, e in zip((hidden, weight, bias), (h, m, b), strict=True):
        assert torch.allclose(a.grad.double(), e.grad, atol=2e-5)
    total.backward()  # once more: the kept logits are gone, the gradient is the same
    for a, e in zip((hidden, weight, bias), (h, m, b), strict=True):
        assert torch.allclose(a.grad.double(), 2 * e.grad, atol=4e-5)
