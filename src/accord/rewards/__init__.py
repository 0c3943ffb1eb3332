"""Where scores come from: learned reward models and Python functions, combined by weight."""

from accord.rewards.base import Sample, ScoreBoard, Source, combine
from accord.rewards.function import FunctionReward, load_function
from accord.rewards.model import ModelReward

__all__ = ["FunctionReward", "ModelReward", "Sample", "ScoreBoard", "Source", "combine", "load_function"]
