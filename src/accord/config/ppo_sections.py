"""PPO's sections of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from accord.config.alarm_sections import Alarms
from accord.config.fields import Count, FunctionPath, Natural, NonNegative, Positive, Section, Share
from accord.config.reward_sections import ModelReward, RewardSource
from accord.config.sections import Sources


class KL(Section):
    """The penalty that keeps the policy near the reference (ALGORITHMS §4)."""

    coef: NonNegative = Field(default=0.05, description="β; 0: no penalty.")
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = Field(
        default="k1",
        description="d = log π_old - log π_ref: k1 d, k2 ½d², k3 e^-d - 1 + d, abs |d|. full: the exact sum over the vocabulary, at the "
        "price of one more pass over the output head (in the loss: over the whole reference).",
    )
    place: Literal["reward", "loss"] = Field(
        default="reward", description="Subtract it from each token's reward, or add it to the loss."
    )
    controller: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="adaptive: β follows ppo.kl.target (Ziegler et al. 2019)."
    )
    target: Positive = Field(default=6.0, description="KL per response the adaptive controller steers to.")
    horizon: Count = Field(default=10000, description="Episodes in which the adaptive controller acts.")


class PPO(Section):
    """Proximal policy optimisation (Schulman et al. 2017) as in InstructGPT."""

    objective: Literal["clip", "dpo", "sft"] = Field(
        default="clip",
        description="clip: PPO's clipped surrogate. Without advantages, from the best of each prompt's answers: dpo, preferred to the worst "
        "with the loss of the section dpo (online DPO, Guo et al. 2024); sft, imitated (RAFT, Dong et al. 2023).",
    )
    samples_per_prompt: Count = Field(default=1, description="Answers sampled for each prompt.")
    generation_batches: Count = Field(
        default=1,
        description="Rounds of train.batch_size prompts that are sampled before an update: together they are one experience.",
    )
    ppo_epochs: Count = Field(default=1, description="Passes over each experience.")
    mini_batches: Count = Field(default=1, description="Updates in one pass: the experience's responses are divided by it.")
    replay_buffer: Natural = Field(
        default=0,
        description="Earlier experiences that are learned from again beside the fresh one in every update, with the ratio to the policy that "
        "sampled them and the advantages as they were estimated then; 0: none.",
    )
    advantage: Literal["gae", "grpo", "rloo", "reinforce_pp"] = Field(
        default="gae",
        description="gae: generalised advantage estimation with a critic. Without a critic: grpo, the score beside the mean and deviation "
        "of the prompt's other answers (Shao et al. 2024); rloo, beside the mean of the others (Ahmadian et al. 2024); reinforce_pp, the "
        "rewards still to come, whitened over the experience (Hu 2025).",
    )
    group_std: bool = Field(default=True, description="grpo: divide by the group's standard deviation; false: Dr. GRPO.")
    gamma: Share = Field(default=1.0, description="Discount γ (gae, reinforce_pp).")
    lam: Share = Field(default=0.95, description="GAE's λ: 0 trusts the critic, 1 the returns.")
    whiten_advantages: bool | None = Field(
        default=None,
        description="Mean 0 and variance 1 over the experience's response tokens; null: yes for gae and reinforce_pp, no for grpo and rloo.",
    )
    whiten_rewards: bool = Field(default=False, description="Variance 1 over the experience's rewards, before advantages.")
    clip: Positive = Field(default=0.2, description="ε of the clipped surrogate objective.")
    clip_high: Positive | None = Field(
        default=None, description="ε above 1, where it is another than below (DAPO: 0.28 above 0.2); null: ppo.clip."
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="A token with negative advantage loses at most this many times it (Ye et al. 2020: 3); null: no limit.",
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token",
        description="Importance ratio of each token, or of the answer: exp of the mean log-ratio (GSPO; its clips are near 3e-4).",
    )
    value_clip: Positive | None = Field(default=0.2, description="The new value may leave the old one by so much; null: no clip.")
    value_coef: NonNegative = Field(default=1.0, description="Weight of the value loss.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    old_kl_coef: NonNegative = Field(
        default=0.0, description="Weight of a second penalty in the loss: k3 of the policy against the one that sampled."
    )
    kl: KL = Field(default=KL(), description="The KL penalty.")
    normalize_score: bool = Field(default=False, description="Divide scores by their running mean and deviation.")
    clip_reward: Positive | None = Field(
        default=5.0, description="Scores are clipped to ± this, after normalisation; null: no clip."
    )
    missing_eos_penalty: NonNegative = Field(
        default=0.0, description="Subtracted from the score of an answer cut by the length limit."
    )
    target_kl: Positive | None = Field(
        default=None, description="Stop an experience's epochs when the approximate KL exceeds this."
    )
    ratio_threshold: Positive | None = Field(default=10.0, description="Skip a mini-batch whose mean ratio exceeds this.")
    ptx_coef: NonNegative = Field(
        default=0.0, description="Weight of the SFT loss on ppo.ptx_data in each step (InstructGPT: 27.8)."
    )
    ptx_data: Sources = Field(default=None, description="Demonstrations or plain text for the PTX mix, like data.train.")
    old_logprobs: Literal["recompute", "sampler"] = Field(
        default="recompute",
        description="recompute: π_old is the trainer's own. sampler: each token also counts by min(π_old / π_sampler, ppo.is_clip), which "
        "corrects for a sampler that computes otherwise (engine.dtype).",
    )
    is_clip: Positive = Field(default=2.0, description="Highest importance weight with ppo.old_logprobs=sampler.")
    aggregation: Literal["token", "sequence", "constant"] = Field(
        default="token",
        description="The loss is the mean over all response tokens of the step; the mean of the answers' means; or the sum divided by "
        "answers × generate.max_new_tokens (Dr. GRPO).",
    )
    rewards: Annotated[tuple[RewardSource, ...], Strict(False), Field(min_length=1)] = Field(
        default=(ModelReward(),), description="Where scores come from; they are added by weight."
    )
    judge: FunctionPath | None = Field(
        default=None,
        description="module:function that scores the answers to held-out prompts at evaluation (ppo/judge). Nothing is trained on it.",
    )
    alarms: Alarms = Field(default=Alarms(), description="When an alarm sounds.")
    on_alarm: Literal["warn", "stop", "lower_lr"] = Field(
        default="warn",
        description="An alarm is told; stop: it also ends the run after a checkpoint. lower_lr: it also halves the learning rates.",
    )

    journal: Literal["recent", "all"] = Field(
        default="recent",
        description="How long RUN/journal.jsonl keeps what was sampled and how it was scored: recent, as long as a checkpoint from before it "
        "is kept; all, to the end, about 11 bytes a token.",
    )

    @property
    def needs_critic(self) -> bool:
        """Whether a value function is trained."""
        return self.objective == "clip" and self.advantage == "gae"

    @property
    def compares_groups(self) -> bool:
        """Whether an answer is measured against the other answers to its prompt."""
        return self.objective != "clip" or self.advantage in ("grpo", "rloo")

    @property
    def method(self) -> str:
        """What decides how an answer counts, as messages name it."""
        return f"ppo.objective={self.objective}" if self.objective != "clip" else f"ppo.advantage={self.advantage}"

    @property
    def whitens_advantages(self) -> bool:
        return not self.compares_groups if self.whiten_advantages is None else self.whiten_advantages
