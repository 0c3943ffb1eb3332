"""Two hosts, made of network namespaces on one machine, join a Ray cluster and train together. Needs root on Linux."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.test_ray import SHORT, ended, start, steps, wait

pytest.importorskip("ray", reason="Ray is not installed (pip install 'accord[ray]')")
pytestmark = pytest.mark.slow
PORT = 6399


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Host:
    """A network namespace with one address, in which Ray may be started and ended; `hides` is a folder it does not share."""

    def __init__(self, name: str, address: str, environment: dict[str, str], folder: Path) -> None:
        self.name, self.address, self.environment, self.folder = name, address, environment, folder

    def inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def ray(self, head: Host | None = None, hides: Path | None = None) -> None:
        where = [f"--address={head.address}:{PORT}"] if head else ["--head", f"--port={PORT}", "--include-dashboard=false"]
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={self.address}", "--num-cpus=1",
            f"--temp-dir={self.folder}", "--disable-usage-stats", "--block",
        ]  # fmt: skip
        script = f"hostname {self.name}; " + (f"mount -t tmpfs none {hides}; " if hides else "") + 'exec "$@"'
        self.process = subprocess.Popen(
            self.inside("unshare", "--mount", "--uts", "sh", "-ec", script, "sh", *command),
            env=os.environ | self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_for(self, machines: int) -> None:
        """Return when the cluster of this host has so many machines."""
        count = f"import ray; ray.init('{self.address}:{PORT}', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        for _ in range(60):
            asked = subprocess.run(
                self.inside(sys.executable, "-c", count), env=os.environ | self.environment, capture_output=True, text=True
            )
            if asked.stdout.strip() == str(machines):
                return
            time.sleep(1)
        raise AssertionError(asked.stderr)

    def kill(self) -> None:
        """All that runs in the namespace, at once, as if its power were cut."""
        while pids := ip("netns", "pids", self.name).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need Linux, root, ip and unshare")
    mark = secrets.token_hex(2)
    names = [f"accord-{mark}-a", f"accord-{mark}-b"]
    folder = Path(tempfile.mkdtemp(prefix="accord-ray-"))
    environment = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    made = [Host(name, f"10.87.0.{number}", environment, folder) for number, name in enumerate(names, 1)]
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for host in made:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", device, "up")
        yield made[0], made[1]
    finally:
        for host in made:
            with suppress(subprocess.CalledProcessError):
                host.kill()
                ip("netns", "delete", host.name)
        shutil.rmtree(folder, ignore_errors=True)


def train(host: Host, run: Path, *arguments: str) -> subprocess.Popen[str]:
    return start(
        "dpo", "quickstart", f"run.dir={run}", *SHORT[:-1], "launch.type=ray", f"launch.ray.address={host.address}:{PORT}",
        "launch.ray.env_vars={GLOO_SOCKET_IFNAME: eth0}", *arguments, before=host.inside(), **host.environment,
    )  # fmt: skip


def test_two_hosts_train_together_and_one_may_be_lost(hosts, tmp_path):
    first, second = hosts
    first.ray()
    first.wait_for(1)
    second.ray(first)
    first.wait_for(2)
    process = train(first, tmp_path / "run")
    wait(lambda: len(steps(tmp_path / "run")) >= 2, process)
    second.kill()
    second.ray(first)
    code, out, err = ended(process)
    assert code == 0, err
    assert "ray: 2 workers on 2 machine(s)" in out
    assert "Starting again from the last checkpoint" in err
    assert steps(tmp_path / "run") == [1, 2, 3, 4]
    assert ended(start("dpo", "quickstart", f"run.dir={tmp_path}/local", *SHORT[:-1], "launch.processes=2"))[0] == 0
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "local")]
    assert weights[0] == weights[1]


def test_a_host_that_does_not_share_the_runs_folder_is_named(hosts, tmp_path):
    first, second = hosts
    (tmp_path / "shared").mkdir()
    first.ray()
    first.wait_for(1)
    second.ray(first, hides=tmp_path / "shared")
    first.wait_for(2)
    code, _, err = ended(train(first, tmp_path / "shared" / "run"))
    assert code == 2
    assert re.search(rf"run.dir: machine {second.name} \({second.address}\) does not see {tmp_path}/shared/run", err), err
