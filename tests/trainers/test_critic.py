"""The critic's variants: another tokenizer, a head on the actor's trunk, an adapter on the actor's base."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from accord.config import Config
from accord.data.alignment import characters_before
from accord.data.packing import Pack, pack_trees
from accord.data.records import Message, Prompt
from accord.data.template import ConversationEncoder
from accord.engine.trained import TrainedModel
from accord.errors import AccordError, ConfigError
from accord.models.load import load_causal, load_scalar
from accord.models.save import save_adapter, save_model
from accord.models.scratch import train_tokenizer
from accord.rewards.base import Sample
from accord.rewards.grouping import prompt_trees
from accord.trainers.critic import AdapterCritic, Critic, HeadCritic, TextCritic, make_critic, reward_on_base
from tests.conftest import TEXTS, build_tiny
from tests.trainers.ppo_setup import settings

LORA = {"model": {"lora": {"rank": 2}}}


@pytest.fixture
def policy(tiny_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Config, TrainedModel]]:
    """`policy({"critic": …})` → the configuration of a tiny PPO run and its policy, ready to train."""

    def made(changes: dict[str, Any] | None = None, family: str = "llama") -> tuple[Config, TrainedModel]:
        config = settings(tiny_folder(family), tmp_path / "run", changes).for_stage("ppo")
        return config, TrainedModel(load_causal(config.model, seed=3, trainable=True), config.train, total_steps=9)

    return made


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with another tokenizer, and another template than the policy's."""
    folder = tmp_path_factory.mktemp("other")
    tokenizer = train_tokenizer(TEXTS[:2], 300)
    ConversationEncoder(tokenizer, "llama3" if "<|eot_id|>" in tokenizer.get_vocab() else "human-assistant")
    build_tiny("llama", seed=5, vocab_size=300).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sampled(
    tokenizer: Any, answers: Sequence[str | list[int]], prompts: Sequence[str] = ("Hi",), ended: bool = True
) -> list[Sample]:
    """Answers as they would have been sampled: as text, or as tokens."""
    encoder = ConversationEncoder(tokenizer)
    samples = []
    for i, answer in enumerate(answers):
        prompt = Prompt((Message("user", prompts[i % len(prompts)]),))
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"] if isinstance(answer, str) else list(answer)
        ids = [*ids, encoder.end_token_id] if ended else ids
        samples.append(Sample(prompt, encoder.encode_prompt(prompt.messages), ids, encoder.decode(ids), not ended))
    return samples


def packed(samples: Sequence[Sample], max_tokens: int = 512) -> tuple[list[Pack], list[Sample]]:
    """The packs of the samples, and the samples in the packs' order."""
    trees, members = prompt_trees([s.prompt_ids for s in samples], [s.response_ids for s in samples], max_tokens)
    packs = pack_trees(trees, max_tokens)
    return packs, [samples[i] for pack in packs for tree in pack.tree_index for i in members[tree]]


# ---------------------------------------------------------------------------------------------------------- another tokenizer

TEXT_ANSWERS = ["The quick brown fox", "你好,世界。", "a 😀 b 👍🏽", "naïve café — “quotes”", "", "It has four legs. 等于七"]


def by_hand(critic: TextCritic, sample: Sample, policy_tokenizer: Any) -> torch.Tensor:
    """V of each policy token: one plain forward over the critic's tokens that hold nothing beyond what the policy had said by then."""
    decode = ConversationEncoder(policy_tokenizer).decode
    starts = characters_before(sample.response_ids, decode, sample.response)
    prompt, response, read = critic.encoder.encode_answer(sample.prompt.messages, sample.response)
    values = []
    for a in starts.tolist():
        held = [*prompt, *response[: next(i for i, characters in enumerate(read) if characters > a)]]
        states = critic.inner.model(input_ids=torch.tensor([held])).last_hidden_state[0, -1]
        values.append(critic.inner.score(states).squeeze())
    return torch.stack(values)


