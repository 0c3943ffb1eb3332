"""Kill training runs at random moments until they are through, and compare what they leave with an undisturbed run: the same bytes.

    python scripts/torture.py                            20 kills of each stage, about half an hour
    python scripts/torture.py --stages ppo --kills 100 --seed 7 --processes 2
    python scripts/torture.py --processes 4 --settings launch.mesh.tensor=2

A run is started as its command line is, killed with SIGKILL while it loads, trains, samples, evaluates, saves or exports, and started again
with the same command. Once it is finished, its models, averages and exports, its metrics (every step once) and its samples are compared.
Of several processes now and then only one is killed: the others must end by themselves. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import accord.pipeline  # here, once: every life is a fork of this process and has its libraries already
import accord.trainers.ppo
import accord.trainers.preference
import accord.trainers.reward
import accord.trainers.sft  # noqa: F401
from accord import cli
from accord.demo import base_path
from accord.engine.generate.native import kernels

STAGES = ("sft", "reward", "dpo", "ppo")
MODELS = ("model", "ema", "critic", "best", "exports")
TIMES = ("wall_s", "time/", "memory/", "throughput/", "train/tokens_per_s", "peak_memory_gib")
MOMENTS = ("anywhere", "training", "training", "writing", "saving", "saving")
LIFE = 900  # seconds after which a process that should have ended hangs
OTHERS = 60  # … and those whose partner is gone
_fork = multiprocessing.get_context("fork")


def tiny_model(folder: Path) -> Path:
    """A random model of two small layers with the demo's tokenizer."""
    shutil.copytree(base_path(), folder)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.from_pretrained(folder, head_dim=16, dtype="float32", **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def command(stage: str, model: Path, run: Path, steps: int) -> list[str]:
    """The command line of a stage, with everything that has state: EMA, best model, exports, PPO's KL controller, moments and PTX."""
    rows = {"sft": "demo:sft", "reward": "demo:preferences", "dpo": "demo:preferences", "ppo": "demo:prompts"}[stage]
    settings: dict[str, Any] = {
        "run.dir": str(run),
        "model.path": str(model),
        "data.train": [{"path": rows, "max_rows": 60}],
        "data.holdout": 0.15,
        "data.max_length": 256,
        "train": {"batch_size": 8, "max_tokens": 1024, "max_steps": steps, "epochs": 100, "lr": 1e-3, "ema_decay": 0.9},
        "eval": {"every_steps": 3, "every_epochs": None},
        "export": {"every_steps": 4},
        "checkpoint": {"every_steps": 1, "every_seconds": None},
        "track": {"tensorboard": False, "samples_every": 1, "console_every": 1000},
    }
    if stage == "ppo":
        settings |= {
            "train.batch_size": 4,
            "generate.max_new_tokens": 24,
            "critic": {"lr": 1e-3, "warmup_steps": 1},
            "ppo": {
                "samples_per_prompt": 2, "mini_batches": 2, "normalize_score": True, "ptx_coef": 0.5,
                "ptx_data": [{"path": "demo:sft", "max_rows": 40}],
                "kl": {"controller": "adaptive", "horizon": 50}, "rewards": [{"type": "function", "path": "accord.demo.judge:score"}],
            },
        }  # fmt: skip
    return [stage, *(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items())]


# -------------------------------------------------------------------------------------------------------------------------- lives


def start(arguments: list[str], processes: int, log: Path, before: Callable[[], None] | None = None) -> list[Any]:
    """`accord` with these arguments, in so many processes, each of which calls `before` first; what they say goes to `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [_fork.Process(target=_live, args=(arguments, rank, processes, port, log, before)) for rank in range(processes)]
    for process in started:
        process.start()
    return started


def _live(arguments: list[str], rank: int, processes: int, port: int, log: Path, before: Callable[[], None] | None) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    logging.root.handlers.clear()  # those of a test, say
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if before is not None:
        before()
    cli.main(arguments)


def wait(life: list[Any], log: Path) -> list[int]:
    """The exit codes of all. Where one has failed the others have a minute, as whoever starts a group gives them. Raises RuntimeError
    where all hang."""
    end = time.monotonic() + LIFE
    while running := [process.sentinel for process in life if process.exitcode is None]:
        failed = any(process.exitcode for process in life)  # it may have been before this began
        if failed:
            end = min(end, time.monotonic() + OTHERS)
        if time.monotonic() >= end:
            for process in life:
                process.kill()
                process.join()
            if not failed:
                raise RuntimeError(f"it hangs:\n{log.read_text()[-2000:]}")
        multiprocessing.connection.wait(running, max(0.0, end - time.monotonic()))
    return [process.exitcode for process in life]


def wait_for(moment: str, life: list[Any], run: Path, seconds: float, rng: random.Random) -> None:
    """Return at a moment of that kind, or when the life is over. `seconds`: what an undisturbed run takes from start to end."""
    logged = _size(run / "metrics.jsonl")
    signs: dict[str, Callable[[], bool]] = {
        "anywhere": lambda: True,
        "training": lambda: _size(run / "metrics.jsonl") > logged,
        "saving": lambda: any(run.glob("checkpoints/.step-*")),
        "writing": lambda: any(path.name.endswith(".tmp") for folder in (run, run / "exports") for path in folder.glob(".*")),
    }
    while not signs[moment]() and any(process.is_alive() for process in life):
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, {"anywhere": 0.8 * seconds, "training": 0.15 * seconds}.get(moment, 0.02)))


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def kill(life: list[Any], rng: random.Random) -> bool:
    """Kill all processes of a life, or one of several. False where it was over already."""
    alive = [process for process in life if process.is_alive()]
    for process in alive if len(life) == 1 or rng.random() < 0.5 else alive[:1] if rng.random() < 0.5 else alive[-1:]:
        process.kill()
    return bool(alive)


def torture(
    stage: str,
    folder: Path,
    *,
    kills: int,
    steps: int,
    seed: int,
    processes: int = 1,
    settings: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Kill runs of `stage` at least `kills` times and compare each that came through. Raises RuntimeError where something differs."""
    rng, began = random.Random(f"{seed} {stage}"), time.monotonic()
    model, log = tiny_model(folder / "start"), folder / "log.txt"
    kernels(torch.float32, torch.device("cpu"), 16, 1)  # compiled once, not in every cache anew
    os.environ["ACCORD_CACHE"] = str(folder / "cache")
    whole = folder / "whole"
    start_of_whole = time.monotonic()
    if codes := [code for code in wait(start([*command(stage, model, whole, steps), *settings], processes, log), log) if code]:
        raise RuntimeError(f"the undisturbed run ended with {codes[0]}:\n{log.read_text()[-2000:]}")
    seconds = time.monotonic() - start_of_whole
    wanted, hit, rounds = left_by(whole), Counter[str](), 0
    while sum(hit.values()) < kills:
        rounds += 1
        run = folder / f"killed-{rounds}"
        os.environ["ACCORD_CACHE"] = str(folder / f"cache-{rounds}")  # to be written anew, and killed while it is
        while True:
            saving = f"checkpoint.asynchronous={rng.choice(['true', 'false'])}"
            life = start([*command(stage, model, run, steps), saving, *settings], processes, log)
            if sum(hit.values()) < kills:
                moment = rng.choice(MOMENTS)
                wait_for(moment, life, run, seconds, rng)
                hit[moment] += kill(life, rng)
            codes = wait(life, log)
            if not any(codes):
                break
            if not any(code == -signal.SIGKILL for code in codes):
                raise RuntimeError(f"{run} ended with {codes} by itself:\n{log.read_text()[-3000:]}")
        if differing := compare(wanted, left_by(run)):
            raise RuntimeError(f"{run} is not what the undisturbed {whole} is:\n  " + "\n  ".join(differing))
        if half_done := [str(path) for path in run.rglob(".*") if path.name != ".lock"]:
            raise RuntimeError(f"left half done: {', '.join(half_done)}")
        shutil.rmtree(run)
    at = ", ".join(f"{count} {moment}" for moment, count in sorted(hit.items()))
    say(
        f"{stage}: {sum(hit.values())} kills ({at}) of {rounds} runs of {steps} steps: the same bytes [{time.monotonic() - began:.0f} s]"
    )


# -------------------------------------------------------------------------------------------------------------- what a run leaves


def left_by(run: Path) -> dict[str, Any]:
    """Everything of a finished run that must repeat: files of the models by their bytes, metrics and samples by their lines."""
    files = {
        path.relative_to(run).as_posix(): path.read_bytes()
        for name in MODELS
        for path in (run / name).rglob("*")
        if path.is_file()
    }
    metrics = _rows(run / "metrics.jsonl")
    once = Counter((row["split"], row["step"]) for row in metrics)
    return files | {
        "metrics.jsonl": [_timeless(row) for row in metrics],
        "metrics.jsonl, steps that stand there more than once": [step for step, count in once.items() if count > 1],
        "samples.jsonl": _rows(run / "samples.jsonl"),
        "journal.jsonl": _rows(run / "journal.jsonl"),
        "summary.json": _timeless(json.loads((run / "summary.json").read_text())),
    }


def compare(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*wanted, *found}) if wanted.get(name) != found.get(name)]


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _timeless(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _timeless(item) for key, item in value.items() if not key.startswith(TIMES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--kills", type=int, default=20, help="of each stage (20)")
    parser.add_argument("--steps", type=int, default=12, help="of a run (12)")
    parser.add_argument("--processes", type=int, default=1, help="of a run (1)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: a new one, which is printed")
    parser.add_argument(
        "--settings", nargs="+", default=[], metavar="KEY=VALUE", help="of all runs, such as launch.mesh.tensor=2"
    )
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    folder = Path(tempfile.mkdtemp(prefix="accord-torture-"))
    print(f"seed {seed}, {arguments.processes} process(es), in {folder}", flush=True)
    for stage in arguments.stages:
        (folder / stage).mkdir()
        try:
            torture(
                stage, folder / stage, kills=arguments.kills, steps=arguments.steps, seed=seed, processes=arguments.processes,
                settings=arguments.settings, say=lambda text: print(text, flush=True),
            )  # fmt: skip
        except RuntimeError as error:
            sys.exit(f"{stage}: {error}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
