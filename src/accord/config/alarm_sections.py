"""PPO's alarms in the configuration: what each one compares with."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from accord.config.fields import Count, NonNegative, Positive, Section

Factor = Annotated[float, Field(gt=1)]
Part = Annotated[float, Field(gt=0, lt=1)]


class Alarms(Section):
    """When PPO's alarms sound; null turns one off. `First` is the first training step of the run."""

    kl: Positive | None = Field(default=30.0, description="KL to the reference above so many nats a response.")
    kl_growth: Factor | None = Field(
        default=3.0,
        description="KL grown to so many times its median over the last ppo.alarms.kl_growth_window steps, once it is above "
        "ppo.alarms.kl_growth_from.",
    )
    kl_growth_window: Count = Field(default=10, description="Steps that kl_growth looks back.")
    kl_growth_from: NonNegative = Field(
        default=5.0, description="Nats a response above which kl_growth counts: every run starts near 0."
    )
    negative_kl: Positive | None = Field(
        default=1.0, description="KL below minus so many nats a response: what is sampled is not what is trained."
    )
    entropy: Part | None = Field(default=0.1, description="Entropy below this share of the first.")
    length: Factor | None = Field(default=3.0, description="Responses so many times longer or shorter than the first.")
    eos_rate: Part | None = Field(default=0.05, description="Share of responses that end by themselves below this.")
    equal_scores: Count | None = Field(
        default=3, description="All responses score the same, and as before, for so many steps in a row."
    )
    repetition: Part | None = Field(default=0.2, description="Share of repeated 4-grams above the first by so much.")
    judge: Positive | None = Field(
        default=3.0,
        description="At an evaluation the score is up and ppo.judge down since its best one, by more than so many standard errors.",
    )
    explained_variance: Count | None = Field(
        default=20, description="The critic explains less than nothing for so many steps in a row: only a note, never acted upon."
    )
    patience: Count = Field(
        default=3, description="Steps in a row that a condition must hold (where it has no number of its own)."
    )
    quiet: Count = Field(default=10, description="Steps that it must not hold before the same alarm may sound again.")
    lr_floor: Part = Field(
        default=0.1, description="ppo.on_alarm=lower_lr: the learning rates are not lowered below this share of their schedule."
    )
