"""The command line parses, calls one function, and ends with the code that says what happened."""

from __future__ import annotations

import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

from accord import cli
from accord.errors import AccordError, DataError, Interrupted


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the program: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def calls(monkeypatch):
    """Every command's function replaced by one that notes its arguments; `calls.then` is what it does next."""
    noted = types.SimpleNamespace(list=[], then=lambda: None)

    def stand_in(module: str, function: str) -> None:
        def note(*arguments, **keywords):
            noted.list.append((function, arguments, keywords))
            return noted.then()

        fake = sys.modules.get(f"accord.commands.{module}")
        if not isinstance(fake, types.SimpleNamespace):
            fake = types.SimpleNamespace()
            monkeypatch.setitem(sys.modules, f"accord.commands.{module}", fake)
        setattr(fake, function, note)

    for module, function in (
        ("run", "run_pipeline"), ("run", "run_stage"), ("generate", "generate"), ("chat", "chat"), ("score", "score"),
        ("evaluate", "evaluate"), ("data", "check"), ("report", "report"),
    ):  # fmt: skip
        stand_in(module, function)
    return noted


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_a_stage_gets_its_configuration(call, calls, stage):
    code, _, err = call(stage, "ppo", "run.seed=3", "reward_model.path=rm", "data.train=x.jsonl")
    assert (code, err) == (0, "")
    [(function, (name, config, command), _)] = calls.list
    assert command == [
        stage,
        "ppo",
        "run.seed=3",
        "reward_model.path=rm",
        "data.train=x.jsonl",
    ]  # what its workers are started with
    assert (function, name, config.stage, config.run.seed, config.run.dir) == ("run_stage", stage, stage, 3, "runs/ppo")


def test_config_can_be_left_out(call, calls):
    code, _, _ = call("sft", "model.path=m", "data.train=d")
    assert code == 0 and calls.list[0][1][1].run.dir == "runs/sft"


def test_run_takes_stages_and_the_flags_of_deepspeed_chat(call, calls):
    assert call("run", "ppo", "stages=[sft,dpo]", "data.train=x")[0] == 0
    assert calls.list[-1][1][0].pipeline.stages == ("sft", "dpo")
    assert call("run", "ppo", "--actor-model", "big", "--reward-model", "small", "--deployment-type", "single_gpu")[0] == 0
    config = calls.list[-1][1][0]
    assert (config.model.path, config.reward_model.path) == ("big", "small")
    assert (config.launch.type, config.launch.processes) == ("local", 1)
    for kind, expected in (("single_node", ("local", "auto")), ("multi_node", ("ray", 1))):
        assert call("run", "ppo", "--deployment-type", kind)[0] == 0
        launch = calls.list[-1][1][0].launch
        assert (launch.type, launch.processes) == expected
    assert call("run", "ppo", "--deployment-type", "single_node", "launch.processes=2")[0] == 0
    assert calls.list[-1][1][0].launch.processes == 2  # what is written by hand has the last word
    assert call("run", "ppo", "--deployment-type", "gpu")[0] == 2


def test_the_other_commands_hand_their_arguments_on(call, calls):
    assert (
        call(
            "generate",
            "m",
            "--prompts",
            "p.jsonl",
            "--out",
            "o.jsonl",
            "--best-of",
            "4",
            "--judge",
            "runs/rm",
            "generate.temperature=0",
        )[0]
        == 0
    )
    assert call("chat", "m", "--system", "Be brief.", "generate.seed=1")[0] == 0
    assert call("evaluate", "m", "--data", "d", "--metric", "win_rate", "--against", "n", "--judge", "a:b", "--out", "o")[0] == 0
    assert call("score", "rm", "--data", "d.jsonl", "--out", "s.jsonl", "--normalized", "data.truncate=left")[0] == 0
    assert call("report", "runs/x")[0] == 0
    assert [entry[:2] for entry in calls.list] == [
        ("generate", ("m", "p.jsonl", "o.jsonl", ["generate.temperature=0"], 4, "runs/rm")),
        ("chat", ("m", ["generate.seed=1"], "Be brief.")),
        ("evaluate", ("m", "d", "win_rate", "n", "a:b", "o", [])),
        ("score", ("rm", "d.jsonl", "s.jsonl", ["data.truncate=left"], True)),
        ("report", ("runs/x",)),
    ]


