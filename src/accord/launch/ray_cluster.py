"""`launch.type=ray`: Ray Train places the workers on a cluster and starts them again when one is lost (ray_worker.py is their side)."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.errors import AccordError, ConfigError, Interrupted
from accord.launch.environment import check_mesh
from accord.launch.process import LINGER_S, PassedOn, first_failure, told
from accord.launch.ray_worker import TOKEN, Job, look_around, outcomes, work
from accord.track.files import write_atomically

if TYPE_CHECKING:
    from accord.config import Config, Launch

CONNECT_WITHIN_S = 20.0
# Ray's own reports, metrics and habits, unless the user has said otherwise.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's name for "no other machine may join": it listens on loopback only


def run_on_ray(config: Config, command: Sequence[str]) -> int:
    """Run `command` as the workers of `launch.ray` and return the exit code, as `local.run_local` does.

    A worker that is killed, or whose machine is lost, is replaced: all start again and go on from the run's last checkpoint, at most
    `launch.ray.max_restarts` times. Raises ConfigError where the cluster is not there, too small, or sees other files than this machine.
    """
    run = Path(config.run.dir).absolute()
    with _meeting_place(run) as folder, _environment(config.launch), _cluster(config.launch) as ray, PassedOn() as signals:
        job = Job(
            command=tuple(command), cwd=os.getcwd(), run=str(run), folder=str(folder), token=(folder / TOKEN).read_text(),
            environment=_threads(config.launch) | config.launch.ray.env_vars,
        )  # fmt: skip
        check_machines(ray, job)
        workers, resources = size(config.launch, ray)
        print(f"ray: {workers} workers on {len(_machines(ray))} machine(s)", flush=True)
        return _fit(config.launch, job, workers, resources, signals)


def size(settings: Launch, ray: Any) -> tuple[int, dict[str, float]]:
    """The number of workers and what each takes. Raises ConfigError where the cluster has not so much."""
    has = ray.cluster_resources()
    gpus = int(has.get("GPU", 0))
    machines = _machines(ray)
    workers = settings.ray.workers or gpus or len(machines)
    resources = {"CPU": 1.0, **({"GPU": 1.0} if gpus else {}), **settings.ray.resources}
    for name, amount in resources.items():
        if has.get(name, 0) < workers * amount:
            raise ConfigError(
                f"launch.ray.workers: {workers} workers with {name} {amount:g} each need {workers * amount:g}, the cluster has "
                f"{has.get(name, 0):g} on {len(machines)} machine(s). Lower launch.ray.workers or launch.ray.resources, or add machines."
            )
    check_mesh(settings, workers)
    return workers, resources


def check_machines(ray: Any, job: Job) -> None:
    """Raise ConfigError where a machine does not see the run's folder or the working directory, or has another Accord."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = look_around(job)
    look = ray.remote(num_cpus=0)(look_around)
    asked = [
        (
            node["NodeName"],
            look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(job),
        )
        for node in _machines(ray)
    ]
    for name, answer in asked:
        try:
            there = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"machine {name} of the cluster can't run Accord: {_reason(error)}. Install the same version there, with the same Python."
            ) from error
        if not there["folder"]:
            raise ConfigError(
                f"run.dir: machine {there['host']} ({name}) does not see {job.run}. All machines need a shared file system under that path: "
                "mount it there, or choose a run.dir that all see."
            )
        if not there["cwd"]:
            raise ConfigError(
                f"machine {there['host']} ({name}) has no folder {job.cwd}, where this command was started. Start it in a folder that "
                "all machines share."
            )
        if there["accord"] != here["accord"]:
            raise ConfigError(
                f"machine {there['host']} ({name}) has Accord {there['accord']}, this one {here['accord']}. Install the same version."
            )


def _fit(settings: Launch, job: Job, workers: int, resources: dict[str, float], signals: PassedOn) -> int:
    """Train, with the main rank's output on the terminal meanwhile, and say how it ended."""
    folder, lost = Path(job.folder), list[BaseException]()
    thread = threading.Thread(target=_train, args=(settings, job, workers, resources, lost), daemon=True)
    log = _Follower(Path(job.run) / "logs" / "rank-0.log")
    thread.start()
    passed_on, told_attempts, deadline = 0, 0, math.inf
    while thread.is_alive() and time.monotonic() < deadline:
        for number in signals.received[passed_on:]:
            passed_on += 1
            write_atomically(folder / f"signal-{passed_on}", str(number).encode())
        if passed_on > 1 and deadline == math.inf:
            deadline = time.monotonic() + 2 * LINGER_S
        attempts = _attempts(folder)
        for before in attempts[told_attempts:-1]:
            told_attempts += 1
            log.show()
            _say_restart(before, told_attempts, settings.ray.max_restarts)
        log.show()
        time.sleep(0.2)
    log.show()
    if thread.is_alive():
        raise Interrupted("interrupted")
    attempts = _attempts(folder)
    ended = outcomes(attempts[-1]) if attempts else []
    if lost and not any(outcome.code and outcome.is_final for outcome in ended):
        first = first_failure(ended)
        words = first.message if first and not first.is_consequence else f"error: a worker was lost: {_reason(lost[0])}"
        raise AccordError(
            f"{words.removeprefix('error: ')}\nThis was attempt {len(attempts)}; launch.ray.max_restarts is {settings.ray.max_restarts}. "
            "Start the same command again to go on from the last checkpoint."
        )
    return told(ended, signals.received)


