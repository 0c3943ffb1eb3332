"""Accord trains a language model to follow people's preferences: SFT, reward model, PPO and DPO."""

__version__ = "0.1.0"
