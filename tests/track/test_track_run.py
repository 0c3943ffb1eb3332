"""The run folder: what may go on, what is refused, and that nothing is half-written."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from accord.errors import AccordError, ConfigError
from accord.track.run import differing_keys, open_run, read_config, read_summary


def settings(folder: Path, **changes) -> dict:
    """A small configuration in plain data; `changes` are dotted keys with `.` written as `__`."""
    config = {
        "run": {"dir": str(folder), "seed": 1, "resume": "auto", "overwrite": False},
        "model": {"path": "models/起点", "lora": None},
        "train": {"lr": 1e-06, "betas": [0.9, 0.95]},
        "dpo": {"beta": 0.1},
        "ppo": {"kl": {"coef": 0.05}, "rewards": [{"type": "model", "weight": 1.0}]},
        "checkpoint": {"keep_last": 2},
        "track": {"tensorboard": True},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        section = config
        for name in path:
            section = section[name]
        section[last] = value
    return config


def begun(folder: Path, **changes):
    run = open_run(settings(folder, **changes), "dpo", folder)
    run.begin()
    return run


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_looking_at_a_new_folder_writes_nothing(tmp_path):
    run = open_run(settings(tmp_path / "runs" / "a"), "dpo", tmp_path / "runs" / "a")
    assert run.state == "new"
    assert everything_in(tmp_path) == set()


def test_begin_writes_a_configuration_that_says_with_what_and_can_be_read_again(tmp_path):
    with begun(tmp_path / "a"):
        saved = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text(encoding="utf-8"))
        assert saved == settings(tmp_path / "a")
        config, about = read_config(tmp_path / "a")
    assert config == saved
    assert about["stage"] == "dpo"
    assert {"python", "torch", "transformers", "accord"} <= set(about["versions"])
    assert "git" in about


def test_the_same_configuration_goes_on_and_a_finished_one_is_finished(tmp_path):
    begun(tmp_path).close()
    run = open_run(settings(tmp_path), "dpo", tmp_path)
    assert run.state == "resumable"
    run.begin()
    run.finish({"dpo/loss": 0.5, "bad": float("nan"), "文": "完"})
    assert open_run(settings(tmp_path), "dpo", tmp_path).state == "finished"
    assert read_summary(tmp_path) == {"dpo/loss": 0.5, "bad": None, "文": "完"}


def test_another_configuration_is_refused_with_the_keys_that_differ(tmp_path):
    begun(tmp_path).close()
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as refused:
        open_run(settings(tmp_path, dpo__beta=0.2, model__lora={"rank": 8}), "dpo", tmp_path)
    message = str(refused.value)
    assert "\n  dpo.beta is 0.1 there and 0.2 here\n" in message and "What may differ: run.dir, " in message
    assert "model.lora" in message and "run.overwrite=true" in message and "train.lr" not in message
    assert refused.value.exit_code == 2
    assert (tmp_path / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"run__overwrite": False},
        {"track__tensorboard": False},
        {"checkpoint__keep_last": 9},
        {"eval": {"every_steps": 3}},
        {"launch": {"processes": 2}},
        {"ppo__kl": {"coef": 9.0}},
    ],
)
def test_what_changes_no_number_of_the_stage_may_differ(tmp_path, change):
    begun(tmp_path).close()
    assert open_run(settings(tmp_path, **change), "dpo", tmp_path).state == "resumable"


def test_what_an_alarm_does_may_be_changed_on_the_way_and_its_judge_may_not(tmp_path):
    def ppo(**changes):
        return open_run(
            settings(tmp_path) | {"ppo": {"on_alarm": "stop", "judge": None, "alarms": {"kl": 30.0}} | changes}, "ppo", tmp_path
        )

    with ppo() as run:
        run.begin()
    assert ppo(on_alarm="warn", alarms={"kl": 50.0}).state == "resumable"
    with pytest.raises(ConfigError, match=r"ppo\.judge is null there"):
        ppo(judge="my:judge")


@pytest.mark.parametrize("before", [{}, {"ppo": {"ppo": {"on_alarm": "stop"}}}, {"ppo": {"train": {"lr": 1.0}}}])
def test_a_pipeline_goes_on_when_one_stages_alarms_are_changed(tmp_path, before):
    with open_run(settings(tmp_path) | {"stages": before}, "pipeline", tmp_path) as run:
        run.begin()
    after = {"ppo": {**before.get("ppo", {}), "ppo": {"on_alarm": "warn", "alarms": {"kl": 50.0}}}}
    assert open_run(settings(tmp_path) | {"stages": after}, "pipeline", tmp_path).state == "resumable"
    with pytest.raises(ConfigError, match=r"stages\.ppo\.ppo\.clip"):
        open_run(settings(tmp_path) | {"stages": {"ppo": {"ppo": {"clip": 0.1}}}}, "pipeline", tmp_path)


def test_list_items_and_absent_keys_are_named_by_number_and_as_absent(tmp_path):
    old = {"train": {"betas": [0.9, 0.95]}, "data": {"gone": 1}}
    new = {"train": {"betas": [0.9, 0.99]}, "data": {}}
    found = differing_keys(old, new, "sft")
    assert ("train.betas.1", 0.95, 0.99) in found
    assert [(key, repr(now)) for key, _, now in found if key == "data.gone"] == [("data.gone", "absent")]


def test_a_run_that_was_moved_as_a_whole_goes_on(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    begun(old / "dpo", run__dir=str(old), model__path=str(old / "sft" / "model")).close()
    old.rename(new)
    config = settings(new / "dpo", run__dir=str(new), model__path=str(new / "sft" / "model"))
    assert open_run(config, "dpo", new / "dpo").state == "resumable"


def test_a_pipeline_that_was_moved_as_a_whole_goes_on_in_its_stages(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    with open_run(settings(old), "pipeline", old) as pipeline:
        pipeline.begin()
        begun(old / "dpo", model__path=str(old / "sft" / "model")).close()
    old.rename(new)
    assert open_run(settings(new / "dpo", model__path=str(new / "sft" / "model")), "dpo", new / "dpo").state == "resumable"
    with pytest.raises(ConfigError, match=r"another configuration:\n  model\.path"):
        open_run(settings(new / "dpo", model__path=str(tmp_path / "other" / "sft" / "model")), "dpo", new / "dpo")
    (new / "config.yaml").unlink()  # a stage that was started by itself: what lies beside it is not its own
    with pytest.raises(ConfigError, match=r"another configuration:\n  model\.path"):
        open_run(settings(new / "dpo", model__path=str(new / "sft" / "model")), "dpo", new / "dpo")


def test_the_folder_of_another_stage_is_refused(tmp_path):
    begun(tmp_path).close()
    with pytest.raises(ConfigError, match="holds a run of `dpo`, this is `sft`"):
        open_run(settings(tmp_path), "sft", tmp_path)


def test_resume_must_needs_a_run_and_never_needs_none(tmp_path):
    with pytest.raises(ConfigError, match="no run to go on with"):
        open_run(settings(tmp_path / "a", run__resume="must"), "dpo", tmp_path / "a")
    begun(tmp_path / "b").close()
    with pytest.raises(ConfigError, match=r"run\.resume is never"):
        open_run(settings(tmp_path / "b", run__resume="never"), "dpo", tmp_path / "b")


def test_overwriting_replaces_the_run_only_when_it_begins_and_spares_other_files(tmp_path):
    run = begun(tmp_path)
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    run.finish({"x": 1})
    run = open_run(settings(tmp_path, run__overwrite=True, dpo__beta=0.3), "dpo", tmp_path)
    assert run.state == "new"
    assert (tmp_path / "checkpoints" / "step-3").exists() and (tmp_path / "summary.json").exists()
    run.begin()
    assert everything_in(tmp_path) == {"config.yaml", "notes.txt", ".lock"}
    assert read_config(tmp_path)[0]["dpo"]["beta"] == 0.3


def test_a_folder_that_is_no_run_is_never_taken_over(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("somebody's")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"not the folder of a run but has model in it"):
            open_run(settings(tmp_path, run__overwrite=overwrite), "dpo", tmp_path)
    assert (tmp_path / "model" / "weights").read_text() == "somebody's"


def test_a_damaged_configuration_is_named_and_can_be_overwritten(tmp_path):
    begun(tmp_path).close()
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    (tmp_path / "config.yaml").write_text(text[:40], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot read it"):
        open_run(settings(tmp_path), "dpo", tmp_path)
    assert open_run(settings(tmp_path, run__overwrite=True), "dpo", tmp_path).state == "new"


def test_a_file_in_the_way_of_the_folder_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper" / "run"):
        with pytest.raises(ConfigError, match=r"cannot write a run there \(.*file is not a folder\)\. Choose another run\.dir"):
            open_run(settings(folder), "dpo", folder)
    assert everything_in(tmp_path) == {"file"}


def test_a_folder_that_nobody_can_write_to_is_refused(tmp_path):
    unwritable = Path("/proc/accord-run") if os.geteuid() == 0 else tmp_path / "closed" / "run"
    if os.geteuid() != 0:
        unwritable.parent.mkdir(mode=0o500)
    if not unwritable.parent.is_dir():
        pytest.skip("no folder here that root cannot write to")
    with pytest.raises(ConfigError, match="cannot write a run there"):
        open_run(settings(unwritable), "dpo", unwritable)


def test_two_processes_cannot_work_in_one_folder(tmp_path):
    script = f"""
        import sys
        from accord.track.run import open_run
        run = open_run({settings(tmp_path / "a")!r}, "dpo", {str(tmp_path / "a")!r})
        run.begin()
        print("begun", flush=True)
        sys.stdin.read()
    """
    waiting = open_run(settings(tmp_path / "a"), "dpo", tmp_path / "a")  # looked while it was new
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "begun\n"
        with pytest.raises(ConfigError, match=f"another process \\(process {other.pid} on "):
            open_run(settings(tmp_path / "a"), "dpo", tmp_path / "a")
        with pytest.raises(ConfigError, match="another process"):
            waiting.begin()
    finally:
        other.kill()
        other.communicate()
    with pytest.raises(ConfigError, match="has used this folder meanwhile"):
        waiting.begin()
    open_run(settings(tmp_path / "a"), "dpo", tmp_path / "a").begin()  # a killed process holds nothing


def test_one_process_is_told_to_close_its_own_run_first(tmp_path):
    run = begun(tmp_path)
    with pytest.raises(ConfigError, match="this process is already working there"):
        open_run(settings(tmp_path), "dpo", tmp_path)
    run.close()
    open_run(settings(tmp_path), "dpo", tmp_path)


def test_a_pipeline_may_be_asked_for_more_stages_later(tmp_path):
    config = {**settings(tmp_path), "pipeline": {"stages": ["sft"], "judge": None}}
    run = open_run(config, "pipeline", tmp_path)
    run.begin()
    run.close()
    assert open_run({**config, "pipeline": {"stages": ["sft", "dpo"], "judge": None}}, "pipeline", tmp_path).state == "resumable"


def test_overwriting_a_pipeline_removes_its_stages_and_no_other_folder(tmp_path):
    for stage, folder in (("pipeline", tmp_path), ("sft", tmp_path / "sft")):
        with open_run(settings(tmp_path), stage, folder) as run:
            run.begin()
    (tmp_path / "dpo").mkdir()
    (tmp_path / "dpo" / "mine.txt").write_text("not a run's")
    with open_run(settings(tmp_path, run__overwrite=True), "pipeline", tmp_path) as run:
        run.begin()
        assert everything_in(tmp_path) == {"config.yaml", ".lock", "dpo", "dpo/mine.txt"}


def test_what_a_killed_process_was_still_writing_is_swept_away(tmp_path):
    begun(tmp_path).close()
    (tmp_path / ".model.123.tmp").mkdir()
    (tmp_path / ".model.123.tmp" / "weights").write_text("half")
    (tmp_path / ".metrics.jsonl.9.tmp").write_text("half")
    (tmp_path / ".mine.tmp").write_text("not ours")
    with begun(tmp_path):
        assert everything_in(tmp_path) == {"config.yaml", ".lock", ".mine.tmp"}


def test_a_finished_pipeline_that_begins_again_is_unfinished_until_it_ends(tmp_path):
    for state in ("new", "finished"):
        with open_run(settings(tmp_path), "pipeline", tmp_path) as run:
            assert run.state == state
            run.begin()
            assert read_summary(tmp_path) is None
            run.finish({"stages": {}})


def test_a_run_is_known_by_what_its_configuration_says_wherever_it_lies(tmp_path):
    with begun(tmp_path / "a") as first, begun(tmp_path / "b") as other:
        assert first.identity["stage"] == "dpo" and first.identity["id"] != other.identity["id"]
    (tmp_path / "a").rename(tmp_path / "c")
    with begun(tmp_path / "c") as again:
        assert again.identity == first.identity
    with begun(tmp_path / "c", run__overwrite=True) as anew:
        assert anew.identity["id"] != first.identity["id"]


def test_a_damaged_summary_is_loud(tmp_path):
    begun(tmp_path).close()
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(AccordError, match=r"summary\.json: it is damaged"):
        read_summary(tmp_path)


def test_a_summary_that_cannot_be_written_leaves_none(tmp_path, monkeypatch):
    run = begun(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(AccordError, match=r"summary\.json: cannot write it \(No space left on device\)"):
        run.finish({"x": 1})
    assert everything_in(tmp_path) == {"config.yaml", ".lock"}
    run.close()
