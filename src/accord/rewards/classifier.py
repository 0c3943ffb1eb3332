"""A reward that is any `transformers` sequence classifier: `{type: classifier, path: …}`, asked in its own tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from accord.data.records import Message
from accord.data.template import ConversationEncoder
from accord.engine.ranks import join
from accord.errors import AccordError, ConfigError, DataError
from accord.models.heads import context_length, quiet
from accord.models.load import DTYPES, default_device, load_tokenizer, resolve
from accord.rewards.base import Sample
from accord.rewards.texts import check_template, fill

log = logging.getLogger(__name__)

TEMPLATE = "{prompt}\n{response}"
Input = Literal["auto", "chat", "pair", "text"]


class ClassifierReward:
    """The logit of a one-label classifier, or one label's logit or probability of several.

    Probabilities are softmax over the labels, or sigmoid where the model's problem_type is multi_label_classification.
    `input`: chat, the conversation in the tokenizer's own chat template; pair, (prompt, response) as the two texts of a pair; text,
    `template` filled. Where the response was cut by the length limit, chat writes no end of turn. Special tokens written in a
    message are plain text. What is longer than `max_length` tokens loses its beginning (told once), a pair that of its prompt first.

    Texts of one batch are padded on the right, with their mask: the score of a response is the same, up to rounding, whatever is
    scored beside it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        tokenizer: Any,
        *,
        label: str | int | None = None,
        output: Literal["logit", "probability"] = "logit",
        input: Input = "auto",
        template: str | None = None,
        max_length: int | None = None,
        batch_size: int = 16,
        weight: float = 1.0,
        name: str = "classifier",
        key: str = "ppo.rewards",
    ) -> None:
        """Raises ConfigError for a label, an input or a length that this classifier does not have."""
        self.module, self.tokenizer = module, tokenizer
        self.batch_size, self.weight, self.name, self.key = batch_size, weight, name, key
        config: Any = module.config
        self.label, self.output = _label(config, label, f"{key}.label"), output
        if output == "probability" and config.num_labels == 1:
            raise ConfigError(f"{key}.output: a classifier with one label has no probability. Use output: logit.")
        self._independent_labels = config.problem_type == "multi_label_classification"
        self.input = _input(tokenizer, input, template, key)
        self.template = template or TEMPLATE
        if self.input == "text":
            check_template(self.template, f"{key}.template")
        self.encoder = ConversationEncoder(tokenizer) if self.input == "chat" else None
        self.max_length = _max_length(module, tokenizer, max_length, f"{key}.max_length")
        # Models look for the last token, or count positions, by the id of their own padding.
        self.pad_token_id: int | None = getattr(config.get_text_config(), "pad_token_id", None)
        self._warned = False

    divides = True

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[float]:
        encoded = [self._encode(sample) for sample in samples]
        for sample, (ids, _) in zip(samples, encoded, strict=True):
            if not ids:
                raise AccordError(f"{self.key}: the classifier's text for the sample {sample.name} is empty.")
        scores = [0.0] * len(samples)
        order = sorted(range(len(samples)), key=lambda i: -len(encoded[i][0]))  # like lengths together
        size = self.batch_size if self.pad_token_id is not None else 1
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        found = join().each(batches, lambda rows: self._forward([encoded[i] for i in rows]).tolist())
        for row, score in zip((row for rows in batches for row in rows), (s for scores in found for s in scores), strict=True):
            scores[row] = score
        return scores

    def _forward(self, encoded: Sequence[tuple[list[int], list[int]]]) -> Tensor:
        """[B] scores of (token ids, type ids)."""
        device = next(self.module.parameters()).device
        longest = max(len(ids) for ids, _ in encoded)

        def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
            return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows], device=device)

        inputs = {
            "input_ids": padded([ids for ids, _ in encoded], self.pad_token_id or 0),
            "attention_mask": padded([[1] * len(ids) for ids, _ in encoded], 0),
        }
        if "token_type_ids" in self.tokenizer.model_input_names:
            inputs["token_type_ids"] = padded([types for _, types in encoded], 0)
        logits = self.module(**inputs).logits.float()
        if self.output == "probability":
            logits = logits.sigmoid() if self._independent_labels else logits.softmax(-1)
        return logits[:, self.label]

    def _encode(self, sample: Sample) -> tuple[list[int], list[int]]:
        """(token ids, type ids), at most `max_length` of them."""
        if self.encoder is not None:
            return self._chat(sample)
        try:
            texts = (sample.question, sample.response) if self.input == "pair" else (fill(self.template, sample),)
        except AccordError as error:
            raise AccordError(f"{self.key}: {error}") from None
        whole = self._tokenise(*texts)
        if self.max_length is None or len(whole["input_ids"]) <= self.max_length:
            encoded = whole
        else:
            self._warn()
            cut: bool | str = True
            if self.input == "pair":  # the prompt's beginning first; the response's where it leaves no room for a prompt
                response = len(self._tokenise("", sample.response)["input_ids"])
                cut = "only_first" if response < self.max_length else "only_second"
                texts = texts if cut == "only_first" else ("", sample.response)
            encoded = self._tokenise(*texts, truncation=cut, max_length=self.max_length)
        ids = list(encoded["input_ids"])
        return ids, list(encoded.get("token_type_ids") or [0] * len(ids))

    def _tokenise(self, *texts: str, **options: Any) -> Any:
        side, self.tokenizer.truncation_side = self.tokenizer.truncation_side, "left"
        try:
            return self.tokenizer(*texts, split_special_tokens=True, **options)
        finally:
            self.tokenizer.truncation_side = side

    def _chat(self, sample: Sample) -> tuple[list[int], list[int]]:
        assert self.encoder is not None
        messages = (*sample.prompt.messages, Message("assistant", sample.response))
        try:
            ids = self.encoder.encode_whole(messages, ended=not sample.truncated)
        except DataError as error:
            raise AccordError(f"{self.key}: {error} (sample {sample.name})") from error
        if self.max_length is not None and len(ids) > self.max_length:
            self._warn()
            first = ids[:1] if ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id) else []
            ids = first + ids[len(ids) - self.max_length + len(first) :]
        return ids, [0] * len(ids)

    def _warn(self) -> None:
        if not self._warned:
            log.warning(
                "%s: texts longer than the classifier's %s tokens are scored without their beginning.", self.key, self.max_length
            )
            self._warned = True


