"""metrics.jsonl, samples.jsonl, TensorBoard and the console: what is logged, once each, whatever happened before."""

import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from accord.errors import AccordError
from accord.track import Tracker, open_run
from accord.track.console import duration, number
from accord.track.files import json_line, read_lines

QUIET = {"tensorboard": False, "console_every": 1}


def make_run(folder: Path):
    run = open_run({"run": {"dir": str(folder), "resume": "auto", "overwrite": False}}, "sft", folder)
    run.begin()
    return run


def make_tracker(run, start_step=0, settings=QUIET, total=10, headline=("sft/loss",), terminal=False):
    out = RichConsole(file=io.StringIO(), force_terminal=terminal, width=120)
    return Tracker(run, settings, "sft", total, headline, start_step, console=out)


def shown(tracker) -> str:
    return tracker._console.out.file.getvalue()


@pytest.fixture
def run(tmp_path):
    with make_run(tmp_path / "run") as run:
        yield run


def test_a_line_holds_stage_split_step_epoch_wall_and_the_numbers(run):
    with make_tracker(run) as tracker:
        tracker.log({"sft/loss": 0.5, "train/tokens": 128}, split="train", step=1, epoch=0.25)
    (row,) = read_lines(run.metrics_path)
    assert row.pop("wall_s") >= 0
    assert row == {"stage": "sft", "split": "train", "step": 1, "epoch": 0.25, "sft/loss": 0.5, "train/tokens": 128}


def test_numbers_of_torch_and_numpy_are_numbers_and_what_is_not_finite_is_null(run):
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    with make_tracker(run) as tracker:
        tracker.log(
            {
                "a": torch.tensor(1.5),
                "b": numpy.float32(2.5),
                "c": float("inf"),
                "d": torch.tensor(float("nan")),
                "e": numpy.int64(3),
            },
            split="train",
            step=1,
            epoch=0.0,
        )
    text = run.metrics_path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    row = json.loads(text)
    assert [row[name] for name in "abcde"] == [1.5, 2.5, None, None, 3]


@pytest.mark.parametrize("metrics", [{"step": 3}, {"sft/loss": "low"}, {"sft/loss": [1.0, 2.0]}])
def test_what_is_no_metric_is_refused_and_not_written(run, metrics):
    with make_tracker(run) as tracker, pytest.raises(ValueError):
        tracker.log(metrics, split="train", step=1, epoch=0.0)
    assert read_lines(run.metrics_path) == []


def test_alarms_are_lines_of_their_own_and_are_cut_back_with_the_rest(run):
    with make_tracker(run) as tracker:
        for step in (2, 5):
            tracker.log_alarm(step, {"alarm": "kl", "value": 40.0})
        tracker.sync()
    assert read_lines(run.alarms_path)[0] == {"stage": "sft", "step": 2, "alarm": "kl", "value": 40.0}
    with make_tracker(run, start_step=4) as tracker:
        assert [row["step"] for row in read_lines(run.alarms_path)] == [2]
        tracker.log_alarm(5, {"alarm": "kl"})
    assert [row["step"] for row in read_lines(run.alarms_path)] == [2, 5]
    with make_tracker(run):  # from the beginning
        assert not run.alarms_path.exists()


def test_resuming_cuts_back_to_the_checkpoint_and_never_doubles(run):
    with make_tracker(run) as tracker:
        tracker.log({"sft/loss": 9.0}, split="eval", step=0, epoch=0.0)
        for step in range(1, 8):
            tracker.log({"sft/loss": float(step)}, split="train", step=step, epoch=step / 10)
            tracker.log_samples(step, [{"prompt": "p", "response": f"r{step}"}])
        tracker.log({"sft/loss": 7.0}, split="eval", step=7, epoch=0.7)
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"stage": "sft", "split": "train", "st')  # killed in the middle of a line
    with make_tracker(run, start_step=4) as tracker:
        for step in range(5, 11):
            tracker.log({"sft/loss": float(step)}, split="train", step=step, epoch=step / 10)
            tracker.log_samples(step, [{"prompt": "p", "response": f"r{step}"}])
    rows = read_lines(run.metrics_path)
    assert [(row["split"], row["step"]) for row in rows] == [("eval", 0), *(("train", step) for step in range(1, 11))]
    assert [row["response"] for row in read_lines(run.samples_path)] == [f"r{step}" for step in range(1, 11)]
    walls = [row["wall_s"] for row in rows]
    assert walls == sorted(walls)


def test_an_evaluation_repeated_at_the_step_of_the_checkpoint_is_written_once(run):
    for start in (0, 4):
        with make_tracker(run, start_step=start) as tracker:
            if start == 0:
                tracker.log({"sft/loss": 4.0}, split="train", step=4, epoch=0.4)
            tracker.log({"sft/loss": 4.5}, split="eval", step=4, epoch=0.4)
    assert [row["split"] for row in read_lines(run.metrics_path)] == ["train", "eval"]


def test_starting_again_from_step_0_keeps_nothing(run):
    for _ in range(2):
        with make_tracker(run) as tracker:
            tracker.log({"sft/loss": 9.0}, split="eval", step=0, epoch=0.0)
            tracker.log_samples(1, [{"prompt": "p"}])
    assert len(read_lines(run.metrics_path)) == 1
    assert len(read_lines(run.samples_path)) == 1


