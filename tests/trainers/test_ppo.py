"""PPO: the invariants of ALGORITHMS §4, on tiny random models."""

from __future__ import annotations

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch

from accord.algorithms.losses import sft_loss
from accord.data.packing import pack_trees
from accord.data.records import Message, Prompt
from accord.engine.trained import count_targets
from accord.errors import AccordError, ConfigError, DataError, NonFiniteError
from accord.trainers.ppo_models import check_lengths
from tests.trainers.ppo_setup import GivenAnswers, function, largest_difference, trainer, weights


@pytest.fixture
def make(tiny_folder, tmp_path):
    """`make({"ppo": {…}}, family="llama")` → a PPOTrainer on a tiny model."""

    def build(changes=None, family="llama", **options):
        return trainer(tiny_folder(family), tmp_path / "run", changes, **options)

    return build


def all_prompts(ppo):
    return [ppo.examples.train[i] for i in range(len(ppo.examples.train))]


# -- sampled = trained -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text"])
def test_ratio_is_one_and_kl_zero_before_the_first_update(make, family):
    ppo = make({"train": {"max_tokens": 100}, "ppo": {"samples_per_prompt": 2}}, family)
    stats = ppo.update(ppo.make_experience(all_prompts(ppo)))
    assert stats["ppo/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert abs(stats["ppo/approx_kl"]) < 1e-8 and stats["ppo/clip_fraction"] == 0
    assert stats["ppo/updates"] == 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox", "gemma3_text", "bloom"])
def test_sampler_and_trainer_give_the_same_log_probabilities(make, family, temperature):
    ppo = make({"generate": {"temperature": temperature, "max_new_tokens": 16}}, family)
    for _ in range(2):  # before and after an update: the sampler follows the weights
        experience = ppo.make_experience(all_prompts(ppo))
        assert experience.metrics["ppo/sampler_logp_diff_max"] < 1e-4
        ppo.update(experience)


def test_log_probabilities_are_those_of_plain_transformers(make):
    """Old and reference log-probabilities, KL and entropy against one full forward a response."""
    ppo = make({"ppo": {"samples_per_prompt": 3}, "train": {"max_tokens": 90}, "generate": {"temperature": 0.8}})
    ppo.update(ppo.make_experience(all_prompts(ppo)))  # so that policy and reference differ
    module, reference = copy.deepcopy(ppo.policy.module), ppo.reference.frozen.module
    experience = ppo.make_experience(all_prompts(ppo))
    old, ref, entropy, sums = [], [], [], []
    for sample in experience.rollouts.samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        at = slice(len(sample.prompt_ids) - 1, -1)
        p, q = ((m(input_ids=ids).logits[0, at].double() / 0.8).log_softmax(-1) for m in (module, reference))
        chosen = ids[0, len(sample.prompt_ids) :, None]
        old.append(p.gather(1, chosen)[:, 0])
        ref.append(q.gather(1, chosen)[:, 0])
        entropy.append(-(p.exp() * p).sum(-1))
        sums.append((old[-1] - ref[-1]).sum())
    assert torch.allclose(experience.old_logprobs.double(), torch.cat(old), atol=1e-5)
    assert torch.allclose(experience.ref_logprobs.double(), torch.cat(ref), atol=1e-5)
    assert experience.metrics["ppo/entropy"] == pytest.approx(torch.cat(entropy).mean().item(), abs=1e-5)
    assert experience.metrics["ppo/kl"] == pytest.approx(torch.stack(sums).mean().item(), abs=1e-4)
    assert experience.metrics["ppo/kl"] != 0


def test_kl_is_zero_while_policy_and_reference_are_the_same(make):
    experience = make().make_experience(all_prompts(make()))
    assert abs(experience.metrics["ppo/kl"]) < 1e-5 and abs(experience.metrics["ppo/non_score_reward"]) < 1e-5


# -- the score -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["eos", "other", "none"])
def test_the_score_sits_on_the_last_real_action(make, pad):
    """Whatever the pad token is: on the end token where the model ended, on the last token where it was cut."""
    ppo = make(
        {
            "ppo": {
                "kl": {"coef": 0.0},
                "rewards": [function("ended", weight=2.0)],
                "missing_eos_penalty": 0.5,
                "whiten_advantages": False,
            }
        }
    )
    tokenizer = ppo.policy.tokenizer
    tokenizer.pad_token = {"eos": tokenizer.eos_token, "other": "<|pad|>", "none": None}[pad]
    end = ppo.encoder.end_token_id
    ppo.engine.generator = GivenAnswers([([7, 8, end], "stop"), ([9, end, 10, 11], "length"), ([end], "stop")])
    experience = ppo.make_experience(all_prompts(ppo)[:3])
    assert experience.rewards.tolist() == [0, 0, 2.0] + [0, 0, 0, -0.5] + [2.0]
    assert experience.metrics["ppo/score"] == pytest.approx(4 / 3)  # raw: before the penalty
    assert experience.metrics["ppo/eos_rate"] == pytest.approx(2 / 3)
    assert experience.metrics["ppo/response_length"] == pytest.approx(8 / 3)


def test_the_end_token_is_an_action_that_gets_its_gradient(make):
    """With pad = eos, a score for ending makes ending likelier."""
    ppo = make({"ppo": {"kl": {"coef": 0.0}, "rewards": [function("ended")], "whiten_advantages": False}})
    ppo.policy.tokenizer.pad_token = ppo.policy.tokenizer.eos_token
    end = ppo.encoder.end_token_id
    ppo.engine.generator = GivenAnswers([([7, 8, end], "stop")])
    prompts = all_prompts(ppo)
    experience = ppo.make_experience(prompts)
    ppo.update(experience)
    after = ppo.make_experience(prompts)
    last = experience.rollouts.last
    assert (after.old_logprobs[last] > experience.old_logprobs[last]).all()


def test_scores_are_normalised_then_clipped_then_fined(make):
    ppo = make({"ppo": {"normalize_score": True, "clip_reward": 1.0, "missing_eos_penalty": 0.25}})
    samples = [type("S", (), {"truncated": cut})() for cut in (False, True, False, True)]
    shaped = ppo.shaped([1.0, 2.0, 3.0, 10.0], samples)
    mean, std = 4.0, math.sqrt((9 + 4 + 1 + 36) / 3)
    assert shaped == pytest.approx([(1 - mean) / std, (2 - mean) / std - 0.25, (3 - mean) / std, 1.0 - 0.25])
    assert ppo.moments.count == 4


def test_every_source_is_logged_and_the_sum_is_weighted(make):
    ppo = make({"ppo": {"rewards": [function("letters", weight=2.0), function("length", weight=-0.1), function("letters")]}})
    metrics = ppo.make_experience(all_prompts(ppo)).metrics
    parts = metrics["ppo/score/letters"], metrics["ppo/score/length"], metrics["ppo/score/letters-2"]
    assert parts[0] == parts[2]
    assert metrics["ppo/score"] == pytest.approx(2 * parts[0] - 0.1 * parts[1] + parts[2])


# -- updates ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_one_step_is_the_same_in_any_layout(make, mini_batches):
    """Many small packs or one large one: 8 × 1 = 1 × 8, actor and critic."""
    results = []
    for budget in (72, 1024):
        ppo = make(
            {
                "train": {"max_tokens": budget, "batch_size": 8},
                "ppo": {"mini_batches": mini_batches, "ppo_epochs": 2, "samples_per_prompt": 2},
            }
        )
        ppo.step(1)
        results.append(
            (
                weights(ppo.policy),
                weights(ppo.critic),
                len(list(ppo.make_experience(all_prompts(ppo)).rollouts.packs(range(16), budget))),
            )
        )
    (policy, critic, many), (policy_too, critic_too, one) = results
    assert many > 3 and one == 1
    # Adam's first steps divide the gradient by its own size: rounding in tiny gradients shows up scaled by lr / |g|.
    assert largest_difference(policy, policy_too) < 2e-5 and largest_difference(critic, critic_too) < 2e-5


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_gradients_are_the_same_in_any_layout(make, aggregation, ratio):
    gradients = []
    for budget in (72, 1024):
        ppo = make(
            {
                "train": {"max_tokens": budget},
                "ppo": {
                    **{"samples_per_prompt": 2, "entropy_coef": 0.01, "kl": {"place": "loss", "estimator": "k3"}},
                    **{"aggregation": aggregation, "ratio": ratio, "old_kl_coef": 0.1, "clip": 0.05},
                },
            }
        )
        experience = ppo.make_experience(all_prompts(ppo))
        with torch.no_grad():  # away from where ratio and penalties are 1 and 0
            for parameter in ppo.policy.parameters.values():
                parameter += 0.02 * torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape)
        batch = experience.rollouts.minibatch(range(len(experience)), budget)
        ppo.updater.policy_gradient(experience, batch, kl_coef=0.1)
        ppo.updater.value_gradient(experience, batch)
        gradients.append(
            {
                f"{i}.{n}": p.grad
                for i, m in enumerate((ppo.policy, ppo.critic))
                for n, p in m.parameters.items()
                if p.grad is not None
            }
        )
    scale = max(float(g.abs().max()) for g in gradients[0].values())
    assert largest_difference(*gradients) < 1e-5 * scale


