"""The report: it is written for finished, unfinished, broken and strange runs, and shows what a reader looks for."""

import json
import os
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from accord.commands.report import report
from accord.errors import AccordError, UserError
from accord.track import open_run
from accord.track.metrics import charts_of, read_series
from accord.track.report import find_stages, judge_table, read_stage, remarks, samples_view, tiles, time_split, write_report


def make_run(folder: Path, stage: str, rows: list[dict], samples: list[dict] = (), summary: dict | None = None) -> Path:
    run = open_run(
        {"run": {"dir": str(folder)}, "model": {"path": "base <model>"}, "pipeline": {"stages": ["sft", "ppo"]}}, stage, folder
    )
    run.begin()
    base = {"stage": stage, "epoch": 0.0}
    run.metrics_path.write_text(
        "".join(json.dumps({**base, "wall_s": 2.0 * row["step"], **row}) + "\n" for row in rows), encoding="utf-8"
    )
    if samples:
        run.samples_path.write_text(
            "".join(json.dumps({"stage": stage, **sample}, ensure_ascii=False) + "\n" for sample in samples), encoding="utf-8"
        )
    if summary is not None:
        run.finish(summary)
    run.close()
    return folder


def ppo_rows(steps: int = 30) -> list[dict]:
    train = [
        {
            "split": "train",
            "step": step,
            "ppo/score": step / steps,
            "ppo/kl": 0.2 * step,
            "ppo/eos_rate": 0.9,
            "time/generate": 3.0,
            "time/train": 1.0,
            "time/step": 4.5,
            "train/lr": 1e-5,
            "ppo/response_length": 20 + step,
            "ppo/response_length/min": 2,
            "ppo/response_length/max": 60,
        }
        for step in range(1, steps + 1)
    ]
    return [{"split": "eval", "step": 0, "ppo/score": -1.0}, *train, {"split": "eval", "step": steps, "ppo/score": 1.5}]


class Page(HTMLParser):
    """Checks that tags are balanced and collects the text, the ids and what would be loaded from elsewhere."""

    VOID = {"meta", "link", "br", "img", "hr", "input"}

    def __init__(self, html: str):
        super().__init__()
        self.open, self.text, self.ids, self.loads = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self._note(tag, dict(attributes))

    def handle_startendtag(self, tag, attributes):
        self._note(tag, dict(attributes))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def _note(self, tag, attributes):
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag in ("script", "link", "iframe", "object", "img") or str(attributes.get("src", "")).strip():
            self.loads.append((tag, attributes))