def test_a_killed_process_leaves_every_line_it_logged(tmp_path):
    script = f"""
        import os, signal
        from pathlib import Path
        from accord.track import Tracker, open_run
        run = open_run({{"run": {{}}}}, "sft", Path({str(tmp_path / "run")!r})); run.begin()
        tracker = Tracker(run, {{"tensorboard": False}}, "sft", 10, ["sft/loss"])
        for step in range(1, 6):
            tracker.log({{"sft/loss": 1.0}}, split="train", step=step, epoch=0.0)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True)
    assert done.returncode == -9
    assert [row["step"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_samples_keep_every_language_and_even_broken_characters(run):
    text = "数一数 🍎 مرحبا \ud83d \x00 \u2028 <|im_end|>"
    with make_tracker(run) as tracker:
        tracker.log_samples(3, [{"prompt": [{"role": "user", "content": text}], "score": float("-inf"), "tokens": (1, 2)}])
        tracker.log_samples(3, [])
    (row,) = read_lines(run.samples_path)
    assert row == {"stage": "sft", "step": 3, "prompt": [{"role": "user", "content": text}], "score": None, "tokens": [1, 2]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_every_line_is_one_line_of_valid_json(value):
    line = json_line({"value": value})
    assert len(line.decode("utf-8").splitlines()) == 1 and line.endswith(b"\n")

    def refuse(name):
        raise AssertionError(name)

    json.loads(line.decode("utf-8"), parse_constant=refuse)


def test_tensorboard_shows_every_step_once_after_a_resume(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    board = {"tensorboard": True, "console_every": 1}
    with make_tracker(run, settings=board) as tracker:
        for step in range(1, 8):
            tracker.log({"sft/loss": float(step), "bad": float("nan")}, split="train", step=step, epoch=0.0)
        tracker.log({"sft/loss": 4.0}, split="eval", step=4, epoch=0.0)
    with make_tracker(run, start_step=4, settings=board) as tracker:
        tracker.log({"sft/loss": 4.0}, split="eval", step=4, epoch=0.0)
        for step in range(5, 11):
            tracker.log({"sft/loss": float(step)}, split="train", step=step, epoch=0.0)
    events = EventMultiplexer().AddRunsFromDirectory(str(run.tensorboard)).Reload()
    assert [event.step for event in events.Scalars("train", "sft/loss")] == list(range(1, 11))
    assert [event.step for event in events.Scalars("eval", "sft/loss")] == [4]


def test_a_broken_tensorboard_is_said_once_and_the_run_goes_on(run):
    run.tensorboard.write_text("a file in the way")
    with make_tracker(run, settings={"tensorboard": True}) as tracker:
        for step in (1, 2):
            tracker.log({"sft/loss": 1.0}, split="train", step=step, epoch=0.0)
        assert shown(tracker).count("TensorBoard is off") == 1
    assert len(read_lines(run.metrics_path)) == 2


def test_a_full_disk_is_a_message_with_the_file(run):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    tracker = make_tracker(run)
    tracker._metrics.close()
    tracker._metrics = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 (the tracker closes it)
    with pytest.raises(AccordError, match=r"metrics\.jsonl: cannot write it \(No space left"):
        tracker.log({"sft/loss": 1.0}, split="train", step=1, epoch=0.0)
    tracker.close()


def test_without_a_terminal_there_are_plain_lines_with_the_headline(run):
    with make_tracker(run, settings={"tensorboard": False, "console_every": 2}, total=5) as tracker:
        for step in range(1, 6):
            tracker.log({"sft/loss": 0.25, "other": 1.0}, split="train", step=step, epoch=0.0)
        tracker.log({"sft/loss": 0.5}, split="eval", step=5, epoch=0.0)
        tracker.note("saved [bold]nothing[/bold]")
        lines = shown(tracker).splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["sft 2/5", "sft 4/5", "sft 5/5"]
    assert "loss 0.25" in lines[0] and "other" not in lines[0]
    assert lines[3] == "sft eval at step 5  loss 0.5"
    assert lines[4] == "saved [bold]nothing[/bold]"
    assert "\x1b" not in "".join(lines)


def test_in_a_terminal_there_is_a_bar_with_the_headline(run):
    with make_tracker(run, terminal=True, total=4) as tracker:
        for step in range(1, 5):
            tracker.log({"sft/loss": 0.25}, split="train", step=step, epoch=0.0)
        tracker.note("a note above")
        tracker.close()
        text = shown(tracker)
    assert "4/4" in text and "loss 0.25" in text and "a note above" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (0.693147, "0.6931"), (1e-6, "1.00e-06"), (12345.6, "12,346"), (7, "7"), (-0.5, "-0.5")],
)
def test_numbers_are_shown_for_people(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (62, "1:02"), (3723, "1:02:03"), (90_000, "1d 01:00")])
def test_durations_are_shown_for_people(seconds, text):
    assert duration(seconds) == text


def test_what_goes_on_from_rows_that_were_changed_by_hand_keeps_the_others(run):
    with make_tracker(run) as tracker:
        tracker.log({"sft/loss": 0.5}, split="train", step=1, epoch=0.0)
    good = run.metrics_path.read_text()
    odd = [{"split": "train", "step": step, "wall_s": 1.0} for step in (None, "1", True, -1, 10**30)]
    odd.append({"split": "eval", "step": 1, "wall_s": 10**400})
    run.metrics_path.write_text(good + "".join(json.dumps(row) + "\n" for row in odd) + "[" * 100_000 + "\n")
    with make_tracker(run, start_step=1) as tracker:
        assert tracker.wall_s < 1e6
    assert read_lines(run.metrics_path) == [json.loads(good), odd[-1]]


@pytest.mark.parametrize("start_step", [0, 1])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "alarms.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_named(run, name, start_step):
    (run.folder / name).mkdir()
    with pytest.raises(AccordError, match=f"{name}: cannot write it .*Move away what has its name"):
        make_tracker(run, start_step=start_step)
    assert (run.folder / name).is_dir()
