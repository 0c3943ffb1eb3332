"""Combinations of the critic's keys that can't work (see rules.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from accord.config.messages import Refusal

if TYPE_CHECKING:
    from accord.config.root import Config


def a_head_on_the_trunk_starts_from_nothing_else(config: Config) -> Iterator[Refusal]:
    critic = config.critic
    if critic.share_trunk and critic.path != config.reward_model.path:
        yield Refusal(
            ("critic", "path"),
            "does nothing with critic.share_trunk=true: the actor's trunk is the critic's. Leave it out, or set that to false.",
        )


def the_trunks_gradient_needs_a_shared_trunk(config: Config) -> Iterator[Refusal]:
    if not config.critic.share_trunk and not config.critic.trunk_gradient:
        yield Refusal(
            ("critic", "trunk_gradient"), "does nothing with critic.share_trunk=false. Leave it out, or set that to true."
        )


def one_base_has_one_dtype(config: Config) -> Iterator[Refusal]:
    lora = config.model.lora
    if lora is not None and lora.share_base is True and config.reward_model.dtype != config.model.dtype:
        yield Refusal(
            ("reward_model", "dtype"),
            f"is {config.reward_model.dtype}, but with model.lora.share_base=true the reward model stands on the actor's base, which is "
            f"{config.model.dtype} (model.dtype). Leave it out, or set share_base=auto.",
        )


CRITIC_RULES: tuple[Callable[[Config], Iterator[Refusal]], ...] = (
    a_head_on_the_trunk_starts_from_nothing_else,
    the_trunks_gradient_needs_a_shared_trunk,
    one_base_has_one_dtype,
)