def _train(settings: Launch, job: Job, workers: int, resources: dict[str, float], lost: list[BaseException]) -> None:
    """Ray Train's part. It counts lost workers; what its failure configuration does not cover, a worker lost while it starts, is tried again."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.config import FailureConfig
    from ray.train.v2.api.exceptions import ControllerError

    class AllGpusOfTheMachine(Backend):
        share_cuda_visible_devices = True  # a worker finds its own by LOCAL_RANK

    class NoGroup(TorchConfig):
        """The workers' processes join a group; those of Ray, which only watch them, need none."""

        backend_cls = AllGpusOfTheMachine
        train_func_context = nullcontext

    most, restarts = settings.ray.max_restarts, 0
    try:
        while True:
            left = most - restarts
            trainer = TorchTrainer(
                work,
                train_loop_config=asdict(job),
                torch_config=NoGroup(),
                scaling_config=ScalingConfig(
                    num_workers=workers, use_gpu=resources.get("GPU", 0) > 0, resources_per_worker=resources
                ),
                run_config=RunConfig(
                    name="accord",
                    storage_path=str(Path(job.folder) / "ray"),
                    failure_config=FailureConfig(max_failures=left, controller_failure_limit=left, max_preemption_failures=left),
                ),
            )
            try:
                trainer.fit()
                return
            except ControllerError:
                restarts = max(restarts + 1, len(_attempts(Path(job.folder))))
                if restarts > most:
                    raise
    except BaseException as error:
        lost.append(error)


@contextmanager
def _environment(settings: Launch) -> Iterator[None]:
    """What Ray is told by environment variables, where the user says nothing else; for this run only."""
    ours = ENVIRONMENT if settings.ray.address else ENVIRONMENT | ALONE
    added = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _cluster(settings: Launch) -> Iterator[Any]:
    """Ray, connected to a running cluster, or to one of this machine alone that ends with the run and listens on loopback only."""
    address = settings.ray.address
    try:
        import ray
        import ray.train
    except ImportError as error:
        raise ConfigError(
            f"launch.type: ray is not installed ({error}). pip install 'accord[ray]', or use launch.type=local."
        ) from None
    answer = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            cpus = math.ceil((settings.ray.workers or 1) * settings.ray.resources.get("CPU", 1))
            cpus = max(cpus, os.cpu_count() or 1)
            ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, configure_logging=False)
        else:
            host, _, port = address.rpartition(":")
            if host and port.isdigit():  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), timeout=CONNECT_WITHIN_S).close()
            ray.init(address, log_to_driver=False, configure_logging=False)
        with suppress(ValueError):  # Ray has put its own in place, with an exit code of its own
            signal.signal(signal.SIGTERM, answer)
    except (OSError, ValueError, RuntimeError) as error:
        where = address or "a cluster on this machine"
        why = _reason(error)
        if "Could not find any running Ray instance" in why:  # Ray names options of its own, which are not ours
            why = "no Ray cluster runs on this machine"
        raise ConfigError(f"launch.ray.address: can't reach {where}: {why}. Start one with `ray start --head`.") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _meeting_place(run: Path) -> Iterator[Path]:
    """RUN/.launch-*, with a token in it that the other machines must see. Leaves nothing where no run has begun."""
    made = not run.exists()
    folder = run / f".launch-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write in {run} ({error.strerror}). Choose another run.dir.") from error
    try:
        (folder / TOKEN).write_text(secrets.token_hex(16))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made:
            with suppress(OSError):
                run.rmdir()


class _Follower:
    """What a growing file gets from now on, shown on the terminal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = path.stat().st_size if path.exists() else 0

    def show(self) -> None:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.at)
            new = file.read()
            self.at += len(new)
            sys.stdout.write(new.decode("utf-8", "replace"))
            sys.stdout.flush()


def _attempts(folder: Path) -> list[Path]:
    return sorted(folder.glob("attempt-*"), key=lambda path: int(path.name.removeprefix("attempt-")))


def _say_restart(attempt: Path, restarts: int, most: int) -> None:
    first = first_failure(outcomes(attempt))
    why = first.message.removeprefix("error: ") if first and not first.is_consequence else "a worker was lost."
    print(f"{why}\nStarting again from the last checkpoint ({restarts} of at most {most} times).", file=sys.stderr)


def _machines(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _threads(settings: Launch) -> dict[str, str]:
    """OMP_NUM_THREADS of each worker where something says so; else its machine's cores are shared by the workers there."""
    threads = os.environ.get("OMP_NUM_THREADS") or int(settings.ray.resources.get("CPU", 0))
    return {"OMP_NUM_THREADS": str(threads)} if threads else {}


def _reason(error: BaseException) -> str:
    """The innermost cause in one line."""
    while (cause := getattr(error, "cause", None) or error.__cause__) is not None and isinstance(cause, BaseException):
        error = cause
    lines = str(error).strip().splitlines()
    return (lines[-1] if lines else type(error).__name__).strip().rstrip(".")
