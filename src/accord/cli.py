"""The command line: it parses, calls one function of `commands/`, and turns errors into messages and exit codes.

Exit codes: 0 done, 1 the run failed, 2 the configuration or the data is wrong, 130 interrupted. Heavy libraries are imported by
the commands, so that `accord --help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from accord.errors import AccordError, ConfigError, Interrupted, PeerLost
from accord.launch.environment import ERROR_FILE

app = typer.Typer(
    name="accord",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a language model to follow people's preferences: SFT, reward model, PPO or DPO.\n\n"
    "CONFIG is a YAML file or a preset's name; key=value are dotted overrides (dpo.beta=0.2). MODEL is a model folder, a hub id or "
    "a run. `accord config explain` lists every key.",
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at the data before training on it.")
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, check and explain configurations.")
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")

ConfigArgument = Annotated[str | None, typer.Argument(metavar="CONFIG", help="A YAML file or a preset.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, such as train.lr=1e-5.", show_default=False)
]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a hub id, a .gguf file or a run.", show_default=False)
]


def split_config(first: str | None, rest: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """A first argument without `=` is the CONFIG, everything else is an override."""
    given = [*([first] if first is not None else []), *(rest or [])]
    config = given.pop(0) if given and "=" not in given[0] else None
    for text in given:
        if "=" not in text:
            raise ConfigError(
                f"command line  {text}: expected key=value, such as dpo.beta=0.2 (CONFIG comes first, and only one)."
            )
    return config, given


# ------------------------------------------------------------------------------------------------------------------------ training


DEPLOYMENT_TYPES = {
    "single_gpu": ["launch.type=local", "launch.processes=1"],
    "single_node": ["launch.type=local", "launch.processes=auto"],
    "multi_node": ["launch.type=ray", "launch.processes=1"],
}


def _deployment_overrides(actor_model: str | None, reward_model: str | None, deployment_type: str | None) -> list[str]:
    """DeepSpeed-Chat's flags in our keys."""
    if deployment_type not in (None, *DEPLOYMENT_TYPES):
        raise ConfigError(f"--deployment-type {deployment_type}: expected one of {', '.join(DEPLOYMENT_TYPES)}.")
    named = (("model.path", actor_model), ("reward_model.path", reward_model))
    return [*DEPLOYMENT_TYPES.get(deployment_type or "", []), *(f"{key}={value}" for key, value in named if value is not None)]


@app.command(short_help="All stages in a row: sft → reward → ppo (or dpo).")
def run(
    context: typer.Context,
    config: ConfigArgument = None,
    overrides: Overrides = None,
    actor_model: Annotated[str | None, typer.Option(help="Short for model.path=…", metavar="MODEL", show_default=False)] = None,
    reward_model: Annotated[
        str | None, typer.Option(help="Short for reward_model.path=…", metavar="MODEL", show_default=False)
    ] = None,
    deployment_type: Annotated[
        str | None,
        typer.Option(help="single_gpu, single_node (all its GPUs) or multi_node (Ray).", metavar="TYPE", show_default=False),
    ] = None,
) -> int:
    """All stages: sft → reward → ppo (or dpo); any subset with stages=[…]. Finished stages are not redone."""
    name, changes = split_config(config, overrides)
    from accord.config import load_config

    flags = _deployment_overrides(actor_model, reward_model, deployment_type)
    loaded = load_config(name, [*flags, *changes], pipeline=True)
    from accord.commands.run import run_pipeline

    return run_pipeline(loaded, context.obj)


def _run_stage(stage: str, context: typer.Context, first: str | None, rest: Sequence[str] | None) -> int:
    config, overrides = split_config(first, rest)
    from accord.config import load_config

    loaded = load_config(config, overrides, stage=stage)
    from accord.commands.run import run_stage

    return run_stage(stage, loaded, context.obj)


@app.command()
def sft(context: typer.Context, config: ConfigArgument = None, overrides: Overrides = None) -> int:
    """Supervised fine-tuning on demonstrations."""
    return _run_stage("sft", context, config, overrides)


@app.command()
def reward(context: typer.Context, config: ConfigArgument = None, overrides: Overrides = None) -> int:
    """Train a reward model on pairs, rankings or scores."""
    return _run_stage("reward", context, config, overrides)


@app.command(short_help="Learn from preferences without a reward model.")
def dpo(context: typer.Context, config: ConfigArgument = None, overrides: Overrides = None) -> int:
    """Direct preference optimisation: learn from preferences without a reward model."""
    return _run_stage("dpo", context, config, overrides)


@app.command()
def ppo(context: typer.Context, config: ConfigArgument = None, overrides: Overrides = None) -> int:
    """Reinforcement learning against a reward model or a function."""
    return _run_stage("ppo", context, config, overrides)


# ------------------------------------------------------------------------------------------------------------------- using a model


