"""Combinations of PPO's keys that can't work (see rules.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

from accord.config.messages import Path, Refusal

if TYPE_CHECKING:
    from accord.config.root import Config


MOST_RESPONSES = 1_000_000  # of one experience


def is_settled(config: Config) -> bool:
    """Whether what `ppo` says now is what PPO will read: no override of its stage is still to come."""
    return config.stage == "ppo" or (config.stage is None and "ppo" not in config.stages)


def set_in_vain(config: Config, keys: tuple[Path, ...], why: str) -> Iterator[Refusal]:
    """Refuse those of `keys` that are not their defaults."""
    for key in keys:
        section: BaseModel = config
        for part in key[:-1]:
            section = getattr(section, str(part))
        default = type(section).model_fields[str(key[-1])].default
        if getattr(section, str(key[-1])) != default:
            yield Refusal(
                key, f"does nothing with {why}. Leave it out (its default is {'null' if default is None else default})."
            )


def ppo_samples(config: Config) -> Iterator[Refusal]:
    if config.stage == "ppo" and config.generate.temperature == 0:
        yield Refusal(("generate", "temperature"), "PPO learns from samples; at temperature 0 there are none. Use 1.0.")


def kl_in_the_loss_has_a_gradient(config: Config) -> Iterator[Refusal]:
    kl = config.ppo.kl
    if kl.place == "loss" and kl.estimator == "k1":
        yield Refusal(
            ("ppo", "kl", "estimator"),
            "k1 in the loss has a gradient of zero in expectation. Use ppo.kl.estimator=k3 (or k2), or ppo.kl.place=reward.",
        )


def an_adaptive_controller_needs_something_to_adapt(config: Config) -> Iterator[Refusal]:
    kl = config.ppo.kl
    if kl.controller == "adaptive" and kl.coef == 0:
        yield Refusal(
            ("ppo", "kl", "coef"),
            "the adaptive controller multiplies the coefficient and 0 stays 0. Start at 0.05, or use controller=fixed.",
        )


def a_fixed_coefficient_has_no_target(config: Config) -> Iterator[Refusal]:
    if is_settled(config) and config.ppo.kl.controller == "fixed":
        yield from set_in_vain(config, (("ppo", "kl", "target"), ("ppo", "kl", "horizon")), "ppo.kl.controller=fixed")


def a_group_has_company(config: Config) -> Iterator[Refusal]:
    ppo = config.ppo
    if is_settled(config) and ppo.compares_groups and ppo.samples_per_prompt < 2:
        yield Refusal(
            ("ppo", "samples_per_prompt"),
            f"{ppo.advantage if ppo.objective == 'clip' else ppo.method} compares the answers to one prompt and needs at least 2. "
            "Set ppo.samples_per_prompt to 4 or more, or use ppo.advantage=reinforce_pp.",
        )


def groups_are_compared_by_whole_scores(config: Config) -> Iterator[Refusal]:
    ppo = config.ppo
    if not is_settled(config) or not ppo.compares_groups or ppo.objective != "clip":
        return
    yield from set_in_vain(
        config, (("ppo", "gamma"),), f"ppo.advantage={ppo.advantage}, which compares the sums of the answers' rewards"
    )
    if ppo.whiten_rewards:
        yield Refusal(
            ("ppo", "whiten_rewards"),
            f"scaled token by token, the sum that {ppo.advantage} compares would depend on an answer's length. Set it to false.",
        )


def group_std_is_for_grpo(config: Config) -> Iterator[Refusal]:
    if is_settled(config) and config.ppo.objective == "clip" and config.ppo.advantage != "grpo":
        yield from set_in_vain(config, (("ppo", "group_std"),), f"ppo.advantage={config.ppo.advantage}")


def no_critic_has_no_settings(config: Config) -> Iterator[Refusal]:
    ppo = config.ppo
    if not is_settled(config) or ppo.needs_critic:
        return
    why = f"{ppo.method}, which has no critic"
    keys = (("ppo", "lam"), ("ppo", "value_clip"), ("ppo", "value_coef"), ("critic", "lr"), ("critic", "warmup_steps"))
    yield from set_in_vain(config, (*keys, ("critic", "share_trunk")), why)
    if config.critic.path != config.reward_model.path:
        yield Refusal(("critic", "path"), f"does nothing with {why}. Leave it out.")


# What PPO's surrogate has, and learning from the best answer has not.
OF_THE_SURROGATE = (
    *((f"ppo/{key}") for key in (
        "advantage", "group_std", "gamma", "whiten_advantages", "whiten_rewards", "clip", "clip_high", "dual_clip", "ratio", "entropy_coef",
        "old_kl_coef", "normalize_score", "clip_reward", "target_kl", "ratio_threshold", "ptx_coef", "old_logprobs", "aggregation",
        "replay_buffer",
    )),
    *(f"ppo/kl/{key}" for key in ("coef", "estimator", "place", "controller", "target", "horizon")),
)  # fmt: skip


def the_best_answer_has_no_surrogate(config: Config) -> Iterator[Refusal]:
    ppo, dpo = config.ppo, config.dpo
    if not is_settled(config) or ppo.objective == "clip":
        return
    yield from set_in_vain(config, tuple(tuple(key.split("/")) for key in OF_THE_SURROGATE), ppo.method)
    prompts = config.train.batch_size * ppo.generation_batches
    if ppo.mini_batches > prompts:
        yield Refusal(
            ("ppo", "mini_batches"),
            f"{ppo.method} learns once from each of {prompts} prompts: they can't be divided into {ppo.mini_batches}.",
        )
    if ppo.objective == "dpo" and dpo.loss_type == "kto":
        yield Refusal(
            ("dpo", "loss_type"), "kto learns from single answers, ppo.objective=dpo from the best and the worst. Use sigmoid."
        )


def importance_is_clipped_where_it_is_weighed(config: Config) -> Iterator[Refusal]:
    if is_settled(config) and config.ppo.old_logprobs == "recompute":
        yield from set_in_vain(config, (("ppo", "is_clip"),), "ppo.old_logprobs=recompute")


def a_mini_batch_is_not_empty(config: Config) -> Iterator[Refusal]:
    ppo = config.ppo
    responses = config.train.batch_size * ppo.generation_batches * ppo.samples_per_prompt
    if config.stage in (None, "ppo") and ppo.mini_batches > responses:
        yield Refusal(
            ("ppo", "mini_batches"),
            f"{responses} responses (train.batch_size × ppo.generation_batches × ppo.samples_per_prompt) can't be divided into "
            f"{ppo.mini_batches} mini-batches.",
        )


def an_experience_is_held_in_memory(config: Config) -> Iterator[Refusal]:
    ppo = config.ppo
    responses = config.train.batch_size * ppo.generation_batches * ppo.samples_per_prompt
    if config.stage in (None, "ppo") and responses > MOST_RESPONSES:
        key = "samples_per_prompt" if ppo.samples_per_prompt >= ppo.generation_batches else "generation_batches"
        yield Refusal(
            ("ppo", key),
            f"one experience would be {responses:,} responses (train.batch_size × ppo.generation_batches × ppo.samples_per_prompt), and all "
            f"of them are in memory at once. Lower it; at most {MOST_RESPONSES:,}.",
        )


def ptx_needs_data_and_a_weight(config: Config) -> Iterator[Refusal]:
    if config.ppo.ptx_coef > 0 and config.ppo.ptx_data is None:
        yield Refusal(
            ("ppo", "ptx_data"), "ppo.ptx_coef is set but there is no PTX data. Give ppo.ptx_data, or set ppo.ptx_coef=0."
        )
    if config.ppo.ptx_data is not None and config.ppo.ptx_coef == 0:
        yield Refusal(
            ("ppo", "ptx_coef"),
            "ppo.ptx_data is given but weighs nothing. Set ppo.ptx_coef (InstructGPT: 27.8), or remove the data.",
        )


PPO_RULES: tuple[Callable[[Config], Iterator[Refusal]], ...] = (
    ppo_samples,
    kl_in_the_loss_has_a_gradient,
    an_adaptive_controller_needs_something_to_adapt,
    a_fixed_coefficient_has_no_target,
    a_group_has_company,
    groups_are_compared_by_whole_scores,
    group_std_is_for_grpo,
    no_critic_has_no_settings,
    the_best_answer_has_no_surrogate,
    importance_is_clipped_where_it_is_weighed,
    a_mini_batch_is_not_empty,
    an_experience_is_held_in_memory,
    ptx_needs_data_and_a_weight,
)
