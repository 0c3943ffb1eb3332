"""LoRA through peft: add or continue an adapter, look at the model as it was at the start, and export merged weights.

Training weights are never added to and subtracted from: merging computes W + ΔW on the side, so nothing drifts (Hu et al. 2021, arXiv:2106.09685).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accord.errors import ConfigError
from accord.models.heads import unwrap
from accord.models.quantized import QuantizedLinear

if TYPE_CHECKING:
    from accord.config import Lora

TRAINED = "default"  # the adapter that learns; also the name under which peft saves it
REFERENCE = "reference"  # a continued adapter as it was at the start, frozen


def add_lora(module: nn.Module, lora: Lora, *, seed: int, scalar: bool = False) -> nn.Module:
    """Freeze `module` and wrap it with a trainable float32 adapter; with `lora.path`, continue that adapter.

    A scalar model's score head is trained whole, beside the adapter. A new adapter starts as the identity (B = 0); its A comes from `seed`.
    Raises ConfigError when `target_modules` fits nothing or `lora.path` holds no adapter of this model.
    """
    from peft import PeftModel, get_peft_model

    base: Any = module
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # peft's remarks on what it corrects by itself (Conv1D's layout, patterns that match nothing)
        torch.manual_seed(seed)
        if lora.path:
            _check_adapter(lora)
            try:
                wrapped: Any = PeftModel.from_pretrained(base, lora.path, adapter_name=TRAINED, is_trainable=True)
                wrapped.load_adapter(lora.path, adapter_name=REFERENCE, is_trainable=False)
                wrapped.set_adapter(TRAINED)
            except (ValueError, RuntimeError, OSError) as error:
                raise ConfigError(f"model.lora.path: the adapter in {lora.path} does not fit this model: {error}") from error
        else:
            try:
                wrapped = get_peft_model(base, adapter_options(lora, scalar=scalar), adapter_name=TRAINED)
            except (ValueError, re.error) as error:
                linear = sorted({name.rsplit(".", 1)[-1] for name, part in module.named_modules() if isinstance(part, nn.Linear)})
                raise ConfigError(
                    f"model.lora.target_modules: {lora.target_modules!r} does not fit this model ({error}). "
                    f"Its linear layers are {', '.join(linear)}; all-linear takes them all."
                ) from error
    for name, parameter in wrapped.named_parameters():
        if f".{REFERENCE}." in name or name.endswith(f".{REFERENCE}"):
            parameter.requires_grad_(False)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wrapped


def adapter_options(lora: Lora, *, scalar: bool = False) -> Any:
    """peft's description of a new adapter; a scalar model's score head goes with it."""
    from peft import LoraConfig, TaskType

    targets = lora.target_modules
    if isinstance(targets, str) and targets.isidentifier():  # a single name; peft takes a bare string as a pattern of whole paths
        targets = (targets,)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float is as good
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=["score"] if scalar else None,
        task_type=TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM,
    )


def has_adapter(module: nn.Module) -> bool:
    """True when `module` carries a LoRA adapter."""
    return hasattr(module, "peft_config")


@contextmanager
def active_adapter(module: nn.Module, name: str | None) -> Iterator[None]:
    """Inside, the model computes with adapter `name`, or with none; afterwards as before.

    Only switches are flipped; no weight and no `requires_grad` changes, so it may stand between a forward and its backward. With
    gradient checkpointing a backward computes the forward again: it must then run under the adapter of its forward.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    parts: list[Any] = [part for part in module.modules() if isinstance(part, BaseTunerLayer | ModulesToSaveWrapper)]
    before = [(part._active_adapter, part._disable_adapters) for part in parts]
    try:
        for part in parts:
            part._active_adapter = part._active_adapter if name is None else [name]
            part._disable_adapters = name is None
        yield
    finally:
        for part, (active, disabled) in zip(parts, before, strict=True):
            part._active_adapter, part._disable_adapters = active, disabled


@contextmanager
def as_reference(module: nn.Module) -> Iterator[nn.Module]:
    """Inside, the model computes as it did when training started: without adapter, or with the adapter it was continued from."""
    if not has_adapter(module):
        raise ValueError("as_reference needs a model with a LoRA adapter")
    with active_adapter(module, REFERENCE if REFERENCE in module.peft_config else None):  # type: ignore[operator]
        yield module


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The weights of the plain model with the trained adapter merged in: W + (α/r) B A, under the plain model's names.

    The sum is computed in float32 and rounded once to the base weight's dtype; of a base in 4 bits W is what it is computed with. Training
    weights are not touched. Without an adapter this is the module's own state.
    """
    from peft.tuners.lora import LoraLayer

    if not has_adapter(module):
        return dict(module.state_dict())
    base = unwrap(module)
    merged: dict[str, Tensor] = {}
    for name, tensor in base.state_dict().items():
        if ".lora_" in name or f".modules_to_save.{REFERENCE}." in name or ".original_module." in name:
            continue
        merged[_plain(name).replace(f".modules_to_save.{TRAINED}.", ".")] = tensor
    with torch.no_grad():
        for name, part in base.named_modules():
            if isinstance(part, QuantizedLinear):
                for buffer, _ in part.named_buffers():
                    del merged[f"{_plain(name)}.{buffer}"]
                merged[f"{_plain(name)}.weight"] = part.weight
        for name, part in base.named_modules():
            if isinstance(part, LoraLayer) and TRAINED in part.lora_A:
                # Experts of a mixture are one parameter of a module, which peft wraps by its name.
                target = f"{_plain(name)}.{getattr(part, 'parameter_name', 'weight')}"
                weight = merged[target]
                delta = part.get_delta_weight(TRAINED)  # type: ignore[attr-defined]
                merged[target] = (weight.float() + delta.float()).to(weight.dtype)
    return merged


def save_adapter(module: nn.Module, folder: Path) -> None:
    """Write the trained adapter alone (peft's format: adapter_config.json, adapter_model.safetensors) into an existing folder."""
    wrapped: Any = module
    wrapped.save_pretrained(str(folder), selected_adapters=[TRAINED], safe_serialization=True)


def _plain(name: str) -> str:
    """A module's or parameter's name without the layers that peft put around it."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)


def _check_adapter(lora: Lora) -> None:
    folder = Path(str(lora.path))
    if folder.is_dir() and not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.lora.path: {folder} holds no adapter (no adapter_config.json). Name a folder that peft or `accord` saved, such as RUN/adapter."
        )
    if not folder.is_dir():
        raise ConfigError(f"model.lora.path: no such folder: {folder}")
