"""One frozen base, several LoRA adapters and score heads on it: PPO's actor, critic, reward model and reference in about one model's memory.

The actor's adapter is the one that `add_lora` made and is active everywhere else; the others are switched on for their own forward and
backward. The reference is the base alone, or the adapter that the actor was continued from (`lora.as_reference`).
"""

from __future__ import annotations

import copy
import filecmp
import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from accord.data.packing import Pack
from accord.errors import ConfigError
from accord.models.forward import PackedModel
from accord.models.heads import new_score_head, unwrap
from accord.models.load import resolve
from accord.models.lora import active_adapter, adapter_options

if TYPE_CHECKING:
    from accord.config import Lora, Model

CRITIC, REWARD = "critic", "reward"  # names of adapters beside the actor's
_HEAD = "base_model.model.score."  # where peft keeps the score head in an adapter's file


def find_adapter(path: str | None) -> Path | None:
    """The adapter of a reward model that `path` stands for: the folder itself, or RUN/adapter where it names RUN or RUN/model.

    None where there is none: that is a model of its own. RUN/best and the like have none either: RUN/adapter is the end of the run.
    """
    if path is None:
        return None
    here = Path(path).expanduser()
    if is_adapter(here):
        return here
    model = Path(resolve(path))
    beside = model.parent / "adapter"
    return beside if model.name == "model" and is_adapter(beside) and _settings(beside).get("modules_to_save") else None


def is_adapter(folder: Path) -> bool:
    """Whether it holds an adapter in peft's format (and no whole model)."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def why_not_on(folder: Path, model: Model) -> str | None:
    """What keeps the adapter in `folder` from standing on the base of model.path, in words; None: nothing.

    The base is the same when it is the same folder, file or hub id, or a folder with the same configuration and weights, byte for byte.
    """
    trained_on, base = str(_settings(folder).get("base_model_name_or_path")), resolve(str(model.path))
    a, b = Path(trained_on).expanduser(), Path(base)
    if trained_on == base or (a.exists() and b.exists() and (a.resolve() == b.resolve() or _same_files(a, b))):
        return None
    return f"it was trained on {trained_on}, which is not known to be what model.path={model.path} names"


def _same_files(a: Path, b: Path) -> bool:
    """The same configuration and the same weight files."""
    if not (a.is_dir() and b.is_dir()):
        return False
    names = {path.name for folder in (a, b) for path in folder.glob("*.safetensors")} | {"config.json"}
    return len(names) > 1 and not any(filecmp.cmpfiles(a, b, sorted(names), shallow=False)[1:])


def _settings(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/adapter_config.json can't be read: {error}") from error
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------------------------------- adapters with a head


def new_adapter(module: nn.Module, name: str, lora: Lora, *, seed: int) -> nn.Linear:
    """Put a fresh trainable adapter beside the actor's, the same that `load_scalar` would make; returns its fresh head."""
    _add(module, name, adapter_options(lora), seed)
    _prepare(module, name, trainable=True)
    return new_score_head(_width(module), seed, _device(module))


def load_adapter(module: nn.Module, name: str, folder: Path, *, seed: int | None, trainable: bool) -> nn.Linear:
    """Put the adapter in `folder` beside the actor's; returns its head. A fresh one from `seed` where the folder has none.

    Raises ConfigError when the adapter does not fit the base, or has no head and `seed` is None.
    """
    from peft import LoraConfig, TaskType
    from peft.utils import set_peft_model_state_dict

    try:
        options: Any = LoraConfig.from_pretrained(str(folder))
        state = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ConfigError(f"the adapter in {folder} can't be read: {error}") from error
    own_head = {key.removeprefix(_HEAD): state.pop(key) for key in list(state) if key.startswith(_HEAD)}
    if not own_head and seed is None:
        raise ConfigError(f"the adapter in {folder} has no score head: it is no reward model's. Train one with accord reward.")
    options.modules_to_save, options.task_type, options.inference_mode = None, TaskType.CAUSAL_LM, not trainable
    _add(module, name, options, seed or 0)
    try:
        result: Any = set_peft_model_state_dict(module, state, adapter_name=name)
        missing = [key for key in result.missing_keys if f".{name}." in key]
        if missing or result.unexpected_keys:
            raise RuntimeError(f"weights differ: {', '.join([*missing, *result.unexpected_keys][:3])}")
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the adapter in {folder} does not fit the base of model.path: {error}") from error
    _prepare(module, name, trainable)
    head = new_score_head(_width(module), seed or 0, _device(module))
    if "bias" in own_head:
        head.bias = nn.Parameter(torch.zeros(1, device=_device(module)))
    if own_head:
        head.load_state_dict(own_head)
    return head.requires_grad_(trainable)


