"""Where scores come from (docs/rewards.md): models, functions, services, judges, measures and people, combined by weight."""

from accord.rewards.base import Sample, ScoreBoard, Source, combine
from accord.rewards.classifier import ClassifierReward
from accord.rewards.function import FunctionReward, load_function
from accord.rewards.human import HumanReward
from accord.rewards.judge import JudgeReward
from accord.rewards.measures import FormatReward, LengthReward, RepetitionReward
from accord.rewards.model import ModelReward
from accord.rewards.remote import RemoteReward

__all__ = [
    "ClassifierReward", "FormatReward", "FunctionReward", "HumanReward", "JudgeReward", "LengthReward", "ModelReward", "RemoteReward",
    "RepetitionReward", "Sample", "ScoreBoard", "Source", "combine", "load_function",
]  # fmt: skip