def test_data_check_takes_a_configuration_or_a_data_file(call, calls, tmp_path):
    assert call("data", "check", "hh_dpo", "--stage", "dpo", "--examples", "0")[0] == 0
    config, strict, examples = calls.list[-1][1]
    assert (config.stage, strict, examples) == ("dpo", False, 0)
    file = tmp_path / "pairs.jsonl"
    file.write_text("{}")
    calls.then = lambda: 2
    assert call("data", "check", str(file), "--strict")[0] == 2
    assert calls.list[-1][1][0].data.train[0].path == str(file)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dpo", "hh_dpo", "dpo.betta=1"), "command line  dpo.betta: no such key. Did you mean dpo.beta?"),
        (("dpo", "hh_dpo", "more"), "more: expected key=value"),
        (("chat", "m", "hello"), "hello: expected key=value"),
        (("sft", "hh_dop"), "Did you mean hh_dpo?"),
        (("data", "check", "hh_dpo", "--stage", "dpoo"), "Did you mean dpo?"),
        (("generate", "m"), "Missing option"),
        (("nothing",), "No such command"),
        (("chat", "m", "--sytem", "x"), "No such option"),
        (("config", "explain", "dpo.betta"), "Did you mean dpo.beta?"),
        (("config", "show", "hh_dpo", "--stage", "x"), "expected one of sft, reward, dpo, ppo"),
    ],
)
def test_a_wrong_command_line_ends_with_2(call, calls, arguments, words):
    code, out, err = call(*arguments)
    assert code == 2 and words in err and "Traceback" not in err and out == "" and calls.list == []


def raiser(error: BaseException):
    def then():
        raise error

    return then


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (DataError("pairs.jsonl:3  the chosen answer is empty."), 2, "error: pairs.jsonl:3  the chosen answer is empty."),
        (AccordError("the loss is not finite"), 1, "error: the loss is not finite"),
        (Interrupted("saved at step 3"), 130, "saved at step 3"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "x.bin"), 1, "error: the disk is full (x.bin)"),
        (MemoryError(), 1, "Lower train.max_tokens"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), 1, "Lower train.max_tokens"),
        (ValueError("shapes differ"), 1, "error: ValueError: shapes differ"),
    ],
)
def test_what_went_wrong_is_said_and_coded(call, calls, error, code, words):
    calls.then = raiser(error)
    got, _, err = call("report", "x")
    assert got == code and words in err and "Traceback (most" not in err


def test_the_traceback_of_a_surprise_is_in_a_file_or_shown_with_debug(call, calls):
    calls.then = raiser(ValueError("shapes differ"))
    _, _, err = call("report", "x")
    file = Path(err.split("Traceback: ")[1].split(" (or run")[0])
    assert "ValueError: shapes differ" in file.read_text()
    file.unlink()
    code, _, err = call("report", "x", "--debug")
    assert code == 1 and "Traceback (most recent call last)" in err
    calls.then = raiser(DataError("bad row"))
    code, _, err = call("--debug", "report", "x")
    assert code == 2 and "Traceback (most recent call last)" in err and err.rstrip().endswith("error: bad row")


def test_show_schema_explain_and_presets_print(call):
    code, out, _ = call("config", "show", "hh_dpo", "dpo.beta=0.25", "--stage", "dpo")
    assert code == 0 and "beta: 0.25" in out and "dir: runs/hh_dpo" in out
    assert call("config", "schema")[1].startswith("{")
    assert "Strength of the pull" in call("config", "explain", "dpo.beta")[1]
    assert "hh_dpo" in call("config", "presets")[1]


def test_help_lists_what_is_built_and_nothing_else(call):
    code, out, _ = call("--help")
    listed = [line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.startswith("  ")]
    assert code == 0
    assert listed == [
        "run",
        "sft",
        "reward",
        "dpo",
        "ppo",
        "generate",
        "chat",
        "score",
        "evaluate",
        "report",
        "replay",
        "data",
        "config",
    ]


def processor_seconds(*arguments: str) -> float:
    """The best of several tries in a fresh process, in processor time: it waits for nothing, and other work on the machine does not count."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "accord.cli", *arguments], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_answers_in_half_a_second_and_show_in_one():
    assert processor_seconds("--help") < 0.5
    assert processor_seconds("config", "show", "ppo") < 1.0


def test_a_configuration_is_checked_without_heavy_libraries():
    code = (
        "import sys; from accord.config import load_config; import accord.cli; load_config('ppo', ['run.seed=2']).for_stage('ppo');"
        "print([m for m in ('torch', 'transformers', 'datasets', 'peft', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m accord.cli config schema | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{" and done.stderr == ""


def test_sigterm_outside_of_training_ends_with_130(calls):
    program = (
        "import os, signal, sys, types\n"
        "fake = types.ModuleType('accord.commands.report')\n"
        "fake.report = lambda run: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.modules['accord.commands.report'] = fake\n"
        "from accord import cli\n"
        "cli.main(['report', 'x'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and "interrupted" in done.stderr
