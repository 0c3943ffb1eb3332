"""What every stage does before and around its steps. Trainers call these; none inherits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accord.data.dataset import Example, Examples, corpus, load_examples
from accord.data.needs import Need
from accord.data.packing import PACKED_AT_ONCE, Pack
from accord.data.template import ConversationEncoder
from accord.engine.ranks import join
from accord.engine.trained import StepInfo, TrainedModel
from accord.errors import ConfigError, DataError
from accord.models.heads import context_length
from accord.models.load import LoadedModel, load_causal, load_tokenizer
from accord.models.lora import has_adapter
from accord.models.normalization import Normalization
from accord.models.save import save_adapter, save_model

if TYPE_CHECKING:
    from accord.config import Config

READ_AT_ONCE = PACKED_AT_ONCE  # examples


def load_data(
    config: Config,
    need: Need,
    train_dataset: Any = None,
    valid_dataset: Any = None,
    *,
    path: str | None = None,
    train_on: str = "assistant",
) -> tuple[ConversationEncoder, Examples, LoadedModel | None]:
    """Tokenizer and examples, before any weight is loaded: what is wrong with the data is said first.

    `path` is the model whose tokenizer is used (default: model.path). A model from scratch trains its tokenizer on the data and
    comes back loaded; otherwise the third value is None. Raises ConfigError and DataError.
    """
    join().divide(config.launch.mesh.tensor)
    loaded = None
    model = config.model
    if path is None and model.path is None:
        if model.from_scratch is None:
            raise ConfigError(
                "model.path: no model is named. Set model.path to a folder, a hub id or a run, or describe one in model.from_scratch."
            )
        loaded = load_causal(model, seed=config.run.seed, trainable=True, texts=corpus(config.data, train_dataset))
        tokenizer = loaded.tokenizer
    else:
        tokenizer = load_tokenizer(
            path or str(model.path), model.chat_template, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    encoder = ConversationEncoder(tokenizer, model.chat_template)
    examples = load_examples(
        config.data, encoder, need, seed=config.run.seed, max_length=config.data.max_length,
        train_dataset=train_dataset, valid_dataset=valid_dataset, train_on=train_on,
    )  # fmt: skip
    if need != "prompt":
        check_budget(examples, config.train.max_tokens, config.data.max_length)
    return encoder, examples, loaded


def check_budget(examples: Examples, max_tokens: int, max_length: int) -> None:
    """Every example must fit into one pack: an example is never split. Raises DataError with the two ways out."""
    sizes = np.concatenate([examples.train.num_tokens(), examples.valid.num_tokens()])
    largest = int(sizes.max(initial=0))
    if largest > max_tokens:
        too_large = int((sizes > max_tokens).sum())
        raise DataError(
            f"an example needs up to {largest:,} tokens but train.max_tokens is {max_tokens:,}. Raise train.max_tokens to {largest:,}, "
            f"or lower data.max_length (now {max_length:,}) so that the {too_large:,} example(s) above the budget are left out."
        )


def check_context(module: Any, max_length: int, key: str = "data.max_length") -> None:
    """Raise ConfigError when sequences may be longer than the model's positions reach."""
    context = context_length(module)
    if context is not None and max_length > context:
        raise ConfigError(
            f"{key} is {max_length:,}, but the model reads at most {context:,} tokens. Set {key} to {context:,} or less."
        )


def batch_packs(model: TrainedModel, examples: Sequence[Example], indices: Iterable[int]) -> list[Pack]:
    """The packs of one optimizer step. Each pack's `tree_index` counts within `indices`."""
    return model.pack([examples[i].tree for i in indices])


def parts(size: int) -> Iterator[range]:
    """0 … size - 1 in runs of at most `READ_AT_ONCE`: what is read whole (held-out data, a reference's table) is packed run by run."""
    for start in range(0, size, READ_AT_ONCE):
        yield range(start, min(start + READ_AT_ONCE, size))


def labels_of(examples: Sequence[Example], indices: Sequence[int]) -> Tensor | None:
    """[B] margins or scores of the step's examples in the order of `indices`; None when none has one. An absent margin is 0.

    For examples of one label at most: raises ValueError or RuntimeError for others.
    """
    labels = [examples[i].labels for i in indices]
    if all(label is None for label in labels):
        return None
    return torch.tensor([label or (0.0,) for label in labels], dtype=torch.float32).reshape(len(labels))


def limited(examples: Sequence[Example], most: int | None) -> Sequence[Example]:
    """The first `most` examples (all when None): the same ones at every evaluation."""
    return examples if most is None or len(examples) <= most else examples[:most]


def spread(name: str, values: Tensor) -> dict[str, float]:
    """The mean under the plain name, with …/min and …/max beside it."""
    return {name: float(values.double().mean()), f"{name}/min": float(values.min()), f"{name}/max": float(values.max())}


def step_metrics(info: StepInfo, model: TrainedModel, packs: Sequence[Pack], max_tokens: int) -> dict[str, float]:
    """What every stage reports of an optimizer step."""
    tokens = sum(len(pack) for pack in packs)
    return {
        "train/lr": info.lr,
        "train/grad_norm": info.grad_norm,
        "train/tokens": float(tokens),
        "train/pack_fill": tokens / (len(packs) * max_tokens) if packs else 0.0,
        "train/skipped": float(model.skipped),
    }


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def card(config: Config, stage: str) -> str:
    """The model card's text: what was done, from what."""
    start = config.model.path or "a model from scratch"
    return f"Trained by Accord, stage `{stage}`, from `{start}`.\n"


def save_trained(
    model: TrainedModel,
    folder: Path,
    config: Config,
    stage: str,
    stop_token_ids: list[int],
    *,
    normalization: Callable[[], Normalization] | None = None,
) -> None:
    """A folder that plain `transformers` loads: LoRA merged, tokenizer, template, stop tokens, a reward model's normalisation."""
    found = normalization() if normalization else None
    about = card(config, stage)
    model.write(lambda: save_model(model.loaded, folder, stop_token_ids=stop_token_ids, card=about, normalization=found))


def export_trained(
    model: TrainedModel,
    run: Path,
    config: Config,
    stage: str,
    stop_token_ids: list[int],
    *,
    normalization: Callable[[], Normalization] | None = None,
) -> None:
    """RUN/model, and where there are any RUN/adapter and RUN/ema. `normalization` is asked for the weights of each."""
    save_trained(model, run / "model", config, stage, stop_token_ids, normalization=normalization)
    if has_adapter(model.module):
        model.write(lambda: save_adapter(model.module, run / "adapter"))
    if model.ema is not None:
        with model.with_ema():
            save_trained(model, run / "ema", config, stage, stop_token_ids, normalization=normalization)