def load_classifier(path: str, dtype: str, key: str) -> tuple[torch.nn.Module, Any]:
    """(module, tokenizer), frozen. Raises ConfigError naming `key` when there is no classifier, or one without its head."""
    from transformers import AutoModelForSequenceClassification

    try:
        where = resolve(path)
        tokenizer = load_tokenizer(where)
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('model.path: ')}") from error
    try:
        with quiet(), torch.random.fork_rng(devices=[]):  # a missing head would be drawn at random
            module, info = AutoModelForSequenceClassification.from_pretrained(
                where, dtype=DTYPES[dtype], output_loading_info=True
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        place = "" if Path(where).is_dir() else " Check the name and the network (HF_HUB_OFFLINE), or name a local folder."
        raise ConfigError(f"{key}: {where} could not be loaded as a sequence classifier: {reason}{place}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(f"{key}: {where} is no sequence classifier: it lacks {', '.join(missing[:3])}, which would be random.")
    return module.to(default_device()).eval().requires_grad_(False), tokenizer


def _label(config: Any, label: str | int | None, key: str) -> int:
    names = [str(config.id2label.get(i, i)) for i in range(config.num_labels)]
    shown = ", ".join(f"{i} ({name})" if name != str(i) else name for i, name in enumerate(names[:12]))
    if label is None:
        if len(names) > 1:
            raise ConfigError(f"{key}: which of the labels is the score? The classifier has {shown}.")
        return 0
    number = names.index(label) if isinstance(label, str) and label in names else label
    if isinstance(number, str) or not 0 <= number < len(names):
        raise ConfigError(f"{key}: there is no label {label!r}. The classifier has {shown}.")
    return number


def _input(tokenizer: Any, input: Input, template: str | None, key: str) -> Literal["chat", "pair", "text"]:
    if input == "auto":
        return "text" if template is not None or not tokenizer.chat_template else "chat"
    if input == "chat" and not tokenizer.chat_template:
        raise ConfigError(f"{key}.input: the classifier's tokenizer has no chat template. Use input: text or pair.")
    return input


def _max_length(module: torch.nn.Module, tokenizer: Any, wanted: int | None, key: str) -> int | None:
    limits = [limit for limit in (context_length(module), tokenizer.model_max_length) if limit is not None and limit < 1e9]
    for name, part in module.named_modules():  # RoBERTa's positions begin behind that of its padding
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            limits.append(part.num_embeddings - part.padding_idx - 1)  # type: ignore[operator]
    limit = min(limits, default=None)
    if wanted is not None and limit is not None and wanted > limit:
        raise ConfigError(f"{key}: {wanted:,} is beyond the classifier's {limit:,} tokens.")
    return wanted or limit
