"""Do Accord and TRL train alike? The same pairs, order, learning rates and optimizer: the losses must agree at every step.

    python benchmarks/parity_trl.py [--model FOLDER] [--data FILE] [--methods sft reward dpo-sigmoid …] [--steps 20] [--pairs 32]

Runs in the environment that rivals/trl_trainer.py describes. float32, no dropout, the cosine schedule with warm-up, AdamW with weight
decay and clipping; reward models start from the same score head. Accord computes packs that share prompts, TRL padded rows. TRL's own
tokenisation of these conversations differs from Accord's, so both get Accord's token ids. The default model is the small one that ships
with Accord; its reward model and DPO learn quickly, so that the losses move. Exits with 1 when a loss differs by more than 1e-3.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from training import Settings, accord_steps, accord_trainer, records_of

from accord import demo
from accord.commands.run import _quiet

TOLERANCE = 1e-3
_WIDTH = 120
METHODS = ("sft", "reward", "dpo-sigmoid", "dpo-ipo", "dpo-robust", "dpo-hinge")


def main() -> None:
    options = parse_options()
    _quiet()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console = Console()
    console = console if console.width >= _WIDTH else Console(width=_WIDTH)  # in a pipe it would be 80
    table = Table(title=f"Losses of {options.steps} steps: Accord and TRL")
    for name in ("method", "Accord: first", "last", "TRL: first", "last", "largest difference"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    worst = 0.0
    for method in options.methods:
        ours, theirs = compare(method, options)
        difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        worst = max(worst, difference)
        colour = "green" if difference <= TOLERANCE else "red"
        numbers = [f"{loss:.5f}" for loss in (ours[0], ours[-1], theirs[0], theirs[-1])]
        table.add_row(method, *numbers, f"[{colour}]{difference:.1e}[/]")
        console.print(f"[dim]{method}: {difference:.1e}[/dim]", highlight=False)
    console.print(table)
    sys.exit(int(worst > TOLERANCE))


def compare(method: str, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    from rivals.trl_trainer import trl_trainer

    stage, _, loss_type = method.partition("-")
    settings = Settings(
        method=stage,  # type: ignore[arg-type]
        model=str(options.model),
        data=str(options.data),
        batch=options.batch,
        max_length=options.max_length,
        lr=options.lr,
        steps=options.steps,
        schedule="cosine",
        warmup_ratio=0.1,
        weight_decay=0.01,
    )
    if loss_type:
        settings = replace(settings, loss_type=loss_type, label_smoothing=0.1 if loss_type == "robust" else 0.0)
    records, rows = records_of(settings, options.pairs)
    with accord_trainer(settings, records) as trainer:
        if len(trainer.examples.train) != options.pairs:
            raise SystemExit(
                f"error: Accord trains on {len(trainer.examples.train)} examples, not on {options.pairs}; change --pairs"
            )
        ours = [loss for loss, _ in accord_steps(trainer, options.steps)]
    del trainer
    gc.collect()
    rival = trl_trainer(settings, rows, settings.rates(options.steps), head_seed=settings.seed)
    rival.train()
    return ours, rival.record.losses


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo.base_path(), help="model folder (default: the small one that ships)")
    parser.add_argument("--data", type=Path, required=True, help="preference pairs, such as HH's harmless-base/test.jsonl.gz")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=32, help="the first usable ones of the file")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
