"""One self-contained HTML file about a run: did it work, what changed, where did the time go (`accord report`, RUN/report.html)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from accord.errors import ConfigError, UserError
from accord.track.console import duration, label, number
from accord.track.files import number_of, read_lines, step_of, write_atomically
from accord.track.metrics import BETTER, GROUPS, MAIN, MEANING, Curves, Series, charts_of, is_constant, read_series
from accord.track.ppo_report import alarm_marks, marks_of, ppo_view
from accord.track.reward_report import reward_view
from accord.track.run import STAGES, read_config, read_summary

SAMPLES_SHOWN = 8
TIME_PARTS = ("generate", "score", "logprob", "train", "gather", "other")


@dataclass
class StageRun:
    """What one stage left in its folder."""

    stage: str
    folder: Path
    config: dict[str, Any]
    about: dict[str, Any]
    summary: dict[str, Any] | None  # None: not finished
    curves: Curves
    samples: list[dict[str, Any]]
    wall_s: float
    last_step: int


def write_report(folder: Path | str) -> Path:
    """Write `folder`/report.html for a stage's run or a pipeline's; works on an unfinished one too. Returns the file.

    The same run gives the same bytes whenever it is asked.

    Raises UserError (exit 2) if there is no run in `folder`.
    """
    folder = Path(folder)
    stages = find_stages(folder)
    if not stages:
        raise UserError(
            f"{folder}: no run is there (looked for metrics.jsonl in it and in {', '.join(STAGES)}). Give the folder that run.dir named."
        )
    path = folder / "report.html"
    write_atomically(path, render(folder, stages).encode("utf-8", "replace"))
    return path


def find_stages(folder: Path) -> list[StageRun]:
    """The stages that have numbers in `folder`: itself, or its sub-folders in the order in which the pipeline ran them."""
    if (folder / "metrics.jsonl").exists():
        return [read_stage(folder)]
    found = [read_stage(folder / name) for name in STAGES if (folder / name / "metrics.jsonl").exists()]
    config, _ = _config(folder)
    order = _section(config, "pipeline").get("stages")
    order = order if isinstance(order, list) else []
    return sorted(found, key=lambda run: order.index(run.stage) if run.stage in order else len(order))


def read_stage(folder: Path) -> StageRun:
    """Everything that the report needs of one stage's folder."""
    config, about = _config(folder)
    rows = read_lines(folder / "metrics.jsonl")
    stage = about.get("stage") or next((row["stage"] for row in rows if "stage" in row), folder.name)
    return StageRun(
        stage=str(stage),
        folder=folder,
        config=config,
        about=about,
        summary=read_summary(folder),
        curves=read_series(folder / "metrics.jsonl"),
        samples=read_lines(folder / "samples.jsonl"),
        wall_s=max((number_of(row, "wall_s") or 0.0 for row in rows), default=0.0),
        last_step=max((step_of(row) or 0 for row in rows), default=0),
    )


def _last_written(stages: Sequence[StageRun]) -> datetime:
    """When the newest number was written. The clock of now would make another page of the same run every minute."""
    newest = max((run.folder / "metrics.jsonl").stat().st_mtime for run in stages)
    return datetime.fromtimestamp(newest).astimezone()


