"""Several adapters on one base: the numbers and gradients of separate models, and nobody disturbs anybody."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accord.config import Lora, Model
from accord.config.sections import Engine
from accord.data.packing import Pack, make_pack
from accord.data.trees import branching
from accord.engine.generate import SamplingParams, make_generator
from accord.errors import ConfigError
from accord.models import shared
from accord.models.forward import FrozenModel, PackedModel
from accord.models.load import LoadedModel, load_causal, load_scalar
from accord.models.lora import active_adapter, as_reference, merged_state
from accord.models.save import save_adapter, save_model
from accord.models.shared import CRITIC, REWARD, AdapterScorer

PACK = make_pack(
    [branching([5, 9, 200, 31], [[7, 44, 300], [12, 8]]), branching([60, 61], [[70, 71, 72, 73]])],
    [0, 1],
)


def options(folder: Path, dtype: str = "float32", checkpointing: bool = False, **lora: Any) -> Model:
    return Model(path=str(folder), dtype=dtype, gradient_checkpointing=checkpointing, lora=Lora(rank=2, **lora))  # type: ignore[arg-type]


def nudge(parameters: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.fixture
def reward_run(tmp_path: Path, tiny_folder: Callable[..., Path]) -> Callable[..., tuple[Path, LoadedModel]]:
    """`reward_run("llama")` → what a reward run with LoRA leaves (adapter/ and model/), and the model itself."""

    def made(family: str = "llama", seed: int = 3, **changes: Any) -> tuple[Path, LoadedModel]:
        loaded = load_scalar(str(tiny_folder(family)), options(tiny_folder(family), **changes), seed=seed, trainable=True)
        nudge(loaded.module.parameters(), seed)
        run = tmp_path / f"{family}-{seed}"
        save_adapter(loaded.module, run / "adapter")
        save_model(loaded, run / "model")
        return run, loaded

    return made


class AdapterModel(PackedModel):
    """An adapter of the shared base, read and trained as the critic is."""

    def __init__(self, module: Any, name: str, head: Any) -> None:
        super().__init__(module)
        self.name, self.head = name, head

    def values(self, pack: Pack) -> torch.Tensor:
        with active_adapter(self.module, self.name):
            return super().values(pack)

    def _scalar(self, hidden: torch.Tensor) -> torch.Tensor:
        return shared.head_in_float32(self.head, hidden)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "opt"])
def test_a_new_adapter_on_the_base_is_the_one_of_a_model_of_its_own(family: str, tiny_folder: Callable[..., Path]):
    model = options(tiny_folder(family))
    policy = load_causal(model, seed=5, trainable=True)
    own = load_scalar(str(tiny_folder(family)), model, seed=4, trainable=True)
    assert model.lora is not None
    head = shared.new_adapter(policy.module, CRITIC, model.lora, seed=4)
    expected = {name: p for name, p in own.module.named_parameters() if p.requires_grad}
    found = shared.adapter_parameters(policy.module, CRITIC, head)
    assert len(expected) == len(found) and all(p.requires_grad and p.dtype == torch.float32 for p in found.values())
    for name, parameter in found.items():
        there = (
            name.replace(f".{CRITIC}.", ".default.")
            if name != "score.weight"
            else "base_model.model.score.modules_to_save.default.weight"
        )
        assert torch.equal(parameter, expected[there]), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "float32"), ("gpt2", "float32")]
)
def test_values_scores_log_probabilities_and_gradients_are_those_of_separate_models(
    family: str, dtype: str, checkpointing: bool, tiny_folder: Callable[..., Path], reward_run: Any
):
    """Forwards and backwards of all of them interleaved on the one base."""
    folder = tiny_folder(family)
    run, _ = reward_run(family)
    model = options(folder, dtype, checkpointing)
    adapter = str(run / "adapter")
    # separate copies
    actor = load_causal(model, seed=1, trainable=True)
    critic = load_scalar(str(folder), options(folder, dtype, checkpointing, path=adapter), seed=1, trainable=True)
    scorer = load_scalar(str(folder), options(folder, dtype, path=adapter), seed=1, trainable=True)
    nudge(actor.module.parameters(), 1)
    # one base
    policy = load_causal(model, seed=1, trainable=True)
    nudge(policy.module.parameters(), 1)
    reward_head = shared.load_adapter(policy.module, REWARD, run / "adapter", seed=None, trainable=False)
    critic_head = shared.load_adapter(policy.module, CRITIC, run / "adapter", seed=1, trainable=True)

    ours, theirs = PackedModel(policy.module), PackedModel(actor.module)
    ours_v, theirs_v = AdapterModel(policy.module, CRITIC, critic_head), PackedModel(critic.module)
    ours_s, theirs_s = AdapterScorer(policy.module, REWARD, reward_head, None), FrozenModel(scorer.module)

    logprobs, expected_logprobs = ours.token_logprobs(PACK).logprobs, theirs.token_logprobs(PACK).logprobs
    values, expected_values = ours_v.values(PACK), theirs_v.values(PACK)
    scores = ours_s.scores(PACK)
    with as_reference(policy.module), torch.no_grad():
        reference = ours.token_logprobs(PACK).logprobs
    plain = FrozenModel(load_causal(options(folder, dtype), seed=1, trainable=False).module)
    assert torch.allclose(logprobs, expected_logprobs, atol=1e-6)
    assert torch.allclose(values, expected_values, atol=1e-6) and values.requires_grad
    assert torch.allclose(scores, theirs_s.scores(PACK), atol=1e-6) and not scores.requires_grad
    assert torch.allclose(reference, plain.token_logprobs(PACK).logprobs, atol=1e-6)
    assert not torch.allclose(reference, logprobs, atol=1e-3)

    with active_adapter(policy.module, CRITIC):  # the critic's backward first: the actor's graph waits meanwhile
        values.square().sum().backward()
    logprobs.sum().backward()
    expected_values.square().sum().backward()
    expected_logprobs.sum().backward()
    found = {name: p.grad for name, p in policy.module.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in actor.module.named_parameters() if p.grad is not None}
    of_critic = {
        name.replace(".default.", f".{CRITIC}."): p.grad for name, p in critic.module.named_parameters() if p.grad is not None
    }
    head = of_critic.pop("base_model.model.score.modules_to_save.critic.weight")
    expected |= of_critic
    assert found.keys() == expected.keys() and len(of_critic) == len(found) - len(of_critic) > 0
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max())), name
    assert torch.allclose(critic_head.weight.grad, head, rtol=1e-5, atol=1e-6 * float(head.abs().max()))
    assert reward_head.weight.grad is None


def test_the_actor_stays_active_trainable_and_its_export_the_same(
    tiny_folder: Callable[..., Path], reward_run: Any, tmp_path: Path
):
    run, _ = reward_run()
    model = options(tiny_folder())
    alone, policy = (load_causal(model, seed=1, trainable=True) for _ in range(2))
    shared.load_adapter(policy.module, REWARD, run / "adapter", seed=None, trainable=False)
    before = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
    shared.load_adapter(policy.module, CRITIC, run / "adapter", seed=1, trainable=True)
    assert before.keys() == {name for name, p in alone.module.named_parameters() if p.requires_grad}
    assert all(p.requires_grad for p in before.values())
    for loaded in (alone, policy):
        nudge((p for name, p in loaded.module.named_parameters() if ".default." in name), 7)
    assert torch.equal(
        PackedModel(policy.module).token_logprobs(PACK).logprobs, PackedModel(alone.module).token_logprobs(PACK).logprobs
    )
    expected, found = merged_state(alone.module), merged_state(policy.module)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for loaded, name in ((alone, "alone"), (policy, "shared")):
        save_adapter(loaded.module, tmp_path / name)
    a, b = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("alone", "shared"))
    assert a == b


def test_the_sampler_answers_with_the_actors_adapter(tiny_folder: Callable[..., Path], reward_run: Any):
    run, _ = reward_run()
    answers = []
    for others in (False, True):
        policy = load_causal(options(tiny_folder()), seed=1, trainable=True)
        nudge(policy.module.parameters(), 1)
        if others:
            shared.load_adapter(policy.module, REWARD, run / "adapter", seed=None, trainable=False)
            shared.load_adapter(policy.module, CRITIC, run / "adapter", seed=1, trainable=True)
        policy.module.eval()
        generator = make_generator(policy.module, policy.tokenizer, Engine(), None)
        generator.prepare()
        answers.append(
            generator.generate([[5, 9, 200], [31, 7]], SamplingParams(max_new_tokens=12, stop_token_ids=()), seeds=[1, 2])
        )
    for alone, with_others in zip(*answers, strict=True):
        assert alone.token_ids == with_others.token_ids
        assert alone.logprobs == pytest.approx(with_others.logprobs, abs=1e-6)


def test_a_saved_critic_loads_in_plain_peft_and_here_again(tiny_folder: Callable[..., Path], tmp_path: Path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    model = options(tiny_folder())
    assert model.lora is not None
    policy = load_causal(model, seed=1, trainable=True)
    head = shared.new_adapter(policy.module, CRITIC, model.lora, seed=2)
    nudge(shared.adapter_parameters(policy.module, CRITIC, head).values(), 9)
    expected = AdapterModel(policy.module, CRITIC, head).values(PACK)
    folder = tmp_path / "critic"
    folder.mkdir()
    shared.save_scalar_adapter(policy.module, CRITIC, head, folder)

    other = load_causal(model, seed=8, trainable=True)
    again = shared.load_adapter(other.module, CRITIC, folder, seed=1, trainable=True)
    assert torch.equal(AdapterModel(other.module, CRITIC, again).values(PACK), expected)
    assert shared.why_not_on(folder, model) is None

    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_folder(), num_labels=1)
    wrapped: Any = PeftModel.from_pretrained(classifier, str(folder)).eval()
    found = PackedModel(wrapped).values(PACK)
    assert torch.allclose(found, expected, atol=1e-5)


def test_one_base_is_kept_however_many_adapters_stand_on_it(tiny_folder: Callable[..., Path], reward_run: Any):
    run, _ = reward_run()
    policy = load_causal(options(tiny_folder()), seed=1, trainable=True)
    one = sum(p.numel() for name, p in policy.module.named_parameters() if "lora_" not in name)
    for name in (CRITIC, REWARD):
        shared.load_adapter(policy.module, name, run / "adapter", seed=1, trainable=False)
    assert sum(p.numel() for name, p in policy.module.named_parameters() if "lora_" not in name) == one
    assert sum(p.numel() for name, p in policy.module.named_parameters() if "lora_" in name) < one


# ---------------------------------------------------------------------------------------------------------- what a path names


def test_a_run_its_model_and_its_adapter_name_the_adapter(tiny_folder: Callable[..., Path], reward_run: Any, tmp_path: Path):
    run, _ = reward_run()
    for path in (run, run / "model", run / "adapter"):
        assert shared.find_adapter(str(path)) == run / "adapter"
    assert shared.find_adapter(None) is None and shared.find_adapter(str(tiny_folder())) is None
    shutil.copytree(run / "model", run / "best")  # of another step than the adapter's
    assert shared.find_adapter(str(run / "best")) is None
    sft = load_causal(options(tiny_folder()), seed=1, trainable=True)
    save_model(sft, tmp_path / "sft" / "model")
    save_adapter(sft.module, tmp_path / "sft" / "adapter")
    assert shared.find_adapter(str(tmp_path / "sft")) is None, "a language model's adapter is no reward model's"


def test_the_base_must_be_known_to_be_the_same(tiny_folder: Callable[..., Path], reward_run: Any, tmp_path: Path):
    run, _ = reward_run()
    assert shared.why_not_on(run / "adapter", Model(path=str(tiny_folder()))) is None
    copy = shutil.copytree(tiny_folder(), tmp_path / "copy")
    assert shared.why_not_on(run / "adapter", Model(path=str(copy))) is None
    other = str(tiny_folder("llama", seed=5))
    assert str(tiny_folder()) in str(shared.why_not_on(run / "adapter", Model(path=other)))


def test_an_adapter_that_does_not_fit_or_has_no_head_is_refused(
    tiny_folder: Callable[..., Path], reward_run: Any, tmp_path: Path
):
    run, _ = reward_run()
    policy = load_causal(options(tiny_folder("llama", hidden_size=64)), seed=1, trainable=True)
    with pytest.raises(ConfigError, match="does not fit the base"):
        shared.load_adapter(policy.module, REWARD, run / "adapter", seed=None, trainable=False)
    save_adapter(load_causal(options(tiny_folder()), seed=1, trainable=True).module, tmp_path / "sft")
    policy = load_causal(options(tiny_folder()), seed=1, trainable=True)
    with pytest.raises(ConfigError, match="no score head"):
        shared.load_adapter(policy.module, REWARD, tmp_path / "sft", seed=None, trainable=False)
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="can't be read"):
        shared.load_adapter(policy.module, REWARD, run / "adapter", seed=None, trainable=False)