@pytest.mark.parametrize("max_tokens", [512, 40])
def test_values_of_another_tokenizer_are_those_of_the_text_said_so_far(policy: Any, other_folder: Path, max_tokens: int):
    config, actor = policy({"critic": {"path": str(other_folder)}})
    critic = make_critic(config, actor, 9)
    assert isinstance(critic, TextCritic)
    critic._max_tokens = max_tokens
    samples = sampled(actor.tokenizer, TEXT_ANSWERS, ["Hi", "你好"])
    critic.see(samples)
    packs, order = packed(samples)
    found = torch.cat([critic.values(pack) for pack in packs])
    expected = torch.cat([by_hand(critic, sample, actor.tokenizer) for sample in order])
    assert found.shape == (sum(len(s.response_ids) for s in samples),)
    assert torch.allclose(found, expected, atol=1e-5)
    weights = torch.arange(len(found)) + 1.0
    (found * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in critic.parameters.items()}
    critic.discard_gradients()
    (expected * weights).sum().backward()
    for name, parameter in critic.parameters.items():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-5 * float(parameter.grad.abs().max())), name


def test_no_value_sees_text_that_comes_after_its_state(policy: Any, other_folder: Path):
    """Two answers that go apart: the same values up to there, whatever comes after."""
    config, actor = policy({"critic": {"path": str(other_folder)}})
    critic = make_critic(config, actor, 9)
    a, b = sampled(actor.tokenizer, ["The dog has 😀 four legs", "The dog has 👍🏽 three"])
    same = next(i for i, (x, y) in enumerate(zip(a.response_ids, b.response_ids, strict=False)) if x != y)
    critic.see([a, b])
    (pack,), _ = packed([a, b])
    first, second = critic.values(pack).split([len(a.response_ids), len(b.response_ids)])
    assert same > 2 and torch.allclose(first[: same + 1], second[: same + 1], atol=1e-5)
    assert not torch.allclose(first[-1], second[-1], atol=1e-3)


def test_bytes_that_are_no_text_are_valued_before_what_they_become(policy: Any, other_folder: Path):
    config, actor = policy({"critic": {"path": str(other_folder)}})
    critic = make_critic(config, actor, 9)
    byte, letter = (actor.tokenizer.convert_tokens_to_ids(token) for token in ("ð", "a"))
    samples = sampled(actor.tokenizer, [[letter, byte, letter], [byte], [letter, byte, byte, letter]])
    assert [s.response for s in samples] == ["a\ufffda", "\ufffd", "a\ufffd\ufffda"]
    critic.see(samples)
    packs, order = packed(samples)
    found = torch.cat([critic.values(pack) for pack in packs])
    assert torch.allclose(found, torch.cat([by_hand(critic, sample, actor.tokenizer) for sample in order]), atol=1e-5)
    (pack,), _ = packed(samples[:1])
    _, first, second, _ = critic.values(
        pack
    ).tolist()  # before the byte, and before what follows it: it might still become an emoji
    assert first == second


def test_the_end_token_is_valued_at_the_end_of_the_text_and_a_cut_answer_has_none(policy: Any, other_folder: Path):
    config, actor = policy({"critic": {"path": str(other_folder)}})
    critic = make_critic(config, actor, 9)
    whole = sampled(actor.tokenizer, ["four legs"])
    cut = sampled(actor.tokenizer, ["four legs"], ended=False)
    critic.see([*whole, *cut])
    values = [critic.values(packed(samples)[0][0]) for samples in (whole, cut)]
    assert len(values[0]) == len(values[1]) + 1 and torch.allclose(values[0][:-1], values[1], atol=1e-5)
    prompt, response, _ = critic.encoder.encode_answer(whole[0].prompt.messages, "four legs")
    text = critic.encoder.tokenizer.decode(response)
    held = next(i for i in range(len(response) + 1) if critic.encoder.tokenizer.decode(response[:i]).strip() == "four legs")
    assert text.strip().startswith("four legs")
    states = critic.inner.model(input_ids=torch.tensor([[*prompt, *response[:held]]])).last_hidden_state[0, -1]
    assert torch.allclose(critic.inner.score(states).squeeze(), values[0][-1], atol=1e-5)


