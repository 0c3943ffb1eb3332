"""Models from a GGUF file: read, dequantised to float32, and from then on an ordinary `transformers` model.

transformers reads the format (weights, configuration and tokenizer); what it leaves behind is removed here: the quantisation entry of the
configuration and the quantiser on the module, which would make the trained model unsavable.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.errors import ConfigError
from accord.models.heads import quiet

if TYPE_CHECKING:
    from torch import Tensor


def is_gguf(path: str | Path) -> bool:
    """True for the path of an existing GGUF file (told by its first four bytes)."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_gguf(path: str | Path) -> tuple[Any, dict[str, Tensor]]:
    """The configuration (without quantisation) and the causal model's weights by their `transformers` names, dequantised float32.

    Raises ConfigError when the `gguf` or `accelerate` package is missing, or the architecture is unknown to transformers.
    """
    _need_packages(path)
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(path)
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.float32}
    try:  # newer transformers keep packed weights where a kernel exists, unless told not to
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(gguf_file=path.name, dequantize=True)
    except (ImportError, TypeError):
        pass
    try:
        with quiet():
            module = AutoModelForCausalLM.from_pretrained(str(path.parent), **options)
    except Exception as error:  # a damaged file makes the reader fail in every way there is
        raise ConfigError(f"model.path: {path} could not be read as a GGUF model: {error}") from error
    config = module.config
    for name in ("quantization_config", "_name_or_path"):
        config.__dict__.pop(name, None)
    return config, {name: tensor.float() for name, tensor in module.state_dict().items()}


def load_gguf_tokenizer(path: str | Path) -> Any:
    """The tokenizer and chat template that a GGUF file carries."""
    _need_packages(path)
    from transformers import AutoTokenizer

    path = Path(path)
    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:
        raise ConfigError(f"model.path: the tokenizer in {path} could not be read: {error}") from error


def from_state(auto_class: Any, config: Any, state: dict[str, Tensor], **options: Any) -> Any:
    """What `auto_class.from_pretrained` gives, from a configuration and weights in memory."""
    return auto_class._model_mapping[type(config)].from_pretrained(None, config=config, state_dict=state, **options)


def convert_gguf(path: str | Path, folder: str | Path) -> Path:
    """Write a GGUF file as a model folder (float32 safetensors, tokenizer, template) once; an existing folder is returned as it is."""
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return folder
    from transformers import AutoModelForCausalLM

    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        config, state = read_gguf(path)
        with quiet():
            module = from_state(AutoModelForCausalLM, config, state, dtype="float32")
            module.save_pretrained(beside)
        load_gguf_tokenizer(path).save_pretrained(beside)
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _need_packages(path: str | Path) -> None:
    from importlib.util import find_spec

    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"model.path: reading {path} needs the package {' and '.join(missing)}. Run: pip install 'accord[gguf]'"
        )