def adapter_parameters(module: nn.Module, name: str, head: nn.Module) -> dict[str, nn.Parameter]:
    """What belongs to one adapter, its head included."""
    own = {key: p for key, p in module.named_parameters() if f".{name}." in key}
    return own | {f"score.{key}": p for key, p in head.named_parameters()}


def save_scalar_adapter(module: nn.Module, name: str, head: nn.Module, folder: Path) -> None:
    """Write adapter and head into an existing folder, as peft writes those of a one-label classifier: it loads there as it is."""
    from peft import TaskType
    from peft.utils import get_peft_model_state_dict

    wrapped: Any = module
    options = copy.deepcopy(wrapped.peft_config[name])
    options.modules_to_save, options.task_type, options.inference_mode = ["score"], TaskType.SEQ_CLS, True
    options.base_model_name_or_path = unwrap(module).name_or_path
    state: dict[str, Tensor] = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False)
    state |= {f"{_HEAD}{key}": tensor for key, tensor in head.state_dict().items()}
    save_file(
        {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()},
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )
    options.save_pretrained(str(folder))


def _add(module: nn.Module, name: str, options: Any, seed: int) -> None:
    wrapped: Any = module
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's remarks on what it corrects by itself
        torch.manual_seed(seed)
        try:
            wrapped.add_adapter(name, options)
        except (ValueError, NotImplementedError, re.error) as error:
            raise ConfigError(
                f"no second adapter can be put on {type(unwrap(module)).__name__} ({error}). Set model.lora.share_base=false."
            ) from error


def _prepare(module: nn.Module, name: str, trainable: bool) -> None:
    """Float32, on the base's device; it learns, or not. peft has left the actor's as it was."""
    for key, parameter in module.named_parameters():
        if f".{name}." in key:
            parameter.data = parameter.data.float().to(_device(module))
            parameter.requires_grad_(trainable)


def _width(module: nn.Module) -> int:
    """Of the hidden states that a head reads."""
    return unwrap(module).get_output_embeddings().weight.shape[1]


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


class AdapterScorer(PackedModel):
    """A frozen reward model that is an adapter and a head on the actor's base. It leaves the actor as it is."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        head: nn.Linear,
        tokenizer: Any,
        *,
        whole: Path | None = None,
        precision: str = "float32",
    ) -> None:
        """`tokenizer`: with the chat template that it was trained with; `whole`: the folder of the same model merged, if there is one."""
        super().__init__(module, precision=precision)
        self.name, self.head, self.tokenizer, self.whole = name, head.requires_grad_(False), tokenizer, whole

    @torch.no_grad()
    def scores(self, pack: Pack) -> Tensor:
        """[S] the head on each sequence's last token. Float32."""
        was_training = self.module.training
        self.module.eval()
        try:
            with active_adapter(self.module, self.name):
                return super().scores(pack)
        finally:
            self.module.train(was_training)

    def _scalar(self, hidden: Tensor) -> Tensor:
        return head_in_float32(self.head, hidden)


def head_in_float32(head: nn.Linear, hidden: Tensor) -> Tensor:
    """[rows, d] → [rows], whatever the backbone computes in."""
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.float()).squeeze(-1)