def test_a_conversation_longer_than_the_critics_context_loses_its_oldest_tokens(policy: Any, other_folder: Path, caplog: Any):
    config, actor = policy({"critic": {"path": str(other_folder)}})
    critic = make_critic(config, actor, 9)
    sample = sampled(actor.tokenizer, ["four legs"], ["How many legs does a dog have, please?"])
    critic.see(sample)
    (whole,) = critic._readings.values()
    critic._readings.clear()
    critic._max_length = len(whole.prompt) + len(whole.response) - 5
    critic.see(sample)
    (less,) = critic._readings.values()
    assert less.prompt == whole.prompt[5:] and less.response == whole.response and "oldest tokens" in caplog.text
    critic._readings.clear()
    critic._max_length = 4
    with pytest.raises(AccordError, match=r"generate\.max_new_tokens"):
        critic.see(sample)


def test_a_response_that_was_not_shown_is_refused(policy: Any, other_folder: Path):
    config, actor = policy({"critic": {"path": str(other_folder)}})
    critic = make_critic(config, actor, 9)
    old, new = sampled(actor.tokenizer, ["four", "legs"])
    critic.see([old])
    critic.see([new])
    critic.values(packed([new])[0][0])
    with pytest.raises(ValueError, match="not seen"):
        critic.values(packed([old])[0][0])


def test_a_critic_with_another_tokenizer_is_saved_as_the_model_it_is(policy: Any, other_folder: Path, tmp_path: Path):
    config, actor = policy({"critic": {"path": str(other_folder)}})
    critic = make_critic(config, actor, 9)
    critic.save(tmp_path / "critic", [2])
    again = load_scalar(str(tmp_path / "critic"), config.model, seed=1, trainable=True)
    assert again.tokenizer.get_vocab().keys() >= critic.tokenizer.get_vocab().keys()
    assert again.tokenizer.chat_template == critic.tokenizer.chat_template != actor.tokenizer.chat_template
    ids = torch.tensor([[5, 9, 100, 31]])
    assert torch.equal(again.module.eval()(ids).logits, critic.module.eval()(ids).logits)


# ------------------------------------------------------------------------------------------------- a head on the actor's trunk


@pytest.mark.parametrize(("family", "lora"), [("llama", False), ("llama", True), ("gemma2", False), ("bloom", False)])
def test_one_forward_gives_the_policy_and_the_values(policy: Any, family: str, lora: bool):
    """Linear heads, soft-capped logits and padded batches alike; the values are those of a forward of their own."""
    config, actor = policy({"critic": {"share_trunk": True}, **(LORA if lora else {})}, family)
    critic = make_critic(config, actor, 9)
    (pack,), _ = packed(sampled(actor.tokenizer, ["four legs", "你好"], ended=True))
    with critic.evaluating():
        alone, logprobs = critic.values(pack), actor.token_logprobs(pack).logprobs
    forwards = []
    actor.inner.get_input_embeddings().register_forward_hook(lambda *_: forwards.append(1))
    with critic.beside_policy():
        out = actor.token_logprobs(pack)
        values = critic.values(pack)
    assert len(forwards) == 1
    assert torch.allclose(values, alone, atol=1e-6) and torch.allclose(out.logprobs, logprobs, atol=1e-6)
    assert values.dtype == torch.float32 and len(values) == pack.num_targets