def page(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_a_ppo_run_shows_its_curves_kl_against_reward_time_and_samples(tmp_path, capsys):
    samples = [
        {"step": step, "prompt": f"问题 {i}", "response": f"回答 {step} 😊", "score": step / 30}
        for step in (1, 30)
        for i in range(4)
    ]
    folder = make_run(tmp_path / "p", "ppo", ppo_rows(), samples, {"ppo/score": 1.5})
    report(str(folder))
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    text = " ".join(page(folder).text)
    for expected in (
        "ppo/score",
        "ppo/kl",
        "KL against reward",
        "Where the time went",
        "generate",
        "问题 2",
        "回答 30 😊",
        "finished",
        "held-out",
    ):
        assert expected in text, expected


def test_alarms_are_marked_and_the_score_stands_beside_the_judge(tmp_path):
    rows = [
        row | ({"ppo/judge": 0.6 - row["step"] / 100, "ppo/judge_error": 0.02} if row["split"] == "eval" else {})
        for row in ppo_rows()
    ]
    folder = make_run(tmp_path / "p", "ppo", rows, summary={})
    plain = write_report(folder).read_text()
    text = " ".join(Page(plain).text)
    assert "against the held-out judge" in text and "Alarms" not in text and "judge error" not in text
    alarms = [
        {"stage": "ppo", "step": 12, "alarm": "kl", "text": "kl: too far <away>", "action": "lower_lr", "lr_factor": 0.5},
        {"stage": "ppo", "step": 20, "alarm": "explained_variance", "text": "only a note"},
        *({"stage": "ppo", "step": 21 + i % 9, "alarm": "judge", "text": f"fooled {i}", "action": "stop"} for i in range(12)),
    ]
    (folder / "alarms.jsonl").write_text("".join(json.dumps(alarm) + "\n" for alarm in alarms) + '{"torn')
    marked = write_report(folder).read_text()
    text = " ".join(Page(marked).text)
    for expected in (
        "step 12",
        "kl: too far <away>",
        "(learning rates lowered to 0.5 of the schedule's)",
        "only a note",
        "fooled 9",
        "(the run was stopped)",
        "2 more in alarms.jsonl",
        "Crosses are alarms",
    ):
        assert expected in text, expected
    assert "fooled 10" not in text
    assert marked.count("#c92a2a") > plain.count("#c92a2a") + 3  # lines on the curves of KL and judge, crosses on the frontier


def test_the_curves_of_ppo_come_in_the_order_in_which_they_are_read(tmp_path):
    names = (
        "ppo/explained_variance",
        "ppo/entropy",
        "ppo/repetition",
        "ppo/eos_rate",
        "ppo/response_length",
        "ppo/kl",
        "ppo/judge",
        "ppo/score/a",
        "ppo/score/b",
        "ppo/score",
    )
    rows = [{"split": "train", "step": step, "ppo/clip_fraction": 0.1} | dict.fromkeys(names, float(step)) for step in (1, 2)]
    curves = read_series(make_run(tmp_path / "p", "ppo", rows) / "metrics.jsonl")
    assert [metrics for _, metrics in charts_of("ppo", curves)] == [
        ("ppo/score", "ppo/score/a", "ppo/score/b"), ("ppo/judge",), ("ppo/kl",), ("ppo/response_length",), ("ppo/eos_rate",),
        ("ppo/repetition",), ("ppo/entropy",), ("ppo/explained_variance",), ("ppo/clip_fraction",),
    ]  # fmt: skip


def test_the_page_is_self_contained_and_its_ids_are_unique(tmp_path):
    found = page(make_run(tmp_path / "p", "ppo", ppo_rows(), summary={}))
    assert found.loads == []
    assert len(found.ids) == len(set(found.ids))


def test_text_of_a_run_is_never_markup(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=y>"
    samples = [{"step": 1, "prompt": [{"role": "user", "content": evil}], "response": evil, evil: evil[:30]}]
    folder = make_run(
        tmp_path / "p<b>",
        "ppo",
        [*ppo_rows(), {"split": "train", "step": 31, evil: 1.0}, {"split": "train", "step": 32, evil: 2.0}],
        samples,
    )
    found = page(folder)
    assert found.loads == [] and evil in " ".join(found.text)


def test_an_unfinished_run_with_a_torn_line_and_missing_numbers_has_a_report(tmp_path):
    folder = make_run(
        tmp_path / "p", "sft", [{"split": "train", "step": s, "sft/loss": None if s == 2 else 1.0 / s} for s in range(1, 6)]
    )
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"torn')
    text = " ".join(page(folder).text)
    assert (
        "not finished" in text
        and "last line is of step 5" in text
        and "1 step(s) have numbers that are not finite (step 2)" in text
    )


@pytest.mark.parametrize(
    "rows", [[], [{"split": "train", "step": 1, "x": None}], [{"split": "eval", "step": 0, "sft/loss": 1.0}]]
)
def test_a_run_with_hardly_any_numbers_has_a_report(tmp_path, rows):
    assert page(make_run(tmp_path / "p", "sft", rows)).text


def test_a_long_run_has_a_small_report(tmp_path):
    rows = [{"split": "train", "step": s, "sft/loss": 1.0 + (s * 7919 % 1000) / 1000} for s in range(1, 20_001)]
    assert write_report(make_run(tmp_path / "p", "sft", rows)).stat().st_size < 150_000


def test_the_report_of_the_same_run_has_the_same_curves(tmp_path):
    folder = make_run(tmp_path / "p", "ppo", ppo_rows())
    first, second = (re.findall(r"<svg.*?</svg>", write_report(folder).read_text(), re.S) for _ in range(2))
    assert first == second and len(first) >= 4


def test_a_pipeline_shows_its_stages_in_order_with_the_judged_scores(tmp_path):
    root = tmp_path / "quick"
    config = {"run": {"dir": str(root)}, "pipeline": {"stages": ["sft", "ppo"]}}
    pipeline = open_run(config, "pipeline", root)
    pipeline.begin()
    make_run(root / "ppo", "ppo", ppo_rows(), summary={})
    make_run(root / "sft", "sft", [{"split": "train", "step": 1, "sft/loss": 1.0}], summary={})
    (root / "samples.jsonl").write_text(
        "".join(
            json.dumps({"stage": stage, "prompt": "1 + 1?", "response": f"{stage} says 2", "score": 1}) + "\n"
            for stage in ("sft", "ppo")
        )
    )
    pipeline.finish({"judge": {"sft": 0.41, "ppo": 0.78}})
    found = page(root)
    text = " ".join(found.text)
    assert "0.410" in text and "0.780" in text and "sft says 2" in text and "Time by stage" in text
    assert found.ids.index("sft") < found.ids.index("ppo")


def test_judged_details_show_every_language_and_what_it_cost():
    table = judge_table(
        {
            "sft": {"score": 0.4, "by_language": {"en": 0.5, "zh": 0.3}, "kl": 0.0},
            "ppo": {"score": 0.8, "by_language": {"en": 0.9}, "kl": 4.0},
        }
    )
    assert table["columns"] == ["en", "zh", "kl"]
    assert [(row["value"], row["cells"]) for row in table["rows"]] == [
        ("0.400", ["0.5", "0.3", "0"]),
        ("0.800", ["0.9", "–", "4"]),
    ]


def test_a_folder_without_a_run_is_refused_and_left_alone(tmp_path):
    with pytest.raises(UserError, match=r"no run is there .looked for metrics\.jsonl"):
        report(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError):
        report(str(tmp_path / "empty"))
    assert list((tmp_path / "empty").iterdir()) == []


def test_headline_numbers_are_the_held_out_ones_and_say_if_they_became_better(tmp_path):
    shown = {tile["name"]: tile for tile in tiles(read_stage(make_run(tmp_path / "p", "ppo", ppo_rows())))}
    assert (shown["score"]["value"], shown["score"]["before"], shown["score"]["trend"]) == ("1.5", "-1", "better")
    assert shown["score"]["split"] == "held-out" and shown["kl"]["split"] == "training"
    assert shown["kl"]["trend"] == ""


def test_the_time_split_adds_up_to_the_steps(tmp_path):
    split = time_split(read_stage(make_run(tmp_path / "p", "ppo", ppo_rows())))
    assert [part["name"] for part in split["parts"]] == ["generate", "train", "not named"]
    assert sum(part["share"] for part in split["parts"]) == pytest.approx(100, abs=0.1)
    assert (split["per_step"], split["steps"]) == ("4.5", 30)


def test_responses_that_are_cut_are_pointed_out(tmp_path):
    rows = [{"split": "train", "step": s, "ppo/eos_rate": 0.2, "ppo/repetition": 0.5 if s > 5 else 0.05} for s in range(1, 11)]
    found = " ".join(remarks(read_stage(make_run(tmp_path / "p", "ppo", rows, summary={}))))
    assert "Only 20% of the last responses" in found and "Repetition rose" in found


def test_the_spread_and_what_belongs_together_share_one_chart(tmp_path):
    rows = [
        {
            "split": "train",
            "step": 1,
            "train/lr": 1.0,
            "dpo/rejected_reward": 0.0,
            "dpo/chosen_reward": 1.0,
            "dpo/chosen_reward/min": 0.5,
            "dpo/chosen_reward/max": 2.0,
            "dpo/loss": 1.0,
        }
    ]
    curves = read_series(make_run(tmp_path / "p", "dpo", rows) / "metrics.jsonl")
    assert charts_of("dpo", curves) == [
        ("dpo", ("dpo/loss",)),
        ("dpo", ("dpo/chosen_reward", "dpo/rejected_reward")),
        ("train", ("train/lr",)),
    ]
    assert curves["dpo/chosen_reward"]["train"].high == [2.0]


def test_samples_of_the_same_prompts_stand_side_by_side_and_others_in_two_lists():
    same = [{"step": s, "prompt": p, "response": f"{p}{s}"} for s in (1, 5, 9) for p in "abc"]
    view = samples_view(same)
    assert [(pair["prompt"], pair["before"]["response"], pair["after"]["response"]) for pair in view["pairs"]] == [
        (p, f"{p}1", f"{p}9") for p in "abc"
    ]
    assert view["before"] == view["after"] == []
    few = samples_view([{"step": s, "prompt": p, "response": f"{p}{s}"} for s, p in ((1, "a"), (1, "b"), (9, "a"), (9, "c"))])
    assert [pair["prompt"] for pair in few["pairs"]] == ["a"] and [s["prompt"] for s in few["before"]] == ["a", "b"]
    other = samples_view([{"step": s, "prompt": f"p{s}{i}", "response": "r"} for s in (1, 9) for i in range(3)])
    assert other["pairs"] == [] and len(other["before"]) == len(other["after"]) == 3
    assert samples_view([]) is None


@pytest.mark.parametrize(
    ("judge", "names"),
    [
        ({"sft": 0.4, "ppo": 0.8}, ["sft", "ppo"]),
        ({"sft": {"score": 0.4, "kl": 1.0}}, ["sft"]),
        ({}, None),
        ("odd", None),
        ({"sft": None}, None),
    ],
)
def test_judged_scores_may_be_numbers_or_tables(judge, names):
    table = judge_table(judge)
    assert (table and [row["name"] for row in table["rows"]]) == names


def test_the_same_run_gives_the_same_page_at_any_time(tmp_path):
    folder = make_run(tmp_path / "run", "ppo", ppo_rows())
    os.utime(folder / "metrics.jsonl", (0, 978_350_400))  # a day in 2001
    page = write_report(folder).read_text(encoding="utf-8")
    assert f"numbers until {datetime.fromtimestamp(978_350_400).astimezone():%Y-%m-%d %H:%M}" in page


DEEP = "[" * 100_000 + "]" * 100_000
ODD_ROWS = {
    "metrics.jsonl": [
        {"split": "train", "step": "x", "ppo/kl": 1.0},
        {"split": "train", "step": None, "ppo/kl": 1.0},
        {"split": "train", "ppo/kl": 1.0},
        {"split": "train", "step": True, "ppo/kl": 1.0},
        {"split": "train", "step": -1, "ppo/kl": 1.0},
        {"split": "train", "step": 10**30, "ppo/kl": 1.0},
        {"split": "train", "step": 31, "ppo/kl": 10**400, "ppo/score": 1e308, "wall_s": 10**400, "time/step": 10**400},
        {"split": "train", "step": 32, "ppo/kl": float("nan"), "ppo/score": "text", "wall_s": float("nan"), "time/step": [1]},
        DEEP,
    ],
    "samples.jsonl": [
        {"step": 10**30, "prompt": 5, "response": ["a"], "score": 10**400},
        {"step": "x", "prompt": {"messages": 7}, "score": float("nan")},
        DEEP,
    ],
    "alarms.jsonl": [
        {"step": 2, "alarm": "kl", "action": "lower_lr", "lr_factor": factor} for factor in ("x", None, [1], 10**400)
    ]
    + [{"step": "x", "alarm": "kl"}, {"step": 10**30, "alarm": "kl"}, {"step": 3, "alarm": ["a"]}, DEEP],
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_ROWS)
def test_rows_changed_by_hand_spoil_no_page_and_no_other_number(tmp_path, name):
    folder = make_run(tmp_path / "p", "ppo", ppo_rows())
    before = read_series(folder / "metrics.jsonl")["ppo/kl"]["train"].finite
    rows = (folder / name).read_text() if (folder / name).exists() else ""
    rows += "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in ODD_ROWS[name])
    (folder / name).write_text(rows)
    assert "ppo/kl" in " ".join(page(folder).text)
    assert read_series(folder / "metrics.jsonl")["ppo/kl"]["train"].finite == before
    (stage,) = find_stages(folder)
    assert (stage.wall_s, stage.last_step) == (60.0, 32 if name == "metrics.jsonl" else 30)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "alarms.jsonl"])
def test_a_folder_in_the_place_of_a_log_is_named(tmp_path, name):
    folder = make_run(tmp_path / "p", "ppo", ppo_rows())
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(UserError, match=f"{name}: cannot read it \\(Is a directory"):
        write_report(folder)


@pytest.mark.parametrize("content", ["", "[]", "5", DEEP, None])
def test_a_summary_that_is_none_is_named(tmp_path, content):
    folder = make_run(tmp_path / "p", "ppo", ppo_rows())
    if content is None:
        (folder / "summary.json").mkdir()
    else:
        (folder / "summary.json").write_text(content)
    with pytest.raises(AccordError, match=r"summary\.json: it is damaged"):
        write_report(folder)


@pytest.mark.parametrize("section", ["model", "pipeline"])
def test_a_section_of_another_kind_leaves_the_page(tmp_path, section):
    folder = make_run(tmp_path / "p", "ppo", ppo_rows())
    head, body = (folder / "config.yaml").read_text().split("\n", 1)
    (folder / "config.yaml").write_text(f"{head}\n{yaml.safe_dump({**yaml.safe_load(body), section: 5})}")
    assert "ppo/kl" in " ".join(page(folder).text)
