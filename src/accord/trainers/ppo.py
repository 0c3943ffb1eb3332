"""PPO, the classic RLHF stage: sample, score, estimate advantages, improve actor and critic (docs/algorithms/ppo.md).

Read `PPOTrainer.step`, `make_experience` and `update` from top to bottom: that is one iteration.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accord.algorithms.advantages import RunningMoments, explained_variance
from accord.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate, token_rewards
from accord.data.dataset import Example, load_examples
from accord.data.loader import BatchOrder
from accord.data.packing import Pack
from accord.engine.generate import SamplingParams
from accord.engine.hybrid import HybridEngine
from accord.engine.trained import TrainedModel, prefixed, unprefixed
from accord.errors import ConfigError, DataError
from accord.models.distribution import full_kl
from accord.models.load import load_causal
from accord.rewards import Sample, combine
from accord.rewards.base import ScoreBoard
from accord.track.run import RunFolder
from accord.trainers.common import check_budget, export_trained, limited, load_data, save_trained
from accord.trainers.critic import Critic, TextCritic, make_critic
from accord.trainers.loop import run_loop
from accord.trainers.ppo_answers import Answers, Asked
from accord.trainers.ppo_best import BestUpdater
from accord.trainers.ppo_buffer import ReplayBuffer
from accord.trainers.ppo_experience import (
    Averages,
    Experience,
    Forward,
    MiniBatch,
    Rollouts,
    estimate_advantages,
    importance_weights,
    score_metrics,
    spread,
)
from accord.trainers.ppo_journal import JOURNAL, Journal, Kind, Scored, identity_of, record_of, scored_of
from accord.trainers.ppo_judge import HeldOutJudge
from accord.trainers.ppo_models import Reference, check_lengths, check_settings, count_parameters
from accord.trainers.ppo_rewards import reward_sources
from accord.trainers.ppo_update import Updater

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
    headline: tuple[str, ...] = ("ppo/score", "ppo/judge", "ppo/kl", "ppo/response_length", "ppo/eos_rate")
    best_metric: str | None = "ppo/score"

    def __init__(self, config: Config, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config = config.for_stage("ppo")
        self.settings = settings = config.ppo
        check_settings(config)
        self.encoder, self.examples, _ = load_data(config, "prompt", train_dataset, valid_dataset)
        self.order = self._prompt_order()
        self.total_steps = self.order.total_steps(config.train.epochs, config.train.max_steps)
        warmup = config.critic.warmup_steps
        if warmup >= self.total_steps:
            raise ConfigError(f"critic.warmup_steps={warmup} leaves none of the {self.total_steps} steps to the policy.")
        self.judge = HeldOutJudge(settings.judge, len(self.examples.valid))
        ptx = self._load_ptx()
        policy = load_causal(config.model, seed=config.run.seed, trainable=True)
        policy.tokenizer = self.encoder.tokenizer
        self.sources = reward_sources(config, policy)

        updates = settings.ppo_epochs * settings.mini_batches  # of one step
        self.policy = TrainedModel(policy, config.train, total_steps=(self.total_steps - warmup) * updates)
        self.critic = make_critic(config, self.policy, self.total_steps * updates) if settings.needs_critic else None
        longest = max(int(part.num_tokens().max()) for part in (self.examples.train, self.examples.valid) if len(part))
        # A critic that reads text counts other tokens: it says itself what it can't read.
        check_lengths(config, longest, policy, None if isinstance(self.critic, TextCritic) else self.critic)
        self.reference = Reference(config, self.policy)
        self.engine = HybridEngine(self.policy, config.engine)
        self.updater = Updater(config, self.engine, self.critic, self.reference, ptx)
        self.best = BestUpdater(config, self.engine, self.total_steps) if settings.objective != "clip" else None
        self.params = SamplingParams.from_settings(config.generate, self.encoder.stop_token_ids)
        if self.params.truncates:
            log.warning(
                "generate.top_p, top_k, min_p or repetition_penalty is set: answers are sampled from another distribution than the one "
                "whose log-probabilities PPO learns from."
            )
        self.answers = Answers(config, self.encoder, self.engine, self.params)
        kl = settings.kl
        self.kl_controller = AdaptiveKL(kl.coef, kl.target, kl.horizon) if kl.controller == "adaptive" else FixedKL(kl.coef)
        self.moments = RunningMoments()
        self.buffer = ReplayBuffer(settings.replay_buffer)
        self.experiences = 0  # made so far: a step is one of them
        self.journal: Journal | None = None  # what was sampled and scored; `train` keeps that of its run
        self.samples: list[dict[str, Any]] = []

    def train(self, run: RunFolder | None = None) -> dict[str, Any]:
        """Run to the end (or go on from the last checkpoint); returns the summary."""
        folder = Path(self.config.run.dir) if run is None else run.folder
        self.journal = Journal(folder / JOURNAL, folder / "checkpoints" if self.settings.journal == "recent" else None)
        try:
            return run_loop(self, run)
        finally:
            self.journal = None

    # -- one iteration -----------------------------------------------------------------------------------------------

    def step(self, step: int) -> dict[str, float]:
        """One PPO iteration: sample, score, estimate advantages, improve actor and critic (ALGORITHMS §4)."""
        self.experiences = step - 1
        return self.improve(self.make_experience(self.prompts(step), once=True))

    def prompts(self, step: int) -> list[Example]:
        """Those of the experience that is step `step`."""
        return [self.examples.train[i] for i in self.order.batch(step)]

    def learn(
        self, queries: Sequence[Asked | Tensor], responses: Sequence[Sequence[int] | Tensor], scores: Sequence[float]
    ) -> dict[str, float]:
        """One PPO iteration on answers that were sampled and scored elsewhere, from the policy as it is now; its metrics.

        A query is a prompt as in `make_experience`, or its token ids. A response is its token ids, with the end token where the model
        ended it. Raises DataError for what can't be learned from.
        """
        self.engine.times.start()
        rollouts = self.answers.given(queries, responses)
        if len(scores) != len(rollouts) or not all(map(math.isfinite, scores)):
            raise DataError(f"{len(rollouts)} responses need as many finite scores, got {list(scores)}.")
        self.experiences += 1
        return self.improve(self.weigh(rollouts, ScoreBoard([float(score) for score in scores]), once=True))

    def improve(self, experience: Experience) -> dict[str, float]:
        """The second half of an iteration: the update, and the metrics of the whole."""
        stats = self.update(experience)
        metrics = experience.metrics | stats | self.engine.times.close(len(experience))
        metrics["throughput/tokens_per_s"] = metrics["train/tokens"] / metrics["time/step"]
        return metrics

    def make_experience(self, prompts: Sequence[Asked], once: bool = False) -> Experience:
        """Answer the prompts, score the answers, and work out what each token was worth.

        A prompt is what the user says, a row in any format of data.train, a record, or one of `self.examples.train`. `once` promises
        that the very next thing is `update`, and that once: see `_keep_graphs`.
        """
        self.experiences += 1
        self.engine.times.start()
        rollouts, board, _ = self.answer("train", self.experiences, prompts, self.settings.samples_per_prompt)
        return self.weigh(rollouts, board, once)

    def answer(self, kind: Kind, number: int, prompts: Sequence[Asked], count: int) -> Scored:
        """Answers to the prompts, scored: those that the journal has of this very step, else sampled, asked for and recorded there."""
        request = self.answers.request(prompts, count, number if kind == "train" else 0)  # evaluations share their random numbers
        journal, main = self.journal, self.policy.ranks.ask_main  # the main process reads and writes it, for all
        identity: dict[str, str] = {}
        if journal is not None:
            rewards = [source.model_dump(mode="json") for source in self.settings.rewards]
            identity = identity_of(request, self.params, [rewards, self.settings.judge], self.policy.parameters.values())
            if (record := main(lambda: journal.recall(kind, number, identity))) is not None:
                return scored_of(record, request, self.answers)
        rollouts = self.answers.sample(request, at_once=self.config.train.batch_size * count if kind == "train" else None)
        with self.engine.times("score"):
            board = combine(self.sources, rollouts.samples)
            judged = self.judge.scores(rollouts.samples) if kind == "eval" else None
        scored = Scored(rollouts, board, judged)
        if journal is not None:
            main(lambda: journal.write(kind, number, record_of(identity, scored)))
        return scored

    def weigh(self, rollouts: Rollouts, board: ScoreBoard, once: bool = False) -> Experience:
        """Scored answers with what PPO learns from: log-probabilities, values, rewards, advantages."""
        settings = self.settings
        penalised = settings.objective == "clip"  # elsewhere KL is only measured
        in_reward, full = penalised and settings.kl.place == "reward", settings.kl.estimator == "full"
        with self.engine.times("logprob"):
            if self.critic is not None:
                self.critic.see(rollouts.samples)
            batch = self._minibatch(rollouts)
            if once:
                batch = self._keep_graphs(batch)
            old, ref, entropy, kl, of_trunk = self._read_policy(rollouts, batch, full and in_reward)
            shared = self.critic is not None and self.critic.shares_trunk
            values = of_trunk if shared else self._read_critic(rollouts, batch)
        if in_reward and not full:
            kl = kl_estimate(old, ref, settings.kl.estimator)

        coef = self.kl_controller.coef
        scores = torch.tensor(self.shaped(board.total, rollouts.samples))
        token_scores = None
        if board.per_token is not None:
            token_scores = torch.tensor([score for of_response in board.per_token for score in of_response])
        rewards = token_rewards(kl, scores, rollouts.last, coef, token_scores)
        advantages, returns = estimate_advantages(settings, rewards, values, rollouts)
        importance = importance_weights(settings, old, rollouts)

        k1 = rollouts.sum_by_response(old - ref)
        metrics = score_metrics(board) | rollouts.metrics() | self._compare_with_sampler(rollouts, old)
        metrics |= {
            "ppo/kl": float(k1.mean()),
            "ppo/kl_per_token": float((old - ref).double().mean()),
            "ppo/entropy": float(entropy.double().mean()),
        }
        if penalised:
            metrics |= {"ppo/kl_coef": coef, "ppo/non_score_reward": float(rollouts.sum_by_response(-coef * kl).mean())}
        if values is not None and returns is not None:
            metrics["ppo/explained_variance"] = explained_variance(values, returns)
        if importance is not None:
            metrics["ppo/importance_weight"] = float(importance.double().mean())
        if any(getattr(source, "fallback", None) is not None for source in self.sources):
            metrics["ppo/reward_fallbacks"] = float(board.failures)
        self.samples = rollouts.shown(SAMPLES_SHOWN, board.sums, k1.tolist())
        return Experience(
            self.experiences, rollouts, board, old, ref, values, rewards, advantages, returns, metrics["ppo/kl"], importance, metrics,
            None if batch.first is None else batch,
        )  # fmt: skip

    def update(self, experience: Experience) -> dict[str, float]:
        """`ppo_epochs` passes over the experience (with `replay_buffer` those before it too) in `mini_batches` optimizer steps each; then β
        for the next one (see also BestUpdater).

        Returns the means over everything that was computed: losses as `ppo.aggregation` counts, the rest by tokens.
        """
        if self.best is not None:
            return self.best.update(experience)
        settings, learns, updater = self.settings, self.acting(experience.number), self.updater
        fresh, experience = experience, self.buffer.join(experience)
        if self.critic is not None:
            self.critic.see(experience.rollouts.samples)
        averages, began = Averages(), time.perf_counter()
        counts = {"ppo/skipped_minibatches": 0.0, "ppo/stopped_early": 0.0, "ppo/updates": 0.0, "train/tokens": 0.0}
        coef, passes = self.kl_controller.coef, 0  # tokens of the update's passes, 2 FLOP a parameter each
        number = (experience.number - 1) * settings.ppo_epochs * settings.mini_batches  # of the optimizer step, for PTX
        for epoch in range(settings.ppo_epochs):
            for responses in experience.minibatches(settings.mini_batches, epoch, self.config.run.seed):
                number += 1
                batch = experience.whole or self._minibatch(experience.rollouts, responses)
                experience.whole = None  # its graphs serve one backward pass, which comes first
                items = batch.tokens if settings.aggregation == "token" else batch.responses
                losses, stats = updater.policy_gradient(experience, batch, coef, learns)
                averages.add(losses, items)
                averages.add(stats, batch.tokens)
                if settings.target_kl is not None and stats["ppo/approx_kl"] > settings.target_kl:
                    counts["ppo/stopped_early"] = 1.0  # the samples no longer speak for this policy
                    break
                if settings.ratio_threshold is not None and stats["ppo/ratio_mean"] > settings.ratio_threshold:
                    counts["ppo/skipped_minibatches"] += 1
                    updater.discard()
                    continue
                if self.critic is not None and not self.critic.shares_trunk:
                    losses, stats = updater.value_gradient(experience, batch)
                    averages.add(losses, items)
                    averages.add(stats, batch.tokens)
                counts["train/tokens"] += sum(len(pack) for pack, _ in batch.packs)
                passes += sum(len(pack) * (3 if batch.forward(pack) is None else 2) for pack, _ in batch.packs)
                if updater.ptx is not None and learns:
                    averages.add({"ppo/ptx_loss": updater.ptx_gradient(number)}, batch.tokens)
                info = updater.step(learns)
                counts["ppo/updates"] += len(info) > 0
                averages.add(info, batch.tokens)
            if counts["ppo/stopped_early"]:
                updater.discard()
                break
        if self.buffer.size:
            counts["ppo/replayed"] = float(len(experience) - len(fresh))
        self.buffer.add(fresh)
        self.kl_controller.update(fresh.kl, episodes=len(fresh))
        seconds = time.perf_counter() - began
        self.engine.times.add("train", seconds)
        own_critic = None if self.critic is not None and self.critic.shares_trunk else self.critic
        trained = sum(count_parameters(model) for model, moves in ((self.policy, learns), (own_critic, True)) if moves and model)
        return averages.means() | counts | {
            "ppo/kl_coef": coef,
            "train/lr": self.policy.lr(self.policy.schedule_step) if self.policy.schedule_step else 0.0,
            "train/skipped": float((self.critic or self.policy).skipped),
            "throughput/train_tflops": 2 * trained * passes / max(seconds, 1e-9) / 1e12,
        }  # fmt: skip

    def acting(self, number: int) -> bool:
        """False in the first `critic.warmup_steps` experiences, in which only the critic learns."""
        return number > self.config.critic.warmup_steps

    # -- experience --------------------------------------------------------------------------------------------------

    def _keep_graphs(self, batch: MiniBatch) -> MiniBatch:
        """All responses of an experience, the largest pack in front and read with gradient by actor and critic: where there is one optimizer
        step, the forward that says what the sampling policy thought is the forward of the update too, and the ratio is exactly 1.

        Its graphs must stay until the advantages are known, and those of one pack are what `train.max_tokens` allows: the other packs are
        read again, after the backward pass of the first. (The critic's graph waits for the critic's turn.)

        The batch as it was where there are more steps or processes, where earlier experiences are learned from too, or where the policy
        does not learn yet.
        """
        settings, alone = self.settings, self.policy.ranks.world == 1
        once = settings.ppo_epochs * settings.mini_batches == 1 and not self.buffer.size
        if not (once and alone and settings.objective == "clip" and self.acting(self.experiences) and batch.packs):
            return batch
        packs = sorted(batch.packs, key=lambda item: len(item[0]), reverse=True)
        return replace(batch, packs=packs, first=self._forward(packs[0][0], self.critic))

    def _minibatch(self, rollouts: Rollouts, responses: Sequence[int] | None = None) -> MiniBatch:
        """The responses of one optimizer step; None: all of them."""
        numbers = range(len(rollouts)) if responses is None else responses
        return rollouts.minibatch(numbers, self.config.train.max_tokens, self.policy.shares)

    def _forward(self, pack: Pack, critic: Critic | None) -> Forward:
        """The pack as the policy and `critic` read it, with gradient where enabled."""
        with nullcontext() if critic is None else critic.beside_policy():
            policy = self.policy.distribution(pack, self.params.temperature)
            tokens = policy.at(pack.targets.to(self.policy.device), entropy=True)
            if self.settings.entropy_coef == 0:  # what is only looked at keeps no graph
                tokens = replace(tokens, entropy=None if tokens.entropy is None else tokens.entropy.detach())
            return Forward(policy, tokens, None if critic is None else critic.values(pack))

    def _read_policy(self, rollouts: Rollouts, batch: MiniBatch, exact_kl: bool = False) -> Tensor:
        """[5, N]: log-probabilities under the weights that sampled, as the trainer itself computes them, and under the reference;
        entropies; with `exact_kl` the KL over the whole vocabulary (else 0); of a critic on the actor's trunk the values (else 0).
        `batch`: all responses.
        """
        trunk = self.critic if self.critic is not None and self.critic.shares_trunk else None

        def read(pack: Pack) -> Tensor:
            reference = self.reference.distribution(pack, self.params.temperature)
            with self.policy.evaluating():
                policy, now, values = batch.forward(pack) or self._forward(pack, trunk)
                ref = reference.at(pack.targets.to(self.policy.device)).logprobs.to(self.policy.device)
                assert now.entropy is not None
                kl = full_kl(policy, reference) if exact_kl else torch.zeros_like(ref)
                of_trunk = torch.zeros_like(ref) if trunk is None or values is None else values
                return torch.stack([now.logprobs, ref, now.entropy, kl, of_trunk])

        return rollouts.read(batch.packs, read, self.policy)

    def _read_critic(self, rollouts: Rollouts, batch: MiniBatch) -> Tensor | None:
        """[N] values of the states before each token; None without a critic. `batch`: all responses."""
        critic = self.critic
        if critic is None:
            return None

        def read(pack: Pack) -> Tensor:
            forward = batch.forward(pack)
            values = critic.values(pack) if forward is None else forward.values
            assert values is not None
            return values.detach()

        with critic.evaluating():
            return rollouts.read(batch.packs, read, critic)

    def shaped(self, scores: Sequence[float], samples: Sequence[Sample]) -> list[float]:
        """Raw scores → what is given as reward: normalised by the running moments, clipped, minus the penalty for no end."""
        settings, shaped = self.settings, list(scores)
        if settings.normalize_score:
            self.moments.update(shaped)
            shaped = self.moments.normalize(shaped)
        if settings.clip_reward is not None:
            shaped = [min(max(score, -settings.clip_reward), settings.clip_reward) for score in shaped]
        return [score - settings.missing_eos_penalty * sample.truncated for score, sample in zip(shaped, samples, strict=True)]

    def _compare_with_sampler(self, rollouts: Rollouts, old: Tensor) -> dict[str, float]:
        """Mean and maximum of |log π_trainer - log π_sampler| over all tokens; told when it is more than rounding."""
        if rollouts.sampler_logprobs is None:
            return {}
        mean, largest = spread(old - rollouts.sampler_logprobs)
        same = self.engine.generator.dtype in (None, torch.float32) and self.config.train.precision == "float32"
        if largest > LOGPROB_TOLERANCE["float32" if same else "bf16"]:
            log.warning("Sampler and trainer differ by up to %.3g in a token's log-probability (mean %.3g).", largest, mean)
        metrics = {"ppo/sampler_logp_diff_mean": mean, "ppo/sampler_logp_diff_max": largest}
        if seconds := self.engine.times.seconds["generate"]:  # none where the answers came from the journal
            metrics["throughput/generate_tflops"] = 2 * count_parameters(self.policy) * len(old) / seconds / 1e12
        return metrics

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, float]:
        """Score, KL and shape of one sampled answer to each held-out prompt, always with the same random numbers."""
        prompts = limited(self.examples.valid, self.config.eval.max_examples)
        if not len(prompts):
            return {}
        began = time.perf_counter()
        rollouts, board, judged = self.answer("eval", step, prompts, 1)
        logprobs, ref, entropy, *_ = self._read_policy(rollouts, self._minibatch(rollouts))
        k1 = rollouts.sum_by_response(logprobs - ref)
        self.samples = rollouts.shown(SAMPLES_SHOWN, board.sums, k1.tolist())
        return score_metrics(board) | self.judge.metrics(judged, self.samples) | rollouts.metrics() | {
            "ppo/kl": float(k1.mean()),
            "ppo/kl_per_token": float((logprobs - ref).double().mean()),
            "ppo/entropy": float(entropy.double().mean()),
            "time/eval": time.perf_counter() - began,
        }  # fmt: skip

    # -- state and results -------------------------------------------------------------------------------------------

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        models = {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, model in models.items():
            tensors |= prefixed(name, model.state_tensors())
        if self.buffer.kept:
            tensors["replay_buffer"] = self.buffer.tensors()
        return tensors, {name: model.state() for name, model in models.items()} | {
            "kl_controller": self.kl_controller.state(),
            "moments": self.moments.state(),
            "experiences": self.experiences,
            "replay_buffer": self.buffer.state(),
        }

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
        self.policy.load_state(unprefixed("policy", tensors), state["policy"])
        if self.critic is not None:
            self.critic.load_state(unprefixed("critic", tensors), state["critic"])
        self.kl_controller.load_state(state["kl_controller"])
        self.moments.load_state(state["moments"])
        self.experiences = state["experiences"]
        self.buffer.load_state(tensors.get("replay_buffer", {}), state.get("replay_buffer", []))

    def save(self, folder: Path) -> None:
        save_trained(self.policy, folder, self.config, self.stage, self.encoder.stop_token_ids)

    def export(self, run: Path) -> None:
        """RUN/model, RUN/adapter, RUN/ema of the policy, and RUN/critic where there is one."""
        export_trained(self.policy, run, self.config, self.stage, self.encoder.stop_token_ids)
        if self.critic is None:
            return
        critic, stops = self.critic, self.encoder.stop_token_ids
        critic.write(lambda: critic.save(run / "critic", stops))

    def __enter__(self) -> PPOTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _prompt_order(self) -> BatchOrder:
        """Which prompts make up which experience: `generation_batches` rounds of `train.batch_size` of them."""
        config, rounds, rows = self.config, self.settings.generation_batches, len(self.examples.train)
        size = config.train.batch_size * rounds
        if rounds > 1 and rows < size:
            raise DataError(
                f"{rows:,} prompts are fewer than one experience of ppo.generation_batches={rounds} × train.batch_size="
                f"{config.train.batch_size}. Add prompts or lower one of the two."
            )
        return BatchOrder(rows, size, config.run.seed, config.data.shuffle)

    def _load_ptx(self) -> tuple[Sequence[Example], BatchOrder] | None:
        """The examples of the pre-training mix and their order; as many a step as a mini-batch has responses."""
        config, settings = self.config, self.settings
        if settings.ptx_coef == 0:
            return None
        data = config.data.model_copy(update={"train": settings.ptx_data, "valid": None, "holdout": 0.0})
        examples = load_examples(data, self.encoder, "demonstration", seed=config.run.seed, max_length=config.data.max_length)
        check_budget(examples, config.train.max_tokens, config.data.max_length)
        rows = math.ceil(self.order.batch_size * settings.samples_per_prompt / settings.mini_batches)
        return examples.train, BatchOrder(len(examples.train), min(rows, len(examples.train)), config.run.seed)