@pytest.mark.parametrize("trunk", [True, False])
def test_one_backward_serves_both_losses_and_the_trunk_learns_from_values_as_the_key_says(policy: Any, trunk: bool):
    config, actor = policy({"critic": {"share_trunk": True, "trunk_gradient": trunk}})
    critic = make_critic(config, actor, 9)
    assert isinstance(critic, HeadCritic) and list(critic.parameters) == ["weight"] and critic.head.weight.dtype == torch.float32
    (pack,), _ = packed(sampled(actor.tokenizer, ["four legs", "你好"]))
    with critic.beside_policy():
        out = actor.token_logprobs(pack)
        actor.backward(out.logprobs.mean() + 0.3 * critic.values(pack).square().mean())
    found = {name: p.grad.clone() for name, p in actor.parameters.items()}
    head = critic.head.weight.grad.clone()
    actor.discard_gradients()
    critic.discard_gradients()
    assert critic.head.weight.grad is None

    hidden, predict, _ = actor.hidden(pack)  # by hand, two forwards
    states = hidden[predict] if trunk else hidden[predict].detach()
    (actor.token_logprobs(pack).logprobs.mean() + 0.3 * (states @ critic.head.weight[0]).square().mean()).backward()
    for name, parameter in actor.parameters.items():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-4, atol=1e-7), name
    assert torch.allclose(head, critic.head.weight.grad, rtol=1e-4, atol=1e-7)


def test_in_warm_up_only_the_head_learns(policy: Any):
    """The policy's forward without gradient, the values with it."""
    config, actor = policy({"critic": {"share_trunk": True, "warmup_steps": 1}})
    critic = make_critic(config, actor, 9)
    (pack,), _ = packed(sampled(actor.tokenizer, ["four legs"]))
    before = copy.deepcopy(critic.head.weight)
    with critic.beside_policy():
        with torch.no_grad():
            actor.token_logprobs(pack)
        critic.backward(critic.values(pack).square().mean())
    assert all(p.grad is None for p in actor.parameters.values())
    assert not critic.step().skipped and not torch.equal(before, critic.head.weight)


def test_the_references_forward_in_between_is_not_taken_for_the_policys(policy: Any):
    config, actor = policy({"critic": {"share_trunk": True}, **LORA})
    with torch.no_grad():
        for parameter in actor.parameters.values():
            parameter.add_(0.05)
    critic = make_critic(config, actor, 9)
    (pack,), _ = packed(sampled(actor.tokenizer, ["four legs"]))
    with critic.evaluating():
        expected = critic.values(pack)
    with critic.beside_policy():
        actor.token_logprobs(pack)
        with actor.as_reference():
            actor.token_logprobs(pack)
        assert torch.allclose(critic.values(pack), expected, atol=1e-6)


def test_a_trunk_is_not_trained_behind_the_policys_back(policy: Any):
    config, actor = policy({"critic": {"share_trunk": True}})
    critic = make_critic(config, actor, 9)
    (pack,), _ = packed(sampled(actor.tokenizer, ["four legs"]))
    with pytest.raises(RuntimeError, match="beside_policy"):
        critic.values(pack)
    with pytest.raises(RuntimeError, match="has not read"), critic.beside_policy():
        critic.values(pack)


def test_the_head_is_saved_alone(policy: Any, tmp_path: Path):
    from safetensors.torch import load_file

    config, actor = policy({"critic": {"share_trunk": True}})
    critic = make_critic(config, actor, 9)
    critic.save(tmp_path / "critic", [2])
    assert torch.equal(load_file(tmp_path / "critic" / "value_head.safetensors")["weight"], critic.head.weight)


# --------------------------------------------------------------------------------------------------- an adapter on the base


