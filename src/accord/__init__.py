"""Accord trains a language model to follow people's preferences: SFT, reward model, PPO and DPO."""

__version__ = "0.1.0"

_LAZY = {
    "Config": "accord.config",
    "load_config": "accord.config",
    "SFTTrainer": "accord.trainers.sft",
    "RewardTrainer": "accord.trainers.reward",
    "DPOTrainer": "accord.trainers.preference",
    "PPOTrainer": "accord.trainers.ppo",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    """Trainers are imported when asked for: `import accord` stays light."""
    if name not in _LAZY:
        raise AttributeError(f"module 'accord' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