def test_the_first_policy_gradient_is_reinforce_with_the_advantages(make):
    """At ratio 1: ∇L = -mean_t A_t ∇log π(y_t), computed here by one plain forward a response."""
    ppo = make({"ppo": {"kl": {"coef": 0.0}}})
    experience = ppo.make_experience(all_prompts(ppo))
    tokens = sum(experience.rollouts.lengths)
    ppo.updater.policy_gradient(experience, experience.rollouts.minibatch(range(len(experience)), 256), kl_coef=0.0)
    ours = {name: p.grad.clone() for name, p in ppo.policy.parameters.items()}
    module = copy.deepcopy(ppo.policy.module)
    module.zero_grad()
    for i, sample in enumerate(experience.rollouts.samples):
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logp = module(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        chosen = logp.gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
        part = slice(experience.rollouts.offsets[i], experience.rollouts.offsets[i + 1])
        (-(experience.advantages[part] * chosen).sum() / tokens).backward()
    theirs = {name: p.grad for name, p in module.named_parameters()}
    assert largest_difference(ours, theirs) < 1e-5 * max(float(g.abs().max()) for g in theirs.values())


def test_the_critic_reads_the_state_before_each_token(make):
    """values[t] is the scalar head on the token before y_t, from a plain forward of the classifier's backbone."""
    ppo = make()
    experience = ppo.make_experience(all_prompts(ppo))
    module = ppo.critic.module
    for i, sample in enumerate(experience.rollouts.samples):
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        with torch.no_grad():
            values = module.score(module.model(input_ids=ids).last_hidden_state)[0, len(sample.prompt_ids) - 1 : -1, 0]
        part = slice(experience.rollouts.offsets[i], experience.rollouts.offsets[i + 1])
        assert torch.allclose(experience.values[part], values, atol=1e-5)


def test_the_critic_learns_the_returns(make):
    ppo = make(
        {
            "critic": {"lr": 1e-2},
            "ppo": {"ppo_epochs": 8, "rewards": [function("constant")], "kl": {"coef": 0.0}, "value_clip": None},
        }
    )
    first = ppo.step(1)
    for step in range(2, 6):
        last = ppo.step(step)
    assert last["ppo/value_loss"] < 0.1 * first["ppo/value_loss"]


def test_a_score_is_learned(make):
    """Thirty small steps raise the share of rewarded letters clearly."""
    ppo = make(
        {
            "train": {"batch_size": 8, "max_steps": 30, "lr": 3e-3},
            "ppo": {"samples_per_prompt": 4, "ppo_epochs": 2, "kl": {"coef": 0.0}},
        }
    )
    scores = [ppo.step(step)["ppo/score"] for step in range(1, 31)]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.1


def test_ending_is_learned_when_pad_is_eos(make):
    ppo = make(
        {
            "train": {"batch_size": 8, "max_steps": 30, "lr": 3e-3},
            "ppo": {"rewards": [function("ended")], "samples_per_prompt": 4, "ppo_epochs": 2, "kl": {"coef": 0.0}},
        }
    )
    ppo.policy.tokenizer.pad_token = ppo.policy.tokenizer.eos_token
    rates = [ppo.step(step)["ppo/eos_rate"] for step in range(1, 31)]
    assert sum(rates[-3:]) / 3 > sum(rates[:3]) / 3 + 0.3


def test_samples_of_a_prompt_differ_and_share_its_computation(make):
    ppo = make({"ppo": {"samples_per_prompt": 5}})
    experience = ppo.make_experience(all_prompts(ppo)[:2])
    answers = [tuple(sample.response_ids) for sample in experience.rollouts.samples]
    assert len(answers) == 10 and len(set(answers)) == 10
    ((pack, _),) = experience.rollouts.packs(range(10), 1024)
    prompts = {tuple(sample.prompt_ids) for sample in experience.rollouts.samples}
    assert len(pack) == sum(map(len, prompts)) + sum(map(len, answers))


def test_an_experience_depends_on_the_seed_and_its_number_alone(make):
    def answers(ppo):
        return [sample.response_ids for sample in ppo.make_experience(all_prompts(ppo)).rollouts.samples]

    first, second = make(), make()
    assert answers(first) == answers(second)
    second.experiences = 0
    assert answers(first) != answers(second)  # experience 2 against experience 1
    assert answers(make({"run": {"seed": 4}})) != answers(make())


def test_mini_batches_hold_every_response_once_and_differ_by_epoch(make):
    ppo = make({"ppo": {"samples_per_prompt": 2}})
    experience = ppo.make_experience(all_prompts(ppo))
    parts = experience.minibatches(3, 0, seed=1)
    assert sorted(i for part in parts for i in part) == list(range(16)) and [len(p) for p in parts] == [6, 5, 5]
    assert parts == experience.minibatches(3, 0, seed=1) != experience.minibatches(3, 1, seed=1)


# -- KL --------------------------------------------------------------------------------------------------------------------


def test_the_kl_penalty_in_the_reward_is_the_one_that_is_logged(make):
    ppo = make({"ppo": {"kl": {"coef": 0.3, "estimator": "k3"}, "rewards": [function("constant")]}})
    ppo.update(ppo.make_experience(all_prompts(ppo)))
    experience = ppo.make_experience(all_prompts(ppo))
    d = experience.old_logprobs - experience.ref_logprobs
    penalty = 0.3 * (torch.exp(-d) - 1 + d)
    expected = -penalty
    expected[experience.rollouts.last] += 1
    assert torch.allclose(experience.rewards, expected, atol=1e-6)
    assert experience.metrics["ppo/non_score_reward"] == pytest.approx(-penalty.sum().item() / len(experience), rel=1e-4)


def test_kl_in_the_loss_leaves_the_rewards_alone(make):
    ppo = make({"ppo": {"kl": {"coef": 0.5, "estimator": "k2", "place": "loss"}, "rewards": [function("constant")]}})
    ppo.update(ppo.make_experience(all_prompts(ppo)))
    experience = ppo.make_experience(all_prompts(ppo))
    assert experience.rewards.sum().item() == len(experience)
    stats = ppo.update(experience)
    assert stats["ppo/kl_loss"] == pytest.approx(
        (0.5 * (experience.old_logprobs - experience.ref_logprobs) ** 2).mean().item(), rel=1e-3
    )


def test_a_stronger_kl_in_the_loss_keeps_the_policy_nearer(make):
    distances = []
    for coef in (0.0, 20.0):
        kl = {"coef": coef, "estimator": "k3", "place": "loss"}
        ppo = make({"train": {"lr": 3e-4, "batch_size": 8, "max_steps": 9}, "ppo": {"ppo_epochs": 2, "kl": kl}})
        kls = [ppo.step(step)["ppo/kl"] for step in range(1, 10)]
        distances.append(sum(kls[-4:]) / 4)
    assert abs(distances[1]) < 0.5 * distances[0]


def test_a_fixed_coefficient_stays_and_an_adaptive_one_follows_its_formula(make):
    fixed = make()
    fixed.step(1)
    assert fixed.kl_controller.coef == 0.1
    adaptive = make({"ppo": {"kl": {"controller": "adaptive", "target": 6.0, "horizon": 100}}})
    stats = adaptive.step(1)
    assert stats["ppo/kl_coef"] == 0.1  # what this step used
    error = min(max(stats["ppo/kl"] / 6.0 - 1, -0.2), 0.2)
    assert adaptive.kl_controller.coef == pytest.approx(0.1 * (1 + error * 4 / 100))
    assert adaptive.step(2)["ppo/kl_coef"] == adaptive.kl_controller.coef or adaptive.kl_controller.coef != 0.1


# -- guards, PTX, EMA, warm-up ---------------------------------------------------------------------------------------------


def test_target_kl_stops_the_epochs_before_the_step_that_goes_too_far(make):
    ppo = make({"train": {"lr": 0.05}, "ppo": {"ppo_epochs": 6, "target_kl": 0.01, "ratio_threshold": None}})
    stats = ppo.step(1)
    assert stats["ppo/stopped_early"] == 1 and 1 <= stats["ppo/updates"] < 6
    assert all(p.grad is None for p in ppo.policy.parameters.values())
    assert make({"ppo": {"ppo_epochs": 3, "target_kl": 100.0}}).step(1)["ppo/updates"] == 3


def test_a_mini_batch_whose_ratio_ran_away_is_skipped(make):
    ppo = make({"train": {"lr": 0.5}, "ppo": {"ppo_epochs": 5, "ratio_threshold": 1.001}})
    stats = ppo.step(1)
    assert stats["ppo/skipped_minibatches"] >= 1
    assert stats["ppo/updates"] + stats["ppo/skipped_minibatches"] == 5


def test_the_critic_warms_up_alone(make):
    ppo = make({"critic": {"warmup_steps": 2}, "ppo": {"ppo_epochs": 2}, "train": {"max_steps": 4, "epochs": 2}})
    policy, critic = weights(ppo.policy), weights(ppo.critic)
    for step in (1, 2):
        stats = ppo.step(step)
        assert stats["ppo/approx_kl"] == pytest.approx(0, abs=1e-8) and stats["train/lr"] == 0
    assert largest_difference(policy, weights(ppo.policy)) == 0 < largest_difference(critic, weights(ppo.critic))
    ppo.step(3)
    assert largest_difference(policy, weights(ppo.policy)) > 0
    assert ppo.policy.total_steps == 2 * 2 and ppo.critic.total_steps == 4 * 2


def test_ema_follows_every_optimizer_step(make):
    ppo = make({"train": {"ema_decay": 0.9}, "ppo": {"ppo_epochs": 1, "mini_batches": 1}})
    expected = weights(ppo.policy)
    for step in (1, 2):
        ppo.step(step)
        expected = {name: 0.9 * expected[name] + 0.1 * value for name, value in weights(ppo.policy).items()}
    assert largest_difference(expected, ppo.policy.ema) < 1e-6 and ppo.critic.ema is None


def test_ptx_adds_its_own_loss_to_the_same_step(make, tmp_path):
    """The step's gradient is the policy's plus ptx_coef times that of the plain SFT loss on the PTX batch."""
    file = tmp_path / "ptx.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {i}", "completion": f"It is {i}."}) + "\n" for i in range(6)))
    common = {"ppo": {"ptx_coef": 3.0, "ptx_data": str(file)}}
    with_ptx, without = make(common), make()
    captured = []
    for ppo in (with_ptx, without):
        ppo.policy.step = lambda ppo=ppo, step=ppo.policy.step: (
            captured.append({n: p.grad.clone() for n, p in ppo.policy.parameters.items()}) or step()
        )
        captured_stats = ppo.step(1)
        if ppo is with_ptx:
            stats = captured_stats
    fresh = make(common)
    examples, order = fresh.updater.ptx
    packs = pack_trees([examples[i].tree for i in order.batch(1)], 256)
    loss = sum(
        sft_loss(fresh.policy.token_logprobs(p).logprobs, torch.full((p.num_targets,), 1 / count_targets(packs))) for p in packs
    )
    (3.0 * loss).backward()
    expected = {n: p.grad + captured[1][n] for n, p in fresh.policy.parameters.items()}
    assert largest_difference(captured[0], expected) < 1e-4
    assert stats["ppo/ptx_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)


def test_what_is_not_finite_changes_neither_actor_nor_critic(make, monkeypatch):
    import accord.trainers.ppo_update as module

    def broken(*args, **kwargs):
        return torch.tensor(math.nan, requires_grad=True), torch.tensor(0.0)

    monkeypatch.setattr(module, "ppo_value_loss", broken)
    ppo = make()
    before = weights(ppo.policy), weights(ppo.critic)
    with pytest.raises(NonFiniteError):
        ppo.step(1)
    assert largest_difference(before[0], weights(ppo.policy)) == 0
    skipping = make({"train": {"on_nonfinite": "skip"}})
    stats = skipping.step(1)
    assert largest_difference(before[0], weights(skipping.policy)) == 0 == largest_difference(before[1], weights(skipping.critic))
    assert stats["train/skipped"] == 1 and stats["ppo/updates"] == 0 and skipping.policy.schedule_step == 0


def test_every_metric_of_the_paper_is_there_and_finite(make):
    names = """ppo/score ppo/score_std ppo/score/letters ppo/kl ppo/kl_per_token ppo/kl_coef ppo/non_score_reward ppo/policy_loss
    ppo/value_loss ppo/entropy ppo/approx_kl ppo/ratio_mean ppo/clip_fraction ppo/value_clip_fraction ppo/explained_variance
    ppo/response_length ppo/eos_rate ppo/repetition time/generate time/score time/logprob time/train time/gather time/other time/step
    throughput/tokens_per_s throughput/samples_per_s throughput/generate_tflops throughput/train_tflops
    ppo/sampler_logp_diff_max ppo/sampler_logp_diff_mean train/lr train/grad_norm train/tokens train/skipped"""
    metrics = make().step(1)
    missing = [name for name in names.split() if not math.isfinite(metrics.get(name, math.nan))]
    assert not missing


# -- LoRA -------------------------------------------------------------------------------------------------------------------


def test_with_lora_the_reference_is_the_start_and_the_base_never_moves(make):
    ppo = make({"model": {"lora": {"rank": 4, "alpha": 8.0}}, "train": {"lr": 1e-2}})
    base = {name: p.detach().clone() for name, p in ppo.policy.module.named_parameters() if not p.requires_grad}
    assert ppo.reference.frozen is None
    first = ppo.make_experience(all_prompts(ppo))
    assert abs(first.kl) < 1e-6
    ppo.update(first)
    second = ppo.make_experience(all_prompts(ppo))
    assert abs(second.kl) > 1e-4
    now = dict(ppo.policy.module.named_parameters())
    assert all(torch.equal(value, now[name]) for name, value in base.items())
    plain = make()
    ppo.engine.generator = plain.engine.generator = GivenAnswers([([7, 8, 9], "length")])
    assert torch.allclose(
        ppo.make_experience(all_prompts(ppo)).ref_logprobs, plain.make_experience(all_prompts(plain)).ref_logprobs, atol=1e-5
    )


# -- refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"path": None}}, "model.path"),
        ({"model": {"disable_dropout": False}}, "disable_dropout=true"),
        ({"model": {"lora": {"dropout": 0.1}}}, "lora.dropout=0"),
        ({"generate": {"temperature": 0.0}}, "temperature"),
        ({"generate": {"max_new_tokens": 250}, "train": {"max_tokens": 2000}}, "takes 256.*max_length"),
        ({"critic": {"warmup_steps": 3}}, "warmup_steps=3"),
        ({"ppo": {"rewards": [{"type": "model"}]}}, "reward_model.path"),
        ({"ppo": {"rewards": [function("missing")]}}, "no function 'missing'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(make, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(changes)


def test_ptx_data_may_be_plain_text(make, tmp_path):
    file = tmp_path / "ptx.jsonl"
    file.write_text("".join(json.dumps({"text": f"A document about {i} dogs."}) + "\n" for i in range(6)))
    assert make({"ppo": {"ptx_coef": 1.0, "ptx_data": str(file)}}).step(1)["ppo/ptx_loss"] > 0


def test_fallbacks_of_a_reward_function_are_counted_every_step(make):
    ppo = make({"ppo": {"rewards": [function("fails", fallback=-1.0)]}})
    assert [ppo.step(step)["ppo/reward_fallbacks"] for step in (1, 2)] == [4, 4]
    with pytest.raises(AccordError, match=r"fails raised ValueError: no.*train_dataset"):
        make({"ppo": {"rewards": [function("fails")]}}).step(1)


def test_bf16_samples_in_the_dtype_it_trains_in(make):
    metrics = make({"train": {"precision": "bf16"}}).step(1)
    assert metrics["ppo/sampler_logp_diff_max"] < 0.1 and metrics["ppo/ratio_mean"] == pytest.approx(1, abs=0.02)


def test_gradient_checkpointing_changes_nothing_but_memory(make):
    results = []
    for checkpointing in (False, True):
        ppo = make({"model": {"gradient_checkpointing": checkpointing}})
        stats = ppo.step(1)
        results.append((weights(ppo.policy), weights(ppo.critic), stats["ppo/score"]))
    assert results[0][2] == results[1][2]
    assert largest_difference(results[0][0], results[1][0]) < 1e-6 > largest_difference(results[0][1], results[1][1])


def test_a_prompt_may_be_a_text_a_row_a_record_or_an_example(make):
    ppo = make()
    text = "How many legs?"
    same = [text, {"prompt": text}, Prompt((Message("user", text),)), ppo.examples.train[0]]
    asked = [ppo.answers.ask(prompt) for prompt in same]
    assert {tuple(ids) for _, ids in asked} == {tuple(asked[0][1])}
    assert all(record.messages == (Message("user", text),) for record, _ in asked)
    for wrong in (3, None, [1, 2]):
        with pytest.raises(DataError, match="a prompt is a text"):
            ppo.make_experience([wrong])


def test_prompts_and_answers_beyond_max_out_tokens_are_refused_at_the_start():
    config = SimpleNamespace(
        generate=SimpleNamespace(max_new_tokens=16),
        engine=SimpleNamespace(max_out_tokens=33),
        train=SimpleNamespace(max_tokens=100),
    )
    loaded = SimpleNamespace(
        module=SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace))
    )  # no limit of its own
    check_lengths(config, 17, loaded, loaded)
    with pytest.raises(ConfigError, match=r"that is 34, but engine.max_out_tokens is 33. Raise it to 34"):
        check_lengths(config, 18, loaded, loaded)


def test_weights_that_are_no_numbers_are_told_without_advice_on_the_learning_rate(make):
    ppo = make({"eval": {"at_start": False}})
    with torch.no_grad():
        next(iter(ppo.policy.parameters.values())).fill_(math.nan)
    with pytest.raises(NonFiniteError, match="ppo step 1: the model's logits are not finite") as caught:
        ppo.train()
    assert "train.lr" not in str(caught.value)
