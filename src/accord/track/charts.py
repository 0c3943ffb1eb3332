"""The report's pictures: small SVG charts drawn by matplotlib, without pyplot's global state."""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accord.track.metrics import Curves, Series

TRAIN, EVAL, INK, FAINT, ALARM = "#2f6fde", "#d9480f", "#3a4250", "#d8dde6", "#c92a2a"
MORE = ("#2f6fde", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#a61e4d")
MAX_POINTS = 400  # a curve of a million steps is drawn as this many means; more cannot be seen


def curve_chart(metrics: Sequence[str], curves: Curves, marks: Sequence[int] = ()) -> str:
    """One chart over the steps: training faint and smoothed, evaluation as marked points, the spread as a band.

    With several metrics each has a colour, and evaluation is dashed. `marks` are steps with an alarm. Returns an `<svg>` element.
    """
    several = len(metrics) > 1
    with _figure(3.3, 2.1 if several else 1.85) as (figure, axes):
        for number, name in enumerate(metrics):
            splits = curves.get(name, {})
            if "train" in splits:
                color = MORE[number % len(MORE)] if several else TRAIN
                _train_line(axes, splits["train"], color, _label(name, "train", several), band=not several and _has_spread(name))
            for split, series in splits.items():
                if split != "train":
                    _eval_line(
                        axes, series, MORE[number % len(MORE)] if several else EVAL, _label(name, split, several), dashed=several
                    )
        _keep_to_lines(axes)
        _mark(axes, marks)
        _finish(axes, legend=not several and len(curves.get(metrics[0], {})) > 1)
        if several:  # up to four names would cover the lines
            figure.legend(
                loc="outside lower center", ncols=2, frameon=False, fontsize=7, labelcolor=INK, handlelength=1.4, columnspacing=1
            )
        return _svg(figure)


def kl_reward_chart(
    kl: Series, score: Series, eval_kl: Series | None = None, eval_score: Series | None = None, marks: Sequence[int] = ()
) -> str | None:
    """Score against KL, coloured by step: what each nat of distance from the reference bought. None without two common steps.

    `marks` are steps with an alarm: crosses.
    """
    points = _joined(kl, score)
    if len(points) < 2:
        return None
    marked = [point for point in points if point[0] in set(marks)]
    points = _thin(points)
    steps, xs, ys = (list(column) for column in zip(*points, strict=True))
    with _figure(6.0, 3.2) as (figure, axes):
        axes.plot(xs, ys, color=FAINT, linewidth=1, zorder=1)
        dots = axes.scatter(xs, ys, c=steps, cmap="viridis_r", s=18, zorder=2, linewidths=0)
        for name, at, offset in (("start", 0, (6, -10)), ("end", -1, (6, 6))):
            axes.annotate(name, (xs[at], ys[at]), xytext=offset, textcoords="offset points", fontsize=8, color=INK)
        if eval_kl is not None and eval_score is not None and (evaluated := _joined(eval_kl, eval_score)):
            axes.plot([p[1] for p in evaluated], [p[2] for p in evaluated], "D", color=EVAL, markersize=5, zorder=3, label="eval")
        if marked:
            axes.plot(
                [p[1] for p in marked],
                [p[2] for p in marked],
                "x",
                color=ALARM,
                markersize=8,
                markeredgewidth=2,
                zorder=4,
                label="alarm",
            )
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, loc="lower right")
        bar = figure.colorbar(dots, ax=axes, pad=0.02, aspect=28)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8, length=0, colors=INK)
        bar.set_label("step", fontsize=8, color=INK)
        axes.set_xlabel("KL to the reference (nats per response)", fontsize=8.5, color=INK)
        axes.set_ylabel("score", fontsize=8.5, color=INK)
        return _svg(figure)


def judge_chart(score: Series, judge: Series, error: Series, marks: Sequence[int] = ()) -> str | None:
    """The score (left) and the held-out judge (right, with its standard error) over the evaluations. None without two of both."""
    points = _joined(score, judge)
    if len(points) < 2:
        return None
    errors = dict(error.finite)
    steps, scores, judged = (list(column) for column in zip(*points, strict=True))
    with _figure(6.0, 3.2) as (figure, axes):
        (left,) = axes.plot(steps, scores, "o-", color=TRAIN, linewidth=1.5, markersize=4, label="score (left)")
        beside = axes.twinx()
        right = beside.errorbar(
            steps, judged, [errors.get(step, 0.0) for step in steps],
            fmt="D--", color=EVAL, linewidth=1.5, markersize=4, capsize=2, elinewidth=1, label="judge (right)",
        )  # fmt: skip
        for side in beside.spines.values():
            side.set_visible(False)
        beside.tick_params(labelsize=7.5, length=2.5, colors=EVAL)
        axes.tick_params(axis="y", colors=TRAIN)
        axes.set_xlabel("step", fontsize=8.5, color=INK)
        _mark(axes, [step for step in marks if steps[0] <= step <= steps[-1]])
        _finish(axes, legend=False)
        figure.legend(handles=[left, right], loc="outside upper center", ncols=2, frameon=False, fontsize=8, labelcolor=INK)
        return _svg(figure)


def calibration_chart(
    bins: Sequence[Mapping[str, Any]], predicted: str, observed: str, span: tuple[float, float] | None = None
) -> str:
    """A reliability diagram: the bins' mean `observed` over their mean `predicted`, dots as large as their share, and the line where both
    are the same. `predicted` and `observed` name the axes; `span` is the range of predictions, by default that of the bins."""
    xs, ys = [b["predicted"] for b in bins], [b["observed"] for b in bins]
    largest = max(b["count"] for b in bins)
    low, high = span or (min(*xs, *ys), max(*xs, *ys))
    with _figure(3.6, 2.9) as (figure, axes):
        axes.plot([low, high], [low, high], color=FAINT, linewidth=1.2, zorder=1)
        axes.plot(xs, ys, color=TRAIN, linewidth=1, alpha=0.5, zorder=2)
        axes.scatter(xs, ys, s=[14 + 90 * b["count"] / largest for b in bins], color=TRAIN, zorder=3, linewidths=0)
        axes.set_xlabel(predicted, fontsize=8.5, color=INK)
        axes.set_ylabel(observed, fontsize=8.5, color=INK)
        return _svg(figure)


