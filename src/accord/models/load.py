"""Bring in a model: a `transformers` folder, a run's folder, a hub id, a GGUF file, the demo's base model, or a new one from its sizes.

Dtypes: what is trained is float32 (master weights). With LoRA the frozen base has `model.dtype`, or is kept in 4 bits (`model.quantization`), and
the adapter is float32. A frozen model (reference, reward model) has its own `dtype`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from accord.data.chat_templates import set_template
from accord.errors import ConfigError
from accord.models.gguf import from_state, is_gguf, load_gguf_tokenizer, read_gguf
from accord.models.heads import checkpoint_activations, disable_dropout, init_score_head, keep_head_in_float32, quiet
from accord.models.lora import add_lora
from accord.models.quantized import quantize_base

if TYPE_CHECKING:
    from accord.config import Model

log = logging.getLogger(__name__)

STAGES = ("sft", "reward", "dpo", "ppo")  # the order in which a pipeline runs them, if its own configuration can't be read
DTYPES = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "sentencepiece.bpe.model",
)


@dataclass
class LoadedModel:
    """A module with the tokenizer it speaks."""

    module: nn.Module
    tokenizer: Any
    kind: Literal["causal", "scalar"]
    path: str  # what was loaded, resolved; "" for a model made from scratch
    lora: bool = False


def resolve(path: str | Path) -> str:
    """The model folder, GGUF file or hub id that `path` stands for.

    A run's folder stands for its `model/`, a pipeline's for that of its last stage; `demo:base` for the model shipped with the demo.
    Raises ConfigError naming what was looked for.
    """
    text = str(path)
    if text.startswith("demo:"):
        if text != "demo:base":
            raise ConfigError(f"model.path: {text!r} is unknown; the demo's model is demo:base")
        from accord import demo

        return str(demo.base_path())
    here = Path(text).expanduser()
    if here.is_file():
        if not is_gguf(here):
            raise ConfigError(
                f"model.path: {here} is a file, but not a GGUF file. Name a model folder, a run's folder, a hub id or a .gguf file."
            )
        return str(here)
    if here.is_dir():
        return str(_model_folder(here))
    if _HUB_ID.fullmatch(text) and not text.endswith((".gguf", ".safetensors", ".bin")):
        return text
    raise ConfigError(f"model.path: no such file or folder: {text}")


def _model_folder(folder: Path) -> Path:
    """The folder with config.json that a folder given by the user stands for."""
    if (folder / "config.json").is_file():
        return folder
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    for stage in reversed(_pipeline_stages(folder)):
        if (folder / stage / "model" / "config.json").is_file():
            return folder / stage / "model"
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} holds a LoRA adapter, not a model. Name the base model here and the adapter as model.lora.path."
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        raise ConfigError(f"model.path: {folder} holds GGUF files; name one of them, such as {ggufs[0]}")
    if (folder / "metrics.jsonl").exists() or (folder / "config.yaml").exists():
        raise ConfigError(
            f"model.path: the run {folder} has no finished model yet (looked for model/config.json there and in its stages)"
        )
    raise ConfigError(f"model.path: {folder} holds no model (looked for config.json and model/config.json)")


def _pipeline_stages(folder: Path) -> list[str]:
    import yaml

    try:
        stages = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["pipeline"]["stages"]
        return [str(stage) for stage in stages]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return list(STAGES)


def default_device() -> torch.device:
    """The first CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(
    path: str | Path, chat_template: str | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer of a model. `chat_template` (a built-in name, a file or Jinja text) replaces its own.

    Raises ConfigError when there is none.
    """
    from transformers import AutoTokenizer

    where = resolve(path)
    if is_gguf(where):
        tokenizer = load_gguf_tokenizer(where)
    else:
        if Path(where).is_dir() and not any((Path(where) / name).is_file() for name in _TOKENIZER_FILES):
            raise ConfigError(
                f"model.path: {where} holds no tokenizer (looked for {', '.join(_TOKENIZER_FILES[:4])} …). "
                "Copy the tokenizer's files of the model it was made from into this folder."
            )
        with _explained(where, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(where, revision=revision or "main", trust_remote_code=trust_remote_code)
    if chat_template is not None:
        set_template(tokenizer, chat_template)
    return tokenizer


def context_of(model: Model) -> int | None:
    """The most tokens that the model at `model.path` reads, from its configuration alone; None where that says nothing (GGUF, ALiBi)."""
    where = resolve(str(model.path))
    if is_gguf(where):
        return None
    config, _ = _config_of(where, model)
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def load_causal(
    model: Model,
    *,
    seed: int,
    trainable: bool,
    texts: Iterable[str] | None = None,
    path: str | None = None,
    dtype: str | None = None,
    attn_implementation: str | None = None,
) -> LoadedModel:
    """A language model with its head, ready to train (with LoRA where `model.lora` is set) or frozen.

    `path` and `dtype` stand in for the model section's own (the reference has its own). `texts` train the tokenizer of a from-scratch model.
    Raises ConfigError when nothing loadable is there, weights are missing, or the folder holds a reward model.
    """
    from transformers import AutoModelForCausalLM

    if path is None and model.path is None:
        module, tokenizer, where = *_from_scratch(model, texts, seed, AutoModelForCausalLM, attn_implementation), ""
    else:
        where = resolve(path or str(model.path))
        config, state = _config_of(where, model)
        if any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
            raise ConfigError(
                f"model.path: {where} is a reward model (it scores text and can't write any). Name a causal language model."
            )
        tokenizer = load_tokenizer(where, model.chat_template, revision=model.revision, trust_remote_code=model.trust_remote_code)
        module, missing = _build(
            AutoModelForCausalLM, where, config, state, _weights_dtype(model, trainable, dtype), model, attn_implementation
        )
        if missing:
            raise ConfigError(f"model.path: {where} lacks weights of a {type(module).__name__}: {_some(missing)}")
    return _finish(module, tokenizer, "causal", where, model, seed=seed, trainable=trainable)


def load_scalar(
    path: str | None,
    model: Model,
    *,
    seed: int,
    trainable: bool,
    dtype: str | None = None,
    attn_implementation: str | None = None,
    fresh_head: bool = True,
) -> LoadedModel:
    """A reward model or critic: from a saved one, or (`fresh_head`) from a causal model's backbone with a fresh seeded head.

    Raises ConfigError when the folder's classifier has more than one label, weights of the backbone are missing, or, without
    `fresh_head`, the model has no score head.
    """
    from transformers import AutoModelForSequenceClassification

    where = resolve(path or str(model.path))
    config, state = _config_of(where, model)
    saved = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
    if not saved and not fresh_head:  # a random head would measure nothing
        kind = ", ".join(config.architectures or []) or "no score head"
        raise ConfigError(
            f"{path or model.path} is a language model, not a reward model ({kind}). Train one from it with accord reward."
        )
    if saved and config.num_labels != 1:
        raise ConfigError(f"{where} is a classifier with {config.num_labels} labels; a reward model has one (its score)")
    config.num_labels = 1
    tokenizer = load_tokenizer(where, model.chat_template, revision=model.revision, trust_remote_code=model.trust_remote_code)
    # Always read in float32: the head stays so, and only the rest is rounded to a frozen model's dtype.
    module, missing = _build(AutoModelForSequenceClassification, where, config, state, torch.float32, model, attn_implementation)
    heads = {name for name in missing if name.startswith(("score.", "classifier."))}
    if missing - heads or (saved and missing):
        raise ConfigError(f"{where} lacks weights of a {type(module).__name__}: {_some(missing if saved else missing - heads)}")
    keep_head_in_float32(module, rest=_weights_dtype(model, trainable, dtype))
    if heads:
        init_score_head(module, seed)
    return _finish(module, tokenizer, "scalar", where, model, seed=seed, trainable=trainable)


def _from_scratch(
    model: Model, texts: Iterable[str] | None, seed: int, auto_class: Any, attn_implementation: str | None
) -> tuple[nn.Module, Any]:
    from accord.models.scratch import build_config, build_module, train_tokenizer

    settings = model.from_scratch
    if settings is None:
        raise ConfigError(
            "model.path is not set. Name a model folder, a run's folder, a hub id or a .gguf file, or describe a new one in model.from_scratch."
        )
    if texts is None:
        raise ConfigError(
            "model.from_scratch: only the first stage that trains can start from nothing; here a trained model is needed (model.path)"
        )
    tokenizer = train_tokenizer(texts, settings.vocab_size)
    if model.chat_template is not None:
        set_template(tokenizer, model.chat_template)
    config = build_config(settings, tokenizer)
    tokenizer.model_max_length = getattr(config, "max_position_embeddings", tokenizer.model_max_length)
    if model.disable_dropout:
        disable_dropout(config)
    return build_module(config, seed=seed, auto_class=auto_class, attn_implementation=attn_implementation), tokenizer


def _config_of(where: str, model: Model) -> tuple[Any, dict[str, Any] | None]:
    """The model's configuration, and its weights where the format gives both at once (GGUF)."""
    if is_gguf(where):
        return read_gguf(where)
    from transformers import AutoConfig

    with _explained(where, "configuration"):
        return AutoConfig.from_pretrained(
            where, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        ), None


def _build(
    auto_class: Any,
    where: str,
    config: Any,
    state: dict[str, Any] | None,
    dtype: torch.dtype,
    model: Model,
    attn_implementation: str | None,
) -> tuple[Any, set[str]]:
    """The module, and the names of the weights that were not there."""
    if model.disable_dropout:
        disable_dropout(config)
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "output_loading_info": True,
        "trust_remote_code": model.trust_remote_code,
    }
    if state is None:
        options |= {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}

    def load(attention: str | None) -> tuple[Any, set[str]]:
        chosen = {} if attention is None else {"attn_implementation": attention}
        if state is None:
            module, info = auto_class.from_pretrained(where, **options, **chosen)
        else:
            module, info = from_state(auto_class, state=state, **options, **chosen)
        return module, set(info["missing_keys"])

    with _explained(where, "weights"), quiet(), torch.random.fork_rng(devices=[]):  # missing heads are drawn by transformers
        try:
            return load(attn_implementation)
        except (ValueError, ImportError) as error:
            if attn_implementation is None or "ttention" not in str(error):
                raise
            log.warning("%s does not take %s attention; using its own", where, attn_implementation)
            return load(None)