@app.command(short_help="Answer a file of prompts.")
def generate(
    model: ModelArgument,
    prompts: Annotated[
        str, typer.Option(help="Prompts in any format (json, jsonl, csv, txt, …).", metavar="FILE", show_default=False)
    ],
    out: Annotated[
        str, typer.Option(help="One JSON object a line, in the order of the input.", metavar="FILE", show_default=False)
    ],
    overrides: Overrides = None,
    best_of: Annotated[
        int | None,
        typer.Option(help="Answer each prompt so often and keep the best by --judge.", metavar="N", show_default=False),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="A reward model, or module:function, for --best-of.", metavar="JUDGE", show_default=False)
    ] = None,
) -> None:
    """Answer a file of prompts. Started again, it goes on where it stopped."""
    from accord.commands.generate import generate as command

    command(model, prompts, out, _only_overrides(overrides), best_of, judge)


@app.command(short_help="Talk with a model in the terminal.")
def chat(
    model: ModelArgument,
    overrides: Overrides = None,
    system: Annotated[str | None, typer.Option(help="A system message.", metavar="TEXT", show_default=False)] = None,
) -> None:
    """Talk with a model in the terminal (/clear starts anew, /quit ends)."""
    from accord.commands.chat import chat as command

    command(model, _only_overrides(overrides), system)


@app.command(short_help="A reward model's scores of a file of answers.")
def score(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A reward model: folder, hub id or run.", show_default=False)],
    data: Annotated[
        str,
        typer.Option(help="Answers, pairs or rankings with their prompts, in any format.", metavar="FILE", show_default=False),
    ],
    out: Annotated[
        str,
        typer.Option(
            help="One JSON object a line, in the order of the input: prompt, response, score. A pair gives two, the chosen answer "
            "first, with their role; a ranking one for each answer, with its rank.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    normalized: Annotated[
        bool,
        typer.Option(
            "--normalized",
            help="Scores with mean 0 and deviation 1 on the answers held out when the model was trained.",
        ),
    ] = False,
) -> None:
    """Score a file of answers with a reward model. Started again, it goes on where it stopped.

    Each text is read alone: its score depends on nothing else in the file. train.max_tokens=8192 reads texts together, up to that many
    tokens at a time: faster on a GPU and for pairs, and equal but for rounding.
    """
    from accord.commands.score import score as command

    command(model, data, out, _only_overrides(overrides), normalized)


@app.command(short_help="Perplexity, reward accuracy or win rate.")
def evaluate(
    model: ModelArgument,
    data: Annotated[str, typer.Option(help="Rows to evaluate on, in any format.", metavar="FILE", show_default=False)],
    metric: Annotated[str, typer.Option(help="perplexity, reward_accuracy or win_rate.", metavar="NAME", show_default=False)],
    overrides: Overrides = None,
    against: Annotated[str | None, typer.Option(help="win_rate: the other model.", metavar="MODEL", show_default=False)] = None,
    judge: Annotated[
        str | None, typer.Option(help="win_rate: module:function or a reward model.", metavar="JUDGE", show_default=False)
    ] = None,
    out: Annotated[str | None, typer.Option(help="Also write the numbers as JSON.", metavar="FILE", show_default=False)] = None,
) -> None:
    """Measure a model: perplexity, a reward model's accuracy, or how often it wins against another."""
    from accord.commands.evaluate import evaluate as command

    command(model, data, metric, against, judge, out, _only_overrides(overrides))


@app.command(short_help="One HTML file: curves, samples, time.")
def report(run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)]) -> None:
    """Write RUN/report.html: curves, samples, time, in one file."""
    from accord.commands.report import report as command

    command(run)