# ----------------------------------------------------------------------------------------------------------------------


def _mark(axes: Any, steps: Sequence[int]) -> None:
    """Alarms, as dotted lines from bottom to top."""
    for step in steps:
        axes.axvline(step, color=ALARM, linewidth=1, linestyle=":", zorder=2)


def _has_spread(name: str) -> bool:
    """Whether a band from min to max says anything: a share of yes and no reaches from 0 to 1 in every step."""
    return not name.endswith(("accuracy", "rate", "fraction"))


def _train_line(axes: Any, series: Series, color: str, label: str, *, band: bool) -> None:
    import numpy as np

    steps, values = np.asarray(series.steps, float), np.asarray(series.values, float)
    if band and series.has_band:
        at, low, high = _bin(steps, np.asarray(series.low, float), np.asarray(series.high, float))
        axes.fill_between(at, low, high, color=color, alpha=0.10, linewidth=0)
    at, drawn = _bin(steps, values)
    smooth = _smoothed(drawn)
    if smooth is None:
        axes.plot(at, drawn, color=color, linewidth=1.5, label=label, marker="." if len(at) < 12 else None, markersize=5)
    else:
        axes.plot(at, drawn, color=color, linewidth=0.8, alpha=0.30)
        axes.plot(at, smooth, color=color, linewidth=1.7, label=label)


def _eval_line(axes: Any, series: Series, color: str, label: str, *, dashed: bool) -> None:
    import numpy as np

    at, values = _bin(np.asarray(series.steps, float), np.asarray(series.values, float))
    axes.plot(
        at,
        values,
        color=color,
        linewidth=1.3,
        linestyle="--" if dashed else "-",
        marker="o",
        markersize=3.5,
        label=label,
        zorder=4,
    )


def _bin(steps: Any, *columns: Any) -> tuple[Any, ...]:
    """At most MAX_POINTS points: means over equal runs of steps; NaN only where a whole run is NaN."""
    import numpy as np

    if len(steps) <= MAX_POINTS:
        return (steps, *columns)
    parts = np.array_split(np.arange(len(steps)), MAX_POINTS)

    def mean(column: Any) -> Any:
        return np.array([np.nanmean(column[part]) if np.isfinite(column[part]).any() else math.nan for part in parts])

    return (
        np.array([steps[part[-1]] for part in parts]),
        *(mean(np.where(np.isfinite(column), column, math.nan)) for column in columns),
    )


def _smoothed(values: Any) -> Any:
    """Centred running mean over about a twentieth of the curve (so that nothing is shifted), or None for a short curve."""
    import numpy as np

    if len(values) < 24:
        return None
    half = max(len(values) // 40, 1)
    return np.array(
        [
            np.nanmean(window) if np.isfinite(window := values[max(i - half, 0) : i + half + 1]).any() else math.nan
            for i in range(len(values))
        ]
    )


def _joined(left: Series, right: Series) -> list[tuple[int, float, float]]:
    other = dict(right.finite)
    return [(step, value, other[step]) for step, value in left.finite if step in other]


def _thin(points: list[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(i * (len(points) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def _label(name: str, split: str, several: bool) -> str:
    return f"{name.split('/', 1)[-1].replace('_', ' ')}{'' if split == 'train' else ' (' + split + ')'}" if several else split


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",  # text stays text: small files, the reader's own font
            "svg.hashsalt": "accord",  # the same run gives the same bytes
            "font.size": 8.5,
            "font.family": "sans-serif",
            "axes.formatter.useoffset": False,
        }
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(FAINT)
        axes.grid(axis="y", color="#eceff4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=2.5, color=FAINT, labelsize=7.5)
        axes.margins(x=0.02)
        yield figure, axes


def _keep_to_lines(axes: Any) -> None:
    """Scale the chart to its lines with some room: one extreme item must not flatten the curve; the band is cut off there."""
    import numpy as np

    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines] or [np.zeros(0)])
    drawn = drawn[np.isfinite(drawn)]
    low, high = axes.get_ylim()
    if len(drawn) and np.ptp(drawn) > 0 and axes.collections:
        room = np.ptp(drawn)
        axes.set_ylim(max(low, drawn.min() - room), min(high, drawn.max() + room))


def _finish(axes: Any, *, legend: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    low, high = axes.get_ylim()
    if not (math.isfinite(low) and math.isfinite(high)):
        axes.set_ylim(0, 1)
    elif high - low < 1e-9 * max(abs(high), 1.0):  # a constant: do not magnify its rounding
        pad = 0.1 * max(abs(high), 1e-3)
        axes.set_ylim(low - pad, high + pad)
    axes.yaxis.get_major_formatter().set_powerlimits((-4, 5))
    axes.yaxis.get_offset_text().set_size(7.5)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7.5, loc="best", labelcolor=INK, handlelength=1.4, borderaxespad=0.2)


_COUNTER = re.compile(r'\b(id="|href="#|url\(#)')


def _svg(figure: Any) -> str:
    """The figure as an `<svg>` element that scales with its column. Its ids are made unique, as many share one page."""
    import hashlib

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    prefix = hashlib.sha256(text.encode()).hexdigest()[:8] + "-"
    return _COUNTER.sub(lambda match: match.group(1) + prefix, text)