@pytest.fixture
def reward_run(policy: Any, tmp_path: Path) -> Path:
    """What a reward run with LoRA leaves over the policy's model."""
    config, _ = policy(LORA)
    loaded = load_scalar(config.model.path, config.model, seed=6, trainable=True)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    save_adapter(loaded.module, tmp_path / "reward" / "adapter")
    save_model(loaded, tmp_path / "reward" / "model", stop_token_ids=[2])
    return tmp_path / "reward"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_actor_and_critic_on_one_base_learn_as_two_models_do(policy: Any, reward_run: Path, checkpointing: bool):
    """Three steps of both, the critic's backward while the actor's graph waits: the same weights as with separate models."""
    lora = {"rank": 2, "path": None}
    changes = {"model": {"lora": lora, "gradient_checkpointing": checkpointing}, "critic": {"path": str(reward_run / "adapter")}}
    config, actor = policy(changes)
    critic = make_critic(config, actor, 9)
    assert isinstance(critic, AdapterCritic) and critic.module is actor.module
    assert not {id(p) for p in critic.parameters.values()} & {id(p) for p in actor.parameters.values()}
    _, alone = policy(changes)
    own_model = config.model.model_copy(
        update={"lora": config.model.lora.model_copy(update={"path": str(reward_run / "adapter")})}
    )
    own = Critic(load_scalar(config.model.path, own_model, seed=3, trainable=True), config, 9)
    (pack,), _ = packed(sampled(actor.tokenizer, ["four legs", "你好"]))
    for _ in range(3):
        for policy_model, value_model in ((actor, critic), (alone, own)):
            logprobs, values = policy_model.token_logprobs(pack).logprobs, value_model.values(pack)
            value_model.backward(values.square().mean())
            policy_model.backward(-logprobs.mean())
            policy_model.step()
            value_model.step()
    for name, parameter in alone.parameters.items():
        assert torch.allclose(actor.parameters[name], parameter, atol=1e-6), name
    separate = {name.replace(".default.", ".critic."): p for name, p in own.parameters.items()}
    assert torch.allclose(
        critic.parameters["score.weight"], separate.pop("base_model.model.score.modules_to_save.critic.weight"), atol=1e-6
    )
    for name, parameter in separate.items():
        assert torch.allclose(critic.parameters[name], parameter, atol=1e-6), name


@pytest.mark.parametrize("named", ["", "model", "adapter"])
def test_a_reward_runs_adapter_scores_and_starts_the_critic_on_one_base(policy: Any, reward_run: Path, named: str):
    path = str(reward_run / named)
    config, actor = policy({**LORA, "reward_model": {"path": path}})
    scorer = reward_on_base(config, actor.loaded)
    critic = make_critic(config, actor, 9)
    assert scorer is not None and isinstance(critic, AdapterCritic) and scorer.module is critic.module is actor.module
    whole = load_scalar(str(reward_run / "model"), config.model.model_copy(update={"lora": None}), seed=1, trainable=False)
    (pack,), _ = packed(sampled(actor.tokenizer, ["four legs", "你好"]))
    from accord.models.forward import FrozenModel

    merged = FrozenModel(whole.module)
    assert torch.allclose(scorer.scores(pack), merged.scores(pack), atol=1e-5)
    assert torch.allclose(critic.values(pack), merged.values(pack), atol=1e-5), "at the start, the reward model"
    assert critic.values(pack).requires_grad and actor.module.training


def test_without_lora_or_with_false_every_model_has_a_base_of_its_own(policy: Any, reward_run: Path):
    whole = {"reward_model": {"path": str(reward_run / "model")}}
    for changes in (
        whole,
        {**whole, "model": {"lora": {"rank": 2, "share_base": False}}},
        {"model": {"lora": {"share_base": False}}},
    ):
        config, actor = policy(changes)
        critic = make_critic(config, actor, 9)
        assert type(critic) is Critic and critic.module is not actor.module
        assert reward_on_base(config, actor.loaded) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward_model": {"path": "RUN/adapter"}}, r"only with model\.lora"),
        ({"reward_model": {"path": "RUN/adapter"}, "model": {"lora": {"share_base": False}}}, "share_base=auto"),
        ({"critic": {"path": "OTHER"}, "model": {"lora": {"share_base": True}}}, "has no adapter"),
        ({"critic": {"path": "RUN/adapter"}, "model": {"path": "OTHER", "lora": {}}}, "it was trained on .*Name a whole model"),
        ({"critic": {"path": "RUN/model"}, "model": {"path": "OTHER", "lora": {"share_base": True}}}, "it was trained on"),
    ],
)
def test_what_cannot_stand_on_the_base_is_refused_with_the_cure(
    changes: dict[str, Any], said: str, policy: Any, reward_run: Path, tiny_folder: Callable[..., Path]
):
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        return (
            value.replace("RUN", str(reward_run)).replace("OTHER", str(tiny_folder("llama", seed=5)))
            if isinstance(value, str)
            else value
        )

    config, actor = policy(filled(changes))
    with pytest.raises(ConfigError, match=said):
        make_critic(config, actor, 9)


