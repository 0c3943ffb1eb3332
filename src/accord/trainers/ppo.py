"""PPO, the classic RLHF stage: sample, score, estimate advantages, improve actor and critic (docs/algorithms/ppo.md).

Read `PPOTrainer.step`, `make_experience` and `update` from top to bottom: that is one iteration.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accord.algorithms.advantages import RunningMoments, explained_variance, gae, whiten
from accord.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate, token_rewards
from accord.algorithms.losses import ppo_policy_loss, ppo_value_loss, sft_loss
from accord.data.dataset import Example, load_examples
from accord.data.loader import BatchOrder
from accord.data.packing import Pack, pack_trees
from accord.data.reading import read_records
from accord.data.records import Message, PlainText, Prompt, Record
from accord.engine.generate import SamplingParams, before_stop
from accord.engine.hybrid import HybridEngine
from accord.engine.trained import TrainedModel, count_targets, prefixed, unprefixed
from accord.errors import ConfigError, DataError
from accord.models.load import load_causal
from accord.rewards import FunctionReward, Sample, combine
from accord.track.run import RunFolder
from accord.trainers.common import check_budget, export_trained, limited, load_data, save_trained
from accord.trainers.loop import run_loop
from accord.trainers.ppo_experience import Averages, Experience, Rollouts, score_metrics, spread
from accord.trainers.ppo_models import (
    Reference,
    check_lengths,
    check_settings,
    count_parameters,
    load_critic,
    reward_sources,
)

if TYPE_CHECKING:
    from accord.config import Config

log = logging.getLogger(__name__)

SAMPLES_SHOWN = 8
# Sampler and trainer read the same weights: more than this between their log-probabilities is a fault, not rounding.
LOGPROB_TOLERANCE = {"float32": 1e-3, "bf16": 0.5}


class PPOTrainer:
    """Proximal policy optimisation against a score (Ouyang et al. 2022, arXiv:2203.02155, §3.5; Schulman et al. 2017).

        with PPOTrainer(config, train_dataset, valid_dataset) as trainer:
            trainer.train()

    or, in a loop of one's own, `experience = trainer.make_experience(prompts); stats = trainer.update(experience)`.
    """

    stage = "ppo"
    headline: tuple[str, ...] = ("ppo/score", "ppo/kl", "ppo/response_length", "ppo/eos_rate")
    best_metric: str | None = "ppo/score"

    def __init__(self, config: Config, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config = config.for_stage("ppo")
        self.settings = settings = config.ppo
        check_settings(config)
        self.encoder, self.examples, _ = load_data(config, "prompt", train_dataset, valid_dataset)
        self.order = BatchOrder(len(self.examples.train), config.train.batch_size, config.run.seed, config.data.shuffle)
        self.total_steps = self.order.total_steps(config.train.epochs, config.train.max_steps)
        warmup = config.critic.warmup_steps
        if warmup >= self.total_steps:
            raise ConfigError(f"critic.warmup_steps={warmup} leaves none of the {self.total_steps} steps to the policy.")
        self.ptx = self._load_ptx()
        policy = load_causal(config.model, seed=config.run.seed, trainable=True)
        policy.tokenizer = self.encoder.tokenizer
        critic = load_critic(config, policy)
        longest = max(int(part.num_tokens().max()) for part in (self.examples.train, self.examples.valid) if len(part))
        check_lengths(config, longest, policy, critic)
        self.sources = reward_sources(config, policy)

        updates = settings.ppo_epochs * settings.mini_batches  # of one step
        self.policy = TrainedModel(policy, config.train, total_steps=(self.total_steps - warmup) * updates)
        self.critic = TrainedModel(critic, config.train, total_steps=self.total_steps * updates, lr=config.critic.lr, ema=False)
        self.reference = Reference(config, self.policy)
        self.engine = HybridEngine(self.policy, config.engine)
        self.params = SamplingParams.from_settings(config.generate, self.encoder.stop_token_ids)
        if self.params.truncates:
            log.warning(
                "generate.top_p, top_k, min_p or repetition_penalty is set: answers are sampled from another distribution than the one "
                "whose log-probabilities PPO learns from."
            )
        kl = settings.kl
        self.kl_controller = AdaptiveKL(kl.coef, kl.target, kl.horizon) if kl.controller == "adaptive" else FixedKL(kl.coef)
        self.moments = RunningMoments()
        self.experiences = 0  # made so far: a step is one of them
        self._spoilt = False  # a loss of the optimizer step under way is not finite
        self.samples: list[dict[str, Any]] = []

    def train(self, run: RunFolder | None = None) -> dict[str, Any]:
        """Run to the end (or go on from the last checkpoint); returns the summary."""
        return run_loop(self, run)

    # -- one iteration -----------------------------------------------------------------------------------------------

    def step(self, step: int) -> dict[str, float]:
        """One PPO iteration: sample, score, estimate advantages, improve actor and critic (ALGORITHMS §4)."""
        self.experiences = step - 1
        prompts = [self.examples.train[i] for i in self.order.batch(step)]
        experience = self.make_experience(prompts)
        stats = self.update(experience)
        metrics = experience.metrics | stats | self.engine.times.close(len(experience))
        metrics["throughput/tokens_per_s"] = metrics["train/tokens"] / metrics["time/step"]
        return metrics

    def make_experience(self, prompts: Sequence[Example | Record | Mapping[str, Any] | str]) -> Experience:
        """Answer the prompts, score the answers, and work out what each token was worth.

        A prompt is what the user says, a row in any format of data.train, a record, or one of `self.examples.train`.
        """
        self.experiences += 1
        settings, times = self.settings, self.engine.times
        times.start()
        rollouts = self.sample(prompts, settings.samples_per_prompt, self._seeds(self.experiences))
        with times("score"):
            board = combine(self.sources, rollouts.samples)
        with times("logprob"):
            old, entropy = self._read_policy(rollouts)
            ref = rollouts.read(
                self.config.train.max_tokens, lambda pack: self.reference.token_logprobs(pack, self.params.temperature)
            )
            with self.critic.evaluating():
                values = rollouts.read(self.config.train.max_tokens, self.critic.values)

        kl = kl_estimate(old, ref, settings.kl.estimator)
        coef = self.kl_controller.coef if settings.kl.place == "reward" else 0.0
        rewards = token_rewards(kl, torch.tensor(self.shaped(board.total, rollouts.samples)), rollouts.last, coef)
        if settings.whiten_rewards:
            rewards = whiten(rewards, shift_mean=False)
        advantages, returns = gae(rewards, values, rollouts.lengths, settings.gamma, settings.lam)
        if settings.whiten_advantages:
            advantages = whiten(advantages)

        k1 = rollouts.sum_by_response(old - ref)
        mean_difference, largest_difference = self._compare_with_sampler(rollouts, old)
        importance = None
        if settings.old_logprobs == "sampler":
            importance = (old - rollouts.sampler_logprobs).exp().clamp(max=settings.is_clip)
        metrics = score_metrics(board) | rollouts.metrics()
        metrics |= {
            "ppo/kl": float(k1.mean()),
            "ppo/kl_per_token": float((old - ref).double().mean()),
            "ppo/kl_coef": self.kl_controller.coef,
            "ppo/non_score_reward": float(rollouts.sum_by_response(-coef * kl).mean()),
            "ppo/entropy": float(entropy.double().mean()),
            "ppo/explained_variance": explained_variance(values, returns),
            "ppo/sampler_logp_diff_mean": mean_difference,
            "ppo/sampler_logp_diff_max": largest_difference,
            "throughput/generate_tflops": self._tflops(2 * count_parameters(self.policy), rollouts, times.seconds["generate"]),
        }
        if importance is not None:
            metrics["ppo/importance_weight"] = float(importance.double().mean())
        if any(isinstance(source, FunctionReward) and source.fallback is not None for source in self.sources):
            metrics["ppo/reward_fallbacks"] = float(board.failures)
        self.samples = self._show(rollouts, board.total, k1.tolist())
        return Experience(
            self.experiences, rollouts, board, old, ref, values, rewards, advantages, returns, metrics["ppo/kl"], importance, metrics
        )  # fmt: skip

    def update(self, experience: Experience) -> dict[str, float]:
        """`ppo_epochs` passes over the experience in `mini_batches` optimizer steps each; then β for the next one.

        Returns the means over everything that was computed, each counted by its tokens.
        """
        settings = self.settings
        averages, began = Averages(), time.perf_counter()
        counts = {"ppo/skipped_minibatches": 0.0, "ppo/stopped_early": 0.0, "ppo/updates": 0.0, "train/tokens": 0.0}
        number = (experience.number - 1) * settings.ppo_epochs * settings.mini_batches  # of the optimizer step, for PTX
        for epoch in range(settings.ppo_epochs):
            for minibatch in experience.minibatches(settings.mini_batches, epoch, self.config.run.seed):
                number += 1
                self._spoilt = False
                packs = list(experience.rollouts.packs(minibatch, self.config.train.max_tokens))
                tokens = sum(len(rows) for _, rows in packs)
                stats = self._policy_gradient(experience, packs, tokens)
                averages.add(stats, tokens)
                if settings.target_kl is not None and stats["ppo/approx_kl"] > settings.target_kl:
                    counts["ppo/stopped_early"] = 1.0  # the samples no longer speak for this policy
                    break
                if settings.ratio_threshold is not None and stats["ppo/ratio_mean"] > settings.ratio_threshold:
                    counts["ppo/skipped_minibatches"] += 1
                    self.policy.discard_gradients()
                    continue
                averages.add(self._value_gradient(experience, packs, tokens), tokens)
                counts["train/tokens"] += sum(len(pack) for pack, _ in packs)
                if self.ptx is not None and self.acting(experience):
                    averages.add({"ppo/ptx_loss": self._ptx_gradient(number)}, tokens)
                info = self._optimizer_step(experience)
                counts["ppo/updates"] += len(info) > 0
                averages.add(info, tokens)
            if counts["ppo/stopped_early"]:
                self.policy.discard_gradients()
                break
        coef = self.kl_controller.coef
        self.kl_controller.update(experience.kl, episodes=len(experience))
        seconds = time.perf_counter() - began
        self.engine.times.add("train", seconds)
        trained = count_parameters(self.policy) * self.acting(experience) + count_parameters(self.critic)
        return averages.means() | counts | {
            "ppo/kl_coef": coef,
            "train/lr": self.policy.lr(self.policy.schedule_step) if self.policy.schedule_step else 0.0,
            "train/skipped": float(self.critic.skipped),
            "throughput/train_tflops": 6 * trained * counts["train/tokens"] / max(seconds, 1e-9) / 1e12,
        }  # fmt: skip

    # -- gradients ---------------------------------------------------------------------------------------------------

    def acting(self, experience: Experience) -> bool:
        """False in the first `critic.warmup_steps` experiences, in which only the critic learns."""
        return experience.number > self.config.critic.warmup_steps

    def _policy_gradient(self, experience: Experience, packs: list[tuple[Pack, Tensor]], tokens: int) -> dict[str, float]:
        """Backward pass of the surrogate objective over one mini-batch; what it says of the policy before the step."""
        settings, sums = self.settings, Averages()
        gradient = torch.enable_grad() if self.acting(experience) else torch.no_grad()
        for pack, rows in packs:
            weights = torch.full((len(rows),), 1 / tokens, device=self.policy.device)
            if experience.importance is not None:
                weights = weights * experience.importance[rows].to(self.policy.device)
            old, ref, advantages = (x[rows].to(self.policy.device) for x in (experience.old_logprobs, experience.ref_logprobs, experience.advantages))  # fmt: skip
            with gradient:
                out = self.policy.token_logprobs(pack, temperature=self.params.temperature, entropy=settings.entropy_coef > 0)
                loss, stats = ppo_policy_loss(out.logprobs, old, advantages, weights, settings.clip)
                objective = loss
                if settings.kl.place == "loss":
                    penalty = (weights * kl_estimate(out.logprobs, ref, settings.kl.estimator)).sum()
                    objective = objective + self.kl_controller.coef * penalty
                    sums.add({"ppo/kl_loss": float(penalty.detach())}, 1)
                if out.entropy is not None:
                    objective = objective - settings.entropy_coef * (weights * out.entropy).sum()
                if objective.requires_grad:
                    self._backward(self.policy, objective)
            sums.add(
                {
                    "ppo/policy_loss": float(loss.detach()),
                    "ppo/approx_kl": float(stats.approx_kl),
                    "ppo/clip_fraction": float(stats.clip_fraction),
                    "ppo/ratio_mean": float(stats.ratio_mean),
                },
                1,
            )
        return sums.sums

    def _value_gradient(self, experience: Experience, packs: list[tuple[Pack, Tensor]], tokens: int) -> dict[str, float]:
        sums = Averages()
        for pack, rows in packs:
            weights = torch.full((len(rows),), 1 / tokens, device=self.critic.device)
            old, returns = (x[rows].to(self.critic.device) for x in (experience.values, experience.returns))
            loss, clipped = ppo_value_loss(self.critic.values(pack), old, returns, weights, self.settings.value_clip)
            self._backward(self.critic, self.settings.value_coef * loss)
            sums.add({"ppo/value_loss": float(loss.detach()), "ppo/value_clip_fraction": float(clipped)}, 1)
        return sums.sums

    def _ptx_gradient(self, number: int) -> float:
        """The pre-training mix (InstructGPT, eq. 2): the SFT loss on other data, in the same optimizer step."""
        assert self.ptx is not None
        examples, order = self.ptx
        packs = pack_trees([examples[i].tree for i in order.batch(number)], self.config.train.max_tokens)
        tokens, total = count_targets(packs), 0.0
        for pack in packs:
            if not pack.num_targets:
                continue
            logprobs = self.policy.token_logprobs(pack).logprobs
            loss = sft_loss(logprobs, torch.full_like(logprobs, 1 / tokens))
            self._backward(self.policy, self.settings.ptx_coef * loss)
            total += float(loss.detach())
        return total

    def _backward(self, model: TrainedModel, loss: Tensor) -> None:
        self._spoilt |= not math.isfinite(float(loss.detach()))
        model.backward(loss)

    def _optimizer_step(self, experience: Experience) -> dict[str, float]:
        """Both optimizers step, or neither: what is not finite in one spoils the step of both (ALGORITHMS §0.7). {}: neither did."""
        models = [self.policy, self.critic] if self.acting(experience) else [self.critic]
        if self._spoilt or not all(map(finite_gradients, models)):
            for model in models:
                model.backward(torch.tensor(math.nan))
        steps = [self.engine.step(), self.critic.step()] if len(models) == 2 else [self.critic.step()]
        if steps[-1].skipped:
            return {}
        norm = steps[0].grad_norm if len(steps) == 2 else 0.0
        return {"train/grad_norm": norm, "ppo/critic_grad_norm": steps[-1].grad_norm, "ppo/critic_lr": steps[-1].lr}

    # -- experience --------------------------------------------------------------------------------------------------

    def sample(
        self, prompts: Sequence[Example | Record | Mapping[str, Any] | str], count: int, seeds: np.random.SeedSequence
    ) -> Rollouts:
        """`count` answers to each prompt. An answer depends on its prompt and on its place in the batch, not on its neighbours."""
        asked = [self._ask(prompt) for prompt in prompts for _ in range(count)]
        words = seeds.generate_state(len(asked), np.uint64).tolist()
        answers = self.engine.generate([ids for _, ids in asked], self.params, seeds=words)
        samples = [
            Sample(
                prompt,
                ids,
                answer.token_ids,
                before_stop(self.encoder.decode(answer.token_ids), self.params.stop),
                answer.truncated,
            )
            for (prompt, ids), answer in zip(asked, answers, strict=True)
        ]
        return Rollouts(samples, torch.tensor([x for answer in answers for x in answer.logprobs], dtype=torch.float32))

    def _ask(self, prompt: Example | Record | Mapping[str, Any] | str) -> tuple[Prompt, list[int]]:
        """The record and its tokens. Raises DataError for what is no prompt."""
        if isinstance(prompt, str):
            prompt = Prompt((Message("user", prompt),), origin="prompt")
        elif isinstance(prompt, Mapping):
            prompt = next(read_records([prompt], "prompt"))
        if not isinstance(prompt, Example):
            if isinstance(prompt, PlainText) or not isinstance(prompt, Record):
                raise DataError(f"a prompt is a text, a row, a record or an example, not a {type(prompt).__name__}.")
            prompt = prompt if isinstance(prompt, Prompt) else prompt.as_prompt()
            return prompt, list(self.encoder.encode_prompt(prompt.messages))
        record = prompt.record if isinstance(prompt.record, Prompt) else prompt.record.as_prompt()  # type: ignore[union-attr]
        return record, prompt.tree.sequence(prompt.tree.leaves[0]).tolist()

    def _seeds(self, *words: int) -> np.random.SeedSequence:
        seed = self.config.generate.seed
        return np.random.SeedSequence([self.config.run.seed if seed is None else seed, *words])

    def _read_policy(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """[N] log-probabilities and entropies under the weights that sampled, as the trainer itself computes them."""
        entropies: list[Tensor] = []

        def both(pack: Pack) -> Tensor:
            out = self.policy.token_logprobs(pack, temperature=self.params.temperature, entropy=True)
            assert out.entropy is not None
            entropies.append(out.entropy.cpu())
            return out.logprobs

        with self.policy.evaluating():
            return rollouts.read(self.config.train.max_tokens, both), torch.cat(entropies)

    def shaped(self, scores: Sequence[float], samples: Sequence[Sample]) -> list[float]:
        """Raw scores → what is given as reward: normalised by the running moments, clipped, minus the penalty for no end."""
        settings, shaped = self.settings, list(scores)
        if settings.normalize_score:
            self.moments.update(shaped)
            shaped = self.moments.normalize(shaped)
        if settings.clip_reward is not None:
            shaped = [min(max(score, -settings.clip_reward), settings.clip_reward) for score in shaped]
        return [score - settings.missing_eos_penalty * sample.truncated for score, sample in zip(shaped, samples, strict=True)]

    def _compare_with_sampler(self, rollouts: Rollouts, old: Tensor) -> tuple[float, float]:
        """(mean, max) of |log π_trainer - log π_sampler| over all tokens; told when it is more than rounding."""
        mean, largest = spread(old - rollouts.sampler_logprobs)
        same = self.engine.generator.dtype in (None, torch.float32) and self.config.train.precision == "float32"
        if largest > LOGPROB_TOLERANCE["float32" if same else "bf16"]:
            log.warning("Sampler and trainer differ by up to %.3g in a token's log-probability (mean %.3g).", largest, mean)
        return mean, largest

    def _show(self, rollouts: Rollouts, scores: Sequence[float], kl: Sequence[float]) -> list[dict[str, Any]]:
        """The first few answers for samples.jsonl."""
        return [
            {
                "prompt": [message.as_dict() for message in sample.prompt.messages],
                "response": sample.response,
                "score": scores[i],
                "kl": kl[i],
                "finish_reason": "length" if sample.truncated else "stop",
                "origin": sample.prompt.origin,
            }
            | ({} if sample.prompt.reference is None else {"reference": sample.prompt.reference})
            for i, sample in enumerate(rollouts.samples[:SAMPLES_SHOWN])
        ]

    @staticmethod
    def _tflops(flops_per_token: int, rollouts: Rollouts, seconds: float) -> float:
        return flops_per_token * sum(rollouts.lengths) / max(seconds, 1e-9) / 1e12

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, float]:
        """Score, KL and shape of one sampled answer to each held-out prompt, always with the same random numbers."""
        prompts = limited(self.examples.valid, self.config.eval.max_examples)
        if not len(prompts):
            return {}
        began = time.perf_counter()
        rollouts = self.sample(prompts, 1, self._seeds(0))
        board = combine(self.sources, rollouts.samples)
        logprobs, entropy = self._read_policy(rollouts)
        ref = rollouts.read(
            self.config.train.max_tokens, lambda pack: self.reference.token_logprobs(pack, self.params.temperature)
        )
        k1 = rollouts.sum_by_response(logprobs - ref)
        self.samples = self._show(rollouts, board.total, k1.tolist())
        return score_metrics(board) | rollouts.metrics() | {
            "ppo/kl": float(k1.mean()),
            "ppo/kl_per_token": float((logprobs - ref).double().mean()),
            "ppo/entropy": float(entropy.double().mean()),
            "time/eval": time.perf_counter() - began,
        }  # fmt: skip

    # -- state and results -------------------------------------------------------------------------------------------

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        tensors = prefixed("policy", self.policy.state_tensors()) | prefixed("critic", self.critic.state_tensors())
        return tensors, {
            "policy": self.policy.state(),
            "critic": self.critic.state(),
            "kl_controller": self.kl_controller.state(),
            "moments": self.moments.state(),
            "experiences": self.experiences,
        }

    def load_state(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        self.policy.load_state(unprefixed("policy", tensors), state["policy"])
        self.critic.load_state(unprefixed("critic", tensors), state["critic"])
        self.kl_controller.load_state(state["kl_controller"])
        self.moments.load_state(state["moments"])
        self.experiences = state["experiences"]

    def save(self, folder: Path) -> None:
        save_trained(self.policy, folder, self.config, self.stage, self.encoder.stop_token_ids)

    def export(self, run: Path) -> None:
        """RUN/model, RUN/adapter, RUN/ema of the policy, and RUN/critic."""
        export_trained(self.policy, run, self.config, self.stage, self.encoder.stop_token_ids)
        save_trained(self.critic, run / "critic", self.config, self.stage, self.encoder.stop_token_ids)

    def __enter__(self) -> PPOTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _load_ptx(self) -> tuple[Sequence[Example], BatchOrder] | None:
        """The examples of the pre-training mix and their order; as many a step as a mini-batch has responses."""
        config, settings = self.config, self.settings
        if settings.ptx_coef == 0:
            return None
        data = config.data.model_copy(update={"train": settings.ptx_data, "valid": None, "holdout": 0.0})
        examples = load_examples(data, self.encoder, "demonstration", seed=config.run.seed, max_length=config.data.max_length)
        check_budget(examples, config.train.max_tokens, config.data.max_length)
        rows = math.ceil(config.train.batch_size * settings.samples_per_prompt / settings.mini_batches)
        return examples.train, BatchOrder(len(examples.train), min(rows, len(examples.train)), config.run.seed)


def finite_gradients(model: TrainedModel) -> bool:
    gradients = [p.grad for p in model.parameters.values() if p.grad is not None]
    return not gradients or bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients)))
