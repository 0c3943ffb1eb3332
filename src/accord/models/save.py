"""Write a model so that plain `transformers` loads it and gives the same numbers: weights, tokenizer, template, stop tokens, card."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accord.errors import AccordError
from accord.models import lora as adapters
from accord.models.heads import quiet, unwrap
from accord.models.normalization import Normalization, write_normalization

if TYPE_CHECKING:
    from accord.models.load import LoadedModel


def save_model(
    loaded: LoadedModel,
    folder: str | Path,
    *,
    stop_token_ids: Sequence[int] = (),
    card: str = "",
    normalization: Normalization | None = None,
) -> None:
    """Write `loaded` as a model folder; LoRA is merged into the written copy, the training weights stay as they are.

    `stop_token_ids` end a turn: they go to generation_config.json beside the tokenizer's own end token. A scalar model is given a pad token
    that ends no turn, since plain `transformers` finds the last token by comparing with it; `normalization` says how its scores lie.
    The folder appears whole or not at all; an older one there is replaced. Raises AccordError when the disk is full or not writable.
    """
    state = adapters.merged_state(loaded.module)
    base = unwrap(loaded.module)
    tokenizer = copy.deepcopy(loaded.tokenizer)
    stops = sorted({*stop_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})
    with whole_folder(folder) as beside, _settings_kept(base), quiet():
        if loaded.kind == "scalar":
            _give_pad_token(base, tokenizer, state, stops)
            write_normalization(base.config, normalization)
        else:
            _set_stops(base, tokenizer, stops)
        base.save_pretrained(beside, state_dict=state)
        tokenizer.save_pretrained(beside)
        if card:
            (beside / "README.md").write_text(card, encoding="utf-8")


def save_adapter(module: nn.Module, folder: str | Path, *, card: str = "") -> None:
    """Write the trained LoRA adapter alone, in peft's format. It appears whole or not at all."""
    with whole_folder(folder) as beside:
        adapters.save_adapter(module, beside)
        if card:  # peft writes a card of its own, full of blanks
            (beside / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """A folder beside the wanted one to write into; it takes the wanted name, synced to disk, when the block ends without an error."""
    folder = Path(folder)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        beside.mkdir()
        yield beside
        for file in sorted(beside.rglob("*")):
            if file.is_file():
                file.chmod(0o666 & ~_umask())  # safetensors writes for the owner alone; a model is to be shared like any file
                sync(file)
        sync(beside)
        if folder.exists():
            os.replace(folder, old)
        os.replace(beside, folder)
        sync(folder.parent)
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " not in str(
            error
        ):  # safetensors and tokenizers have errors of their own
            raise
        raise AccordError(
            f"could not write {folder}: {getattr(error, 'strerror', None) or error}. Free some space or choose another run.dir."
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if old.exists() and not folder.exists():  # the second rename failed: the older model is better than none
            os.replace(old, folder)
        shutil.rmtree(old, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Clear away what a killed process left beside `folder`; bring back an older one that it had only just moved aside."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        if left.suffix == ".old" and not folder.exists():
            os.replace(left, folder)
        elif left.suffix in {".old", ".tmp"} and left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def sync(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _settings_kept(base: Any) -> Iterator[None]:
    """What saving writes into configurations does not stay on the module that goes on training."""
    before = {name: getattr(base, name) for name in ("config", "generation_config") if getattr(base, name, None) is not None}
    try:
        for name, value in before.items():
            setattr(base, name, copy.deepcopy(value))
        yield
    finally:
        for name, value in before.items():
            setattr(base, name, value)


def _set_stops(base: Any, tokenizer: Any, stops: Sequence[int]) -> None:
    """Generation stops at what ends a turn; nothing else of the model's own generation settings changes."""
    settings = base.generation_config
    settings.eos_token_id = list(stops) or None
    settings.bos_token_id = tokenizer.bos_token_id
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops[0] if stops else None)
    try:
        settings.validate(strict=True)
    except ValueError:  # such as a temperature without do_sample in an old file: transformers would refuse to write it
        settings.do_sample = True
    except TypeError:  # no `strict` in this version
        pass


def _give_pad_token(base: Any, tokenizer: Any, state: dict[str, torch.Tensor], stops: Sequence[int]) -> None:
    """Choose a pad token that ends no sequence; add one (and its embedding row) only where the vocabulary has none to spare."""
    pad = tokenizer.pad_token_id
    if pad is None or pad in stops:
        pad = _spare_special(tokenizer, stops)
    if pad is None:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        pad = tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    text_config = base.config.get_text_config()
    text_config.pad_token_id = base.config.pad_token_id = pad
    embeddings = base.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    if pad >= rows:
        name = next(name for name, part in base.named_modules() if part is embeddings) + ".weight"
        old = state[name]
        state[name] = torch.cat([old, old.new_zeros(pad + 1 - rows, old.shape[1])])
        text_config.vocab_size = base.config.vocab_size = pad + 1


def _spare_special(tokenizer: Any, stops: Sequence[int]) -> int | None:
    """A special token that no text contains and no turn begins or ends with: a pad by name, the unknown token, a reserved one."""
    taken = {*stops, tokenizer.bos_token_id}
    specials = {
        str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special and index not in taken
    }
    in_template = {token for token in specials if token in str(tokenizer.chat_template or "")}
    free = {token: index for token, index in specials.items() if token not in in_template}
    for wanted in ("pad", "unk", "reserved", "unused", "endoftext"):
        for token, index in free.items():
            if wanted in token.lower():
                return index
    return None