def test_auto_gives_a_model_over_another_base_one_of_its_own(policy: Any, reward_run: Path, tiny_folder: Callable[..., Path]):
    other = str(tiny_folder("llama", seed=5))
    config, actor = policy({"model": {"path": other, "lora": {}}, "critic": {"path": str(reward_run / "model")}})
    assert type(make_critic(config, actor, 9)) is Critic


def test_another_template_of_a_reward_adapter_is_kept(policy: Any, reward_run: Path):
    config, actor = policy({**LORA, "reward_model": {"path": str(reward_run)}})
    actor.loaded.tokenizer = copy.deepcopy(actor.tokenizer)
    actor.loaded.tokenizer.chat_template = actor.tokenizer.chat_template + " "
    scorer = reward_on_base(config, actor.loaded)
    assert scorer is not None and scorer.tokenizer.chat_template == actor.tokenizer.chat_template
    assert scorer.tokenizer.get_vocab() == actor.tokenizer.get_vocab()


# -------------------------------------------------------------------------------------------------------------- all of them

VARIANTS: dict[str, dict[str, Any]] = {
    "own": {},
    "text": {},  # with a path of its own
    "head": {"critic": {"share_trunk": True}},
    "adapter": LORA,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_resumes_to_the_bit(variant: str, policy: Any, other_folder: Path):
    """Two steps, or one, its state into fresh models, and one more."""
    changes = {"critic": {"path": str(other_folder)}} if variant == "text" else VARIANTS[variant]

    def start() -> tuple[TrainedModel, Critic]:
        config, actor = policy(changes)
        return actor, make_critic(config, actor, 9)

    def step(actor: TrainedModel, critic: Critic) -> None:
        samples = sampled(actor.tokenizer, ["four legs", "你好 😀"])
        critic.see(samples)
        (pack,), _ = packed(samples)
        if isinstance(critic, HeadCritic):
            with critic.beside_policy():
                loss = -actor.token_logprobs(pack).logprobs.mean()
                actor.backward(loss + critic.values(pack).square().mean())
        else:
            actor.backward(-actor.token_logprobs(pack).logprobs.mean())
            critic.backward(critic.values(pack).square().mean())
        assert not actor.step().skipped and not critic.step().skipped

    first = start()
    step(*first)
    kept = [(copy.deepcopy(model.state_tensors()), model.state()) for model in first]
    step(*first)
    second = start()
    for model, (tensors, state) in zip(second, kept, strict=True):
        model.load_state(tensors, state)
    step(*second)
    for a, b in zip(first, second, strict=True):
        assert a.schedule_step == b.schedule_step == 2
        assert a.parameters.keys() == b.parameters.keys() and all(
            torch.equal(p, b.parameters[name]) for name, p in a.parameters.items()
        )


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"critic": {"share_trunk": True, "path": "somewhere"}}, r"critic\.path"),
        ({"critic": {"trunk_gradient": False}}, r"critic\.trunk_gradient"),
        ({"model": {"lora": {"share_base": True}}, "reward_model": {"dtype": "bfloat16"}}, r"reward_model\.dtype"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changes: dict[str, Any], key: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=key):
        settings(Path("nowhere"), tmp_path, changes)
