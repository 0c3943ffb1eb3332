"""TRL's trainers on token ids, with the settings that Accord gets.

One environment holds both, so that they can also be compared in one process:

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu     # or a CPU wheel from a folder: --find-links
    VENV/bin/pip install -c constraints.txt -e . "trl==1.16.*" gguf                         # transformers 5.24 as constraints.txt has it

What is not TRL's default and why: gradient checkpointing is off (it would compute every forward twice), bf16 only where asked for, no
shuffling, learning rates given step by step, and a pad token that occurs in no text: SmolLM2's is its end token, which a sequence
classifier would cut off before it looks for the last token.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from training import Settings
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


@dataclass
class Record:
    """What a run has done, step by step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # without padding
    padded: list[int] = field(default_factory=list)  # computed


def trl_trainer(
    settings: Settings,
    rows: Sequence[dict[str, list[int]]],
    rates: Sequence[float],
    *,
    padding_free: bool = False,
    packing: bool = False,
    head_seed: int | None = None,
) -> Any:
    """A TRL trainer whose `record` fills while it trains. `head_seed`: a reward model starts from the score head that Accord draws."""
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    used = {token for row in rows for ids in row.values() for token in ids}
    unused = [i for i in tokenizer.all_special_ids if i not in used] or [i for i in range(len(tokenizer)) if i not in used]
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(unused[0])
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": settings.batch,
        "learning_rate": settings.lr,
        "optim": "adamw_torch_fused",
        "adam_beta1": settings.betas[0],
        "adam_beta2": settings.betas[1],
        "adam_epsilon": settings.eps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "max_steps": settings.steps if settings.steps is not None else -1,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "max_length": settings.max_length,
        "bf16": settings.precision == "bf16",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }
    model_class: Any = AutoModelForSequenceClassification if settings.method == "reward" else AutoModelForCausalLM
    labels = {"num_labels": 1} if settings.method == "reward" else {}
    model = model_class.from_pretrained(settings.model, dtype=torch.float32, attn_implementation="sdpa", **labels)
    base: Any
    if settings.method == "sft":
        base, data = SFTTrainer, list(rows)
        options |= {"packing": packing, "padding_free": padding_free, "packing_strategy": "bfd"}
        if padding_free and not packing:
            options["max_length"] = None  # the rows are short enough; TRL asks for this
        args: Any = SFTConfig(**options)
    elif settings.method == "dpo":
        base = DPOTrainer
        data = [{"prompt_ids": row["prompt"], "chosen_ids": row["chosen"], "rejected_ids": row["rejected"]} for row in rows]
        losses = {"beta": settings.beta, "loss_type": [settings.loss_type], "label_smoothing": settings.label_smoothing}
        args = DPOConfig(**options, **losses)
    else:
        base = RewardTrainer
        data = [{"chosen_ids": row["prompt"] + row["chosen"], "rejected_ids": row["prompt"] + row["rejected"]} for row in rows]
        args = RewardConfig(**options)
        if head_seed is not None:
            from accord.models.heads import init_score_head

            init_score_head(model, head_seed)
    trainer = _recording(base, rates)(
        model=model, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer, callbacks=[_Clock()]
    )
    return trainer


class _Clock(TrainerCallback):
    """Times the steps: from the batch that is there to the updated weights."""

    record: Record

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.record.seconds.append(time.perf_counter() - self._started)


def _recording(base: Any, rates: Sequence[float]) -> Any:
    class Recording(base):
        def __init__(self, *args: Any, callbacks: list[Any], **kwargs: Any) -> None:
            self.record = callbacks[0].record = Record()
            super().__init__(*args, callbacks=callbacks, **kwargs)

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset if base is DPOTrainer else super()._prepare_dataset(dataset, *args, **kwargs)  # the ids are there

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            peak = self.args.learning_rate
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda k: rates[min(k, len(rates) - 1)] / peak)
            return self.lr_scheduler

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            self.record.tokens.append(int(mask.sum()) if mask is not None else inputs["input_ids"].numel())
            self.record.padded.append(inputs["input_ids"].numel())
            loss = super().training_step(model, inputs, *args, **kwargs)
            self.record.losses.append(float(loss))
            return loss

    return Recording