@app.command(short_help="Compute a PPO step again and compare it with the log.")
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a PPO run, finished or not.", show_default=False)],
    step: Annotated[int, typer.Option(help="The step.", metavar="N", min=1, show_default=False)],
    tolerance: Annotated[float, typer.Option(help="How far two numbers may differ, as a share of the larger one.", min=0)] = 1e-5,
    worst: Annotated[
        int, typer.Option(help="Show so many answers with the largest advantage, and with the largest KL.", min=0)
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute a step of PPO again, from the checkpoint before it and RUN/journal.jsonl, and say where it differs from the log.

    Nobody is asked for scores again, and RUN is only read. Exit code 0: every metric is equal, 1: some differ.
    """
    from accord.commands.replay import replay as command

    code: Any = command(run, step, tolerance, worst, as_json)
    if code:
        raise typer.Exit(code)


def _only_overrides(arguments: Sequence[str] | None) -> list[str]:
    config, overrides = split_config(None, arguments)
    if config is not None:
        raise ConfigError(f"command line  {config}: expected key=value, such as generate.temperature=0.")
    return overrides


# ------------------------------------------------------------------------------------------------------------------ data and config


@data_app.command("check", short_help="Counts, drops, lengths, duplicates, examples.")
def data_check(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    stage: Annotated[str | None, typer.Option(help="Check as this stage reads it.", metavar="STAGE", show_default=False)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings too end with exit code 2.")] = False,
    examples: Annotated[int, typer.Option(help="How many examples to show with their loss mask.", min=0)] = 3,
) -> None:
    """Counts, what is dropped and why, lengths, duplicates, and examples with the loss mask in colour. CONFIG may be a data file."""
    name, changes = split_config(config, overrides)
    if name is not None and Path(name).exists() and Path(name).suffix not in (".yaml", ".yml"):
        name, changes = None, [f"data.train={name}", *changes]
    from accord.commands.config import known_stage
    from accord.config import load_config

    loaded = load_config(name, changes)
    if stage is not None:
        loaded = loaded.for_stage(known_stage(stage))
    from accord.commands.data import check

    code: Any = check(loaded, strict, examples)
    if isinstance(code, int) and code:
        raise typer.Exit(code)


@config_app.command("show")
def config_show(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    stage: Annotated[str | None, typer.Option(help="As this stage sees it.", metavar="STAGE", show_default=False)] = None,
) -> None:
    """Print the resolved configuration as YAML."""
    from accord.commands.config import show

    show(*split_config(config, overrides), stage)


@config_app.command("schema")
def config_schema() -> None:
    """Print JSON Schema for editors."""
    from accord.commands.config import schema

    schema()


@config_app.command("explain")
def config_explain(
    key: Annotated[
        str,
        typer.Argument(metavar="[KEY]", help="A key or a section, e.g. dpo.beta; without it, all sections.", show_default=False),
    ] = "",
) -> None:
    """Say what a key means, what it may be, and its default."""
    from accord.commands.config import explain

    explain(key)


@config_app.command("presets")
def config_presets() -> None:
    """List the shipped recipes."""
    from accord.commands.config import presets

    presets()


# ----------------------------------------------------------------------------------------------------------------------- exit codes


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: run a command, print what went wrong, exit with the code that says it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, _terminated)
    debug = "--debug" in given
    sys.exit(guarded(lambda: _invoke([text for text in given if text != "--debug"], given), debug=debug))


def _terminated(number: int, frame: Any) -> None:
    """SIGTERM before or after training is what Ctrl-C is: exit code 130. While it trains, the loop answers it."""
    raise KeyboardInterrupt


def _invoke(arguments: list[str], given: list[str]) -> int:
    result = app(args=arguments, prog_name="accord", standalone_mode=False, obj=given)  # what a worker is started with
    if result == 130:  # what typer makes of Ctrl-C
        _say("interrupted")
    return result if isinstance(result, int) else 0


def guarded(command: Callable[[], int], *, debug: bool = False) -> int:
    """Run `command`; the exit code of what happened, its message on stderr. With `debug` an unexpected error shows its traceback."""
    try:
        return command()
    except AccordError as error:
        if debug:
            _traceback(error)
        _say(str(error) if isinstance(error, Interrupted) else f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`accord config show | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        code = _usage(error)
        if code is not None:
            return code
        if debug:
            _traceback(error)
            if ERROR_FILE not in os.environ:  # the parent of a worker wants its message too
                return 1
        return _unexpected(error)


def _traceback(error: Exception) -> None:
    import traceback

    traceback.print_exception(error)


def _say(text: str) -> None:
    """The last words: on stderr, or in the file that the parent of a worker reads (launch/)."""
    path = os.environ.get(ERROR_FILE)
    with open(path, "a", encoding="utf-8") if path else nullcontext(sys.stderr) as file:
        print(text.replace("\n", "\n       "), file=file)


def _usage(error: Exception) -> int | None:
    """The exit code of an error of the command line itself (click's exceptions, known by their methods), after showing it."""
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if callable(show) and isinstance(code, int):
        show()
        return code
    return code if type(error).__name__ == "Exit" and isinstance(code, int) else None


def _unexpected(error: Exception) -> int:
    """One line for a person, the traceback in a file for the one who mends it."""
    import errno
    import tempfile
    import traceback

    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _say(f"error: the disk is full ({error.filename or 'while writing'}). Free some space and start the same command again.")
        return 1
    what = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        _say(
            "error: out of memory. Lower train.max_tokens, or set model.gradient_checkpointing=true or model.lora={}, and start again."
        )
    else:
        _say(f"error: {type(error).__name__}: {what}" if what else f"error: {type(error).__name__}")
    try:
        with tempfile.NamedTemporaryFile("w", prefix="accord-traceback-", suffix=".txt", delete=False, encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        _say(f"       This is not a mistake of yours that we know of. Traceback: {file.name} (or run again with --debug).")
    except OSError:
        traceback.print_exception(error)
    return PeerLost.exit_code if os.environ.get(ERROR_FILE) else 1  # it may be what a lost connection looks like


if __name__ == "__main__":
    main()