def _weights_dtype(model: Model, trainable: bool, dtype: str | None) -> torch.dtype:
    """float32 for what is trained; the named dtype for what is frozen, a LoRA base included."""
    if trainable and model.lora is None:
        return torch.float32
    return DTYPES[dtype or model.dtype]


def _finish(
    module: Any, tokenizer: Any, kind: Literal["causal", "scalar"], where: str, model: Model, *, seed: int, trainable: bool
) -> LoadedModel:
    """What every way of loading ends with: dropout, adapter, what is trained, gradient checkpointing, mode."""
    rows, tokens = module.get_input_embeddings().weight.shape[0], len(tokenizer)
    if tokens > rows:
        log.warning(
            "%s: the tokenizer knows %d tokens but the model has embeddings for %d; text with the others can't be used",
            where,
            tokens,
            rows,
        )
    if model.disable_dropout:
        disable_dropout(module)
    lora = trainable and model.lora is not None
    module.requires_grad_(trainable and not lora)
    if lora:
        assert model.lora is not None
        if model.quantization is not None:
            quantize_base(module, default_device())
        module = add_lora(module, model.lora, seed=seed, scalar=kind == "scalar")
    if trainable and model.gradient_checkpointing:
        checkpoint_activations(module)
    module.to(default_device())
    module.train(trainable)
    return LoadedModel(module=module, tokenizer=tokenizer, kind=kind, path=where, lora=lora)


def _some(names: Iterable[str], show: int = 3) -> str:
    names = sorted(names)
    return ", ".join(names[:show]) + (f" and {len(names) - show} more" if len(names) > show else "")


@contextmanager
def _explained(where: str, what: str) -> Iterator[None]:
    """Turn the many ways in which a download or a broken folder fails into one message with the cure."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if Path(where).is_dir():
            raise ConfigError(f"model.path: the {what} in {where} could not be read: {reason}") from error
        raise ConfigError(
            f"model.path: {where} is no folder here, and its {what} could not be had from the hub: {reason} "
            "Check the name and the network (HF_HUB_OFFLINE), or name a local model folder."
        ) from error
    except Exception as error:  # safetensors' own error for a damaged file has no base of its own
        if type(error).__module__.startswith("safetensors"):
            raise ConfigError(f"model.path: the {what} in {where} is damaged: {error}. Copy the file again.") from error
        raise
