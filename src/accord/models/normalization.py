"""How a reward model's scores lie: their mean and deviation, kept in the saved model's config.json.

A Bradley–Terry loss fixes differences of scores only, so that neither their zero nor their scale means the same in two models.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from accord.errors import ConfigError
from accord.models.heads import unwrap

KEY = "score_normalization"  # in config.json; plain `transformers` carries it along as an attribute of the configuration


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of a model's scores over `texts` answers, held out from its training or not."""

    mean: float
    std: float
    texts: int
    data: Literal["held-out", "training"]

    def apply(self, score: float) -> float:
        """(s - mean) / std"""
        return (score - self.mean) / self.std


def normalization_of(scores: Tensor, data: Literal["held-out", "training"]) -> Normalization:
    """Of the scores [S] of all answers, the deviation with n in the denominator."""
    scores = scores.detach().double()
    return Normalization(float(scores.mean()), float(scores.std(correction=0)), len(scores), data)


def write_normalization(config: Any, normalization: Normalization | None) -> None:
    """Into a model's configuration; None takes away what another model's scores have left there."""
    if normalization is not None:
        setattr(config, KEY, asdict(normalization))
    elif hasattr(config, KEY):
        delattr(config, KEY)


def load_normalization(model: nn.Module | str | Path) -> Normalization:
    """Of a loaded model, or of what `models.load.resolve` understands: a folder, a run, a hub id.

    Raises ConfigError when the model has none, or its scores did not differ, saying what to do.
    """
    if isinstance(model, nn.Module):
        config = unwrap(model).config
        name, found = str(getattr(config, "name_or_path", "") or "the reward model"), getattr(config, KEY, None)
    else:
        name, found = str(model), _read(model)
    if found is None:
        raise ConfigError(
            f"{name} does not say how its scores lie ({KEY} in config.json), so they cannot be normalised. Train it with "
            "accord reward, which measures that, or use the scores as they are."
        )
    try:
        normalization = Normalization(**found)
        usable = math.isfinite(normalization.mean) and math.isfinite(normalization.std)
    except TypeError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{name}: {KEY} in config.json is {json.dumps(found)}. Expected mean, std, texts and data as accord reward writes them."
        )
    if normalization.std <= 0:
        raise ConfigError(
            f"{name} gave all {normalization.texts:,} texts the same score ({normalization.mean:g}), so its scores cannot be normalised. "
            "Train it for longer or on other data."
        )
    return normalization


def _read(model: str | Path) -> Any:
    """The entry in config.json, or None."""
    from transformers import AutoConfig

    from accord.models.load import resolve

    where = resolve(model)
    if Path(where).is_dir():
        return json.loads((Path(where) / "config.json").read_text(encoding="utf-8")).get(KEY)
    if Path(where).is_file():  # GGUF
        return None
    return getattr(AutoConfig.from_pretrained(where), KEY, None)