def render(folder: Path, stages: Sequence[StageRun]) -> str:
    """The page's HTML. Everything that comes from a run is escaped by the template."""
    from jinja2 import Environment, PackageLoader

    page = Environment(loader=PackageLoader("accord.track", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pipeline = not (folder / "metrics.jsonl").exists()
    config, about = _config(folder)
    summary = read_summary(folder) if pipeline else None
    head = about or stages[0].about
    return page.get_template("report.html.j2").render(
        name=folder.resolve().name,
        pipeline=pipeline,
        about=_about(head),
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110) if config else "",
        until=_last_written(stages).strftime("%Y-%m-%d %H:%M"),
        judge=judge_table((summary or {}).get("judge_details") or (summary or {}).get("judge")),
        answers=answers_by_stage(read_lines(folder / "samples.jsonl")) if pipeline else None,
        stage_times=bar_parts([(run.stage, run.wall_s) for run in stages]) if pipeline else None,
        stages=[stage_view(run) for run in stages],
    )


def stage_view(run: StageRun) -> dict[str, Any]:
    """One stage as the template shows it."""
    from accord.track.charts import curve_chart

    marks = alarm_marks(run.folder)
    charts: dict[bool, list[dict[str, str]]] = {True: [], False: []}
    constant = []
    for group, metrics in charts_of(run.stage, run.curves):
        if all(is_constant(run.curves[name]) for name in metrics):  # a flat line says no more than its number
            constant += [f"{name} {number(next(iter(run.curves[name].values())).first)}" for name in metrics]
            continue
        if metrics == ("ppo/judge_error",):  # the bars of another chart
            continue
        drawn = curve_chart(metrics, run.curves, marks_of(metrics, marks))
        chart = {"title": _title(metrics), "note": MEANING.get(metrics[0], ""), "svg": drawn}
        charts[group not in ("train", "throughput", "memory")].append(chart)
    return {
        "stage": run.stage,
        "title": GROUPS.get(run.stage, run.stage),
        "finished": run.summary is not None,
        "last_step": run.last_step,
        "wall": duration(run.wall_s),
        "model": _section(run.config, "model").get("path") or "from scratch",
        "tiles": tiles(run),
        "notes": remarks(run),
        "table": table(run),
        "charts": charts[True],
        "more_charts": charts[False],
        "constant": constant,
        "ppo": ppo_view(run),
        "reward": reward_view(run.folder) if run.stage == "reward" else None,
        "time": time_split(run),
        "samples": samples_view(run.samples),
    }


def tiles(run: StageRun) -> list[dict[str, Any]]:
    """The stage's main numbers now and at its start: held-out ones where the run evaluated, else the training's ends."""
    shown = []
    for name in MAIN.get(run.stage, ()):
        splits = run.curves.get(name, {})
        split = "eval" if "eval" in splits else "train"
        series = splits.get(split)
        if series is None or series.last is None:
            continue
        before, after = (series.first, series.last) if split == "eval" else (series.head(), series.tail())
        shown.append(
            {
                "name": label(name),
                "value": number(after),
                "before": number(before) if len(series.finite) > 1 else None,
                "trend": _trend(name, before, after),
                "split": "held-out" if split == "eval" else "training",
                "note": MEANING.get(name, ""),
            }
        )
    return shown


def table(run: StageRun) -> list[dict[str, Any]]:
    """Every metric's start and end, evaluation and training; the stage's own first."""
    rows = []
    for _, metrics in charts_of(run.stage, run.curves):
        for name in metrics:
            splits = run.curves[name]
            train, held = splits.get("train", Series()), splits.get("eval", Series())
            rows.append(
                {
                    "name": name,
                    "note": MEANING.get(name, ""),
                    "eval_first": number(held.first),
                    "eval_last": number(held.last) if len(held.finite) > 1 else "–",
                    "eval_trend": _trend(name, held.first, held.last),
                    "train_first": number(train.head()),
                    "train_last": number(train.tail()),
                }
            )
    return rows


def remarks(run: StageRun) -> list[str]:
    """What a careful reader would want pointed out."""
    found = []
    if run.summary is None:
        found.append(f"Not finished: the last line is of step {run.last_step}. Start the same command again to go on.")
    broken = sorted(
        {
            step
            for splits in run.curves.values()
            for s in splits.values()
            for step, v in zip(s.steps, s.values, strict=True)
            if not math.isfinite(v)
        }
    )
    if broken:
        some = ", ".join(map(str, broken[:5])) + (" …" if len(broken) > 5 else "")
        found.append(f"{len(broken)} step(s) have numbers that are not finite (step {some}); the curves have gaps there.")
    skipped = [value for _, value in run.curves.get("train/skipped", {}).get("train", Series()).finite]
    if skipped and max(skipped) > 0:
        found.append("Some optimizer steps were skipped because of non-finite losses or gradients (train/skipped).")
    ended = run.curves.get("ppo/eos_rate", {}).get("train", Series()).tail()
    if ended is not None and ended < 0.5:
        found.append(
            f"Only {ended:.0%} of the last responses ended themselves; the others were cut. Raise generate.max_new_tokens or ppo.missing_eos_penalty."
        )
    repeats = run.curves.get("ppo/repetition", {}).get("train", Series())
    first, last = repeats.head(), repeats.tail()
    if first is not None and last is not None and last > 0.2 and last > 2 * first:
        found.append(f"Repetition rose from {first:.2f} to {last:.2f}: look at the samples for reward hacking.")
    return found


def time_split(run: StageRun) -> dict[str, Any] | None:
    """Where the steps' seconds went, from time/*; None if the run has no such metrics."""
    totals = {}
    for name, splits in run.curves.items():
        if name.startswith("time/") and "train" in splits:
            totals[name.removeprefix("time/")] = sum(value for _, value in splits["train"].finite)
    step = totals.pop("step", None)
    parts = [(name, totals.pop(name)) for name in TIME_PARTS if name in totals] + list(totals.items())
    if step is not None and (rest := step - sum(seconds for _, seconds in parts)) > 0.005 * step and parts:
        parts.append(("not named", rest))
    if not parts:
        return None
    steps = len(run.curves.get("time/step", next(iter(run.curves.values()))).get("train", Series()).finite)
    return {"parts": bar_parts(parts), "steps": steps, "per_step": number(sum(seconds for _, seconds in parts) / max(steps, 1))}


def bar_parts(parts: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    """Names and seconds as the segments of a bar."""
    whole = sum(seconds for _, seconds in parts) or 1.0
    return [
        {
            "name": name,
            "share": round(100 * seconds / whole, 2),
            "percent": f"{100 * seconds / whole:.0f} %",
            "time": _seconds(seconds),
            "color": index % 7,
        }
        for index, (name, seconds) in enumerate(parts)
        if seconds > 0
    ]


def samples_view(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Samples of the first and of the last step: prompts that were answered twice side by side, and where these are few, both lists.

    A sample may have `prompt` (text or messages) and `response`; its other short values (score, KL, …) are shown beside it.
    """
    steps = sorted({_step(sample) for sample in samples})
    if not steps:
        return None
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(conversation(sample.get("prompt")), []).append(sample)
    pairs = []
    for prompt, found in by_prompt.items():
        before, after = sample_view(min(found, key=_step)), sample_view(max(found, key=_step))
        if before["step"] < after["step"]:
            pairs.append({"prompt": prompt, "before": before, "after": after, "way": after["step"] - before["step"]})
    pairs.sort(key=lambda pair: pair["way"], reverse=True)
    if len(pairs) >= 3:
        return {"pairs": pairs[:SAMPLES_SHOWN], "before": [], "after": []}

    def of(step: int) -> list[dict[str, Any]]:
        return [sample_view(sample) for sample in samples if _step(sample) == step][:SAMPLES_SHOWN]

    return {"pairs": pairs, "before": of(steps[0]) if len(steps) > 1 else [], "after": of(steps[-1])}


def sample_view(sample: Mapping[str, Any]) -> dict[str, Any]:
    """One sample: its texts, and its other values as short labels."""
    hidden = ("stage", "step", "prompt", "response", "split", "token_ids", "logprobs", "reference", "meta")
    chips = []
    for key, value in sample.items():
        if key in hidden or value is False or not _short(value):
            continue
        name = key.replace("_", " ")
        chips.append(name if value is True else f"{name} {number(value) if _is_number(value) else value}")
    reference = sample.get("reference")
    return {
        "step": _step(sample),
        "prompt": conversation(sample.get("prompt")),
        "response": conversation(sample.get("response")),
        "reference": reference if isinstance(reference, str) else None,
        "chips": chips,
    }


def answers_by_stage(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A pipeline's own samples, where every stage's model answered the same prompts: one column a stage."""
    stages = list(dict.fromkeys(str(sample["stage"]) for sample in samples if "stage" in sample))
    rows: dict[str, dict[str, Any]] = {}
    for sample in samples:
        rows.setdefault(conversation(sample.get("prompt")), {}).setdefault(str(sample.get("stage")), sample_view(sample))
    if not stages or not rows:
        return None
    complete = [(prompt, [answers.get(stage) for stage in stages]) for prompt, answers in rows.items()]
    return {"stages": stages, "rows": complete[: 2 * SAMPLES_SHOWN]}


def judge_table(judge: Any) -> dict[str, Any] | None:
    """summary.json's judged scores, `{model: score}` or `{model: {score, kl, …}}`, as rows with a bar for the (first) number."""
    if not isinstance(judge, Mapping) or not judge:
        return None
    flat = {str(name): dict(_numbers(value)) if isinstance(value, Mapping) else {"score": value} for name, value in judge.items()}
    columns = list(dict.fromkeys(key for numbers in flat.values() for key in numbers))
    rows: list[dict[str, Any]] = []
    for name, numbers in flat.items():
        score = next((numbers[key] for key in ("score", *columns) if _is_number(numbers.get(key))), None)
        if score is not None:
            rows.append(
                {
                    "name": name,
                    "score": score,
                    "value": f"{score:.3f}",
                    "cells": [number(numbers.get(c)) for c in columns if c != "score"],
                }
            )
    if not rows:
        return None
    top = max(1.0, *(row["score"] for row in rows))
    for row in rows:
        row["width"] = round(max(0.0, 100 * row["score"] / top), 1)
    return {"rows": rows, "columns": [column for column in columns if column != "score"]}


def conversation(value: Any) -> str:
    """A prompt or a response as text: a string as it is, messages with their roles."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = value.get("messages", [value])
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        if len(value) == 1:
            return str(value[0].get("content", ""))
        return "\n".join(f"{item.get('role', '?')}: {item.get('content', '')}" for item in value)
    return str(value)


# ----------------------------------------------------------------------------------------------------------------------


def _config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run's configuration for display; a report of a run without a readable one leaves it out."""
    try:
        return read_config(folder)
    except ConfigError:
        return {}, {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a configuration that may have been changed by hand."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _about(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if about.get("started"):
        rows.append(("started", str(about["started"]).replace("T", " ")[:16]))
    if isinstance(about.get("git"), Mapping):
        rows += [(f"{name} commit", str(commit)) for name, commit in about["git"].items()]
    if isinstance(about.get("versions"), Mapping):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items())))
    if about.get("machine"):
        rows.append(("machine", str(about["machine"])))
    return rows


def _title(metrics: Sequence[str]) -> str:
    first = metrics[0]
    if len(metrics) == 1 or first == "ppo/score":
        return first
    return f"{first.split('/', 1)[0]}/" + ", ".join(name.split("/", 1)[-1] for name in metrics)


def _trend(name: str, before: float | None, after: float | None) -> str:
    """better | worse | "" for the colour of a change."""
    if before is None or after is None or name not in BETTER or math.isclose(before, after, rel_tol=1e-6, abs_tol=1e-12):
        return ""
    return "better" if (after > before) == (BETTER[name] > 0) else "worse"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _step(sample: Mapping[str, Any]) -> int:
    return step_of(sample) or 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a table, those of tables inside it too ({"by_language": {"en": …}} gives en)."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _numbers(item)
        elif _is_number(item):
            yield key, item


def _short(value: Any) -> bool:
    return _is_number(value) or isinstance(value, bool) or (isinstance(value, str) and 0 < len(value) <= 40)
