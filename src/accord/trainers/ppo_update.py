"""One optimizer step of PPO: the gradients of actor and critic over a mini-batch, the pre-training mix, and the step of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accord.algorithms.kl import kl_estimate
from accord.algorithms.losses import ppo_policy_loss, ppo_value_loss, sft_loss, token_weights
from accord.data.packing import Pack
from accord.engine.trained import TrainedModel, count_targets
from accord.models.distribution import full_kl
from accord.trainers.ppo_experience import Averages, Experience, MiniBatch

if TYPE_CHECKING:
    from accord.config import Config
    from accord.data.dataset import Example
    from accord.data.loader import BatchOrder
    from accord.engine.hybrid import HybridEngine
    from accord.trainers.critic import Critic
    from accord.trainers.ppo_models import Reference

# Losses are means as ppo.aggregation says; what is reported beside them are means over tokens.
Reported = tuple[dict[str, float], dict[str, float]]


class Updater:
    """Adds up gradients over the packs of a mini-batch, and then makes the step. `critic` is None where none is needed."""

    def __init__(
        self,
        config: Config,
        engine: HybridEngine,
        critic: Critic | None,
        reference: Reference,
        ptx: tuple[Sequence[Example], BatchOrder] | None,
    ) -> None:
        self.config, self.settings = config, config.ppo
        self.engine, self.policy, self.critic, self.reference, self.ptx = engine, engine.model, critic, reference, ptx
        self._spoilt = False  # a loss of the optimizer step under way is not finite

    def weights(self, batch: MiniBatch, rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """([n] what each token counts for in the losses, [n] in the statistics) of the optimizer step."""
        of = token_weights(
            lengths[rows], batch.tokens, batch.responses, self.settings.aggregation, self.config.generate.max_new_tokens
        )
        return of, torch.full(of.shape, 1 / batch.tokens)

    def policy_gradient(self, experience: Experience, batch: MiniBatch, kl_coef: float, learns: bool = True) -> Reported:
        """Backward pass of the surrogate objective over one mini-batch; what it says of the policy before the step.

        `learns` False computes the same numbers without gradient (the critic's warm-up). A critic on the actor's trunk learns here
        too, from the same forward and in the same backward.
        """
        settings, device = self.settings, self.policy.device
        temperature = self.config.generate.temperature
        owner, lengths = experience.rollouts.owner, experience.rollouts.lengths_by_token
        trunk = self.critic if self.critic is not None and self.critic.shares_trunk else None  # learns in the same backward

        def improve(item: tuple[Pack, Tensor]) -> tuple[Tensor, Reported]:
            pack, rows = item
            forward = batch.forward(pack)
            weights, shares = self.weights(batch, rows, lengths)
            if experience.importance is not None:
                weights = weights * experience.importance[rows]
            weights, shares, old, ref, advantages, sequence = (
                x.to(device)
                for x in (weights, shares, experience.old_logprobs[rows], experience.ref_logprobs[rows], experience.advantages[rows], owner[rows])
            )  # fmt: skip
            with nullcontext() if trunk is None else trunk.beside_policy():
                with torch.set_grad_enabled(learns):
                    if forward is None:
                        now = self.policy.distribution(pack, temperature)
                        out = now.at(pack.targets.to(device), entropy=settings.entropy_coef > 0)
                    else:
                        now, out, _ = forward
                    loss, stats = ppo_policy_loss(
                        out.logprobs, old, advantages, weights, settings.clip, settings.clip_high, settings.dual_clip,
                        sequence if settings.ratio == "sequence" else None, shares,
                    )  # fmt: skip
                    parts = {"ppo/policy_loss": loss}
                    objective = loss
                    if settings.kl.place == "loss":
                        if settings.kl.estimator == "full":
                            kl = full_kl(now, self.reference.distribution(pack, temperature))
                        else:
                            kl = kl_estimate(out.logprobs, ref, settings.kl.estimator)
                        parts["ppo/kl_loss"] = (weights * kl).sum()
                        objective = objective + kl_coef * parts["ppo/kl_loss"]
                    if settings.old_kl_coef > 0:
                        parts["ppo/old_kl_loss"] = (weights * kl_estimate(out.logprobs, old, "k3")).sum()
                        objective = objective + settings.old_kl_coef * parts["ppo/old_kl_loss"]
                    if settings.entropy_coef > 0:
                        assert out.entropy is not None
                        objective = objective - settings.entropy_coef * (weights * out.entropy).sum()
                reported = {f"ppo/{name}": float(value) for name, value in stats._asdict().items()}
                if trunk is not None:  # on the hidden states of the policy's forward; in the warm-up they have no gradient
                    parts["ppo/value_loss"], clipped = self._value_loss(trunk, experience, batch, pack, rows)
                    reported["ppo/value_clip_fraction"] = float(clipped)
                    objective = objective + settings.value_coef * parts["ppo/value_loss"]
            return objective, ({name: float(part.detach()) for name, part in parts.items()}, reported)

        learner = self.policy if learns else trunk
        if learner is not None:
            return self._learn(learner, batch.packs, improve)
        return _added_up(self.policy.each(batch.packs, lambda item: improve(item)[1]))

    def value_gradient(self, experience: Experience, batch: MiniBatch) -> Reported:
        """Backward pass of the critic's loss over one mini-batch."""
        critic = self.critic
        assert critic is not None

        def improve(item: tuple[Pack, Tensor]) -> tuple[Tensor, Reported]:
            loss, clipped = self._value_loss(critic, experience, batch, *item)
            return self.settings.value_coef * loss, (
                {"ppo/value_loss": float(loss.detach())},
                {"ppo/value_clip_fraction": float(clipped)},
            )

        return self._learn(critic, batch.packs, improve)

    def _value_loss(
        self, critic: Critic, experience: Experience, batch: MiniBatch, pack: Pack, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert experience.values is not None and experience.returns is not None
        weights, shares, old, returns = (
            x.to(critic.device)
            for x in (*self.weights(batch, rows, experience.rollouts.lengths_by_token), experience.values[rows], experience.returns[rows])
        )  # fmt: skip
        forward = batch.forward(pack)
        values = critic.values(pack) if forward is None else forward.values
        assert values is not None
        return ppo_value_loss(values, old, returns, weights, self.settings.value_clip, shares)

    def ptx_gradient(self, number: int) -> float:
        """The pre-training mix (InstructGPT, eq. 2): the SFT loss on other data, in the same optimizer step `number`."""
        assert self.ptx is not None
        examples, order = self.ptx
        packs = self.policy.pack([examples[i].tree for i in order.batch(number)])
        tokens = count_targets(packs)

        def imitate(pack: Pack) -> tuple[Tensor, Reported]:
            logprobs = self.policy.token_logprobs(pack).logprobs
            loss = sft_loss(logprobs, torch.full_like(logprobs, 1 / tokens))
            return self.settings.ptx_coef * loss, ({"ppo/ptx_loss": float(loss.detach())}, {})

        losses, _ = self._learn(self.policy, [pack for pack in packs if pack.num_targets], imitate)
        return losses.get("ppo/ptx_loss", 0.0)

    def step(self, learns: bool = True) -> dict[str, float]:
        """Both optimizers step, or neither: what is not finite in one spoils the step of both (ALGORITHMS §0.7). {}: neither did."""
        models = [model for model, moves in ((self.policy, learns), (self.critic, True)) if moves and model is not None]
        if self._spoilt or not all(map(finite_gradients, models)):
            for model in models:
                model.spoil()
        self._spoilt = False
        policy = self.engine.step() if learns else None
        critic = self.critic.step() if self.critic is not None else None
        if any(info is not None and info.skipped for info in (policy, critic)):
            return {}
        metrics = {"train/grad_norm": 0.0 if policy is None else policy.grad_norm}
        return metrics | ({} if critic is None else {"ppo/critic_grad_norm": critic.grad_norm, "ppo/critic_lr": critic.lr})

    def discard(self) -> None:
        """Forget the gradients of the optimizer step under way."""
        self.policy.discard_gradients()
        if self.critic is not None:
            self.critic.discard_gradients()
        self._spoilt = False

    def _learn(self, model: TrainedModel, items: Sequence[Any], improve: Callable[[Any], tuple[Tensor, Reported]]) -> Reported:
        """The gradients of a pass over the packs, and what was reported of them, added up."""
        found = model.learn(items, improve)
        self._spoilt |= not all(math.isfinite(loss) for loss, _ in found)
        return _added_up([reported for _, reported in found])


def _added_up(reports: Sequence[Reported]) -> Reported:
    losses, shares = Averages(), Averages()
    for of_losses, of_shares in reports:
        losses.add(of_losses, 1)
        shares.add(of_shares, 1)
    return losses.sums, shares.sums


def finite_gradients(model: TrainedModel) -> bool:
    norm = model.gradient_norm()
    return norm is None or math.isfinite(norm)
