"""`accord run` and the four stages alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.launch import launch

if TYPE_CHECKING:
    from accord.config import Config


def run_stage(stage: str, config: Config, command: Sequence[str]) -> int:
    """Train one stage where `launch` says (each worker is started with `command`) and say where its model is. The exit code."""
    return launch(config, command, lambda: _train_stage(stage, config))


def run_pipeline(config: Config, command: Sequence[str]) -> int:
    """Train the stages one after the other where `launch` says, print the judge's table if there is a judge, and say how to go on."""
    return launch(config, command, lambda: _train_pipeline(config))


def _train_stage(stage: str, config: Config) -> None:
    _quiet()
    from accord.engine.ranks import join
    from accord.pipeline import train_stage

    config = config.for_stage(stage)
    summary = train_stage(stage, config)
    if not join().is_main:
        return
    _print_numbers(stage, summary)
    print(f"model:  {Path(config.run.dir) / 'model'}")
    _print_report(Path(config.run.dir))


def _train_pipeline(config: Config) -> None:
    _quiet()
    from accord import pipeline
    from accord.engine.ranks import join

    result = pipeline.run_pipeline(config)
    if not join().is_main:
        return
    for stage, summary in result.summaries.items():
        _print_numbers(stage, summary)
    if result.judged:
        _print_judged(result.judged)
    last = next((stage for stage in ("ppo", "dpo", "sft") if stage in result.summaries), None)
    if last:
        print(f"chat:   accord chat {result.folder / last}")
    _print_report(result.folder)


def _print_report(folder: Path) -> None:
    """Write the report; a chart that cannot be drawn does not fail a run that is finished."""
    from accord.track.report import write_report

    try:
        print(f"report: {write_report(folder)}")
    except Exception as error:
        print(f"report: could not be written ({type(error).__name__}: {error}); try accord report {folder}")


def _quiet() -> None:
    """Only warnings of our own: libraries' progress bars and advice would bury them."""
    import logging
    import os

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("accord.data.dataset").setLevel(logging.ERROR)  # what was left out is in the summary that is printed
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _print_numbers(stage: str, summary: dict[str, Any]) -> None:
    before, final = summary.get("before") or {}, summary.get("final") or {}
    for name, value in final.items():
        if name.endswith(("/min", "/max")) or not isinstance(value, int | float):
            continue
        start = before.get(name)
        print(f"{stage:>7}  {name:<28} {'' if start is None else f'{start:10.4f} → '}{value:.4f}")


def _print_judged(judged: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    languages = sorted({language for row in judged for language in row.by_language})
    table = Table(title="Judged score on held-out requests (0 to 1)")
    for column in ("model", "score", *languages, f"KL from {judged[0].name}", "length (tokens)"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in judged:
        table.add_row(
            row.name,
            f"{row.score:.3f}",
            *(f"{row.by_language.get(n, float('nan')):.3f}" for n in languages),
            f"{row.kl:.2f}",
            f"{row.length:.1f}",
        )
    Console().print(table)
