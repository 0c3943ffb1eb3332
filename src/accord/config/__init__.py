"""The configuration: typed sections, loading and merging, messages. Free of torch, so that the command line answers at once."""

from accord.config.alarm_sections import Alarms
from accord.config.fields import Section
from accord.config.launch_sections import Launch
from accord.config.loading import load_config, preset_names
from accord.config.ppo_sections import KL, PPO
from accord.config.reward_sections import (
    ClassifierReward,
    FormatReward,
    FunctionReward,
    HumanReward,
    JudgeReward,
    LengthReward,
    ModelReward,
    RemoteReward,
    RepetitionReward,
    RewardSource,
)
from accord.config.root import Config, build, dump_yaml
from accord.config.sections import (
    DPO,
    SFT,
    STAGES,
    Checkpoint,
    Critic,
    Data,
    Engine,
    Eval,
    Export,
    FromScratch,
    Generate,
    Lora,
    Model,
    Pipeline,
    Reference,
    Reward,
    RewardModel,
    Run,
    Source,
    StageName,
    Track,
    Train,
)
from accord.errors import ConfigError

__all__ = [
    "DPO", "KL", "PPO", "SFT", "STAGES", "Alarms", "Checkpoint", "ClassifierReward", "Config", "ConfigError", "Critic", "Data", "Engine",
    "Eval", "Export", "FormatReward", "FromScratch", "FunctionReward", "Generate", "HumanReward", "JudgeReward", "Launch", "LengthReward",
    "Lora", "Model", "ModelReward", "Pipeline", "Reference", "RemoteReward", "RepetitionReward", "Reward", "RewardModel",
    "RewardSource", "Run", "Section", "Source", "StageName", "Track", "Train", "build", "dump_yaml", "load_config", "preset_names",
]  # fmt: skip
