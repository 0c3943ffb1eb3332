"""How a training command is started on several processes or machines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from accord.config.fields import Count, Natural, Positive, Section, Text, VariableName


class Mesh(Section):
    """How the processes divide the work."""

    data: Literal["auto"] | Count = Field(
        default="auto", description="Processes with data of their own, over which weights are sharded; auto: all that are left."
    )
    tensor: Count = Field(
        default=1,
        description="Neighbouring processes that divide the heads and the MLP of every layer and read the same data (tensor parallelism).",
    )


class Ray(Section):
    """A Ray cluster (pip install 'accord[ray]'). Read with launch.type=ray."""

    address: Text | None = Field(
        default=None,
        description="Of a running cluster, HOST:PORT or auto; null: one is started on this machine and ended with the run.",
    )
    workers: Count | None = Field(
        default=None, description="Processes in all; null: one for each GPU of the cluster, without GPUs one for each machine."
    )
    resources: dict[Text, Positive] = Field(
        default={},
        description="What one worker takes, such as {CPU: 8, GPU: 1}; not named: CPU 1, and GPU 1 where there are GPUs. A CPU that is named is also its threads.",
    )
    env_vars: dict[VariableName, str] = Field(
        default={}, description="Environment variables of the workers. They are kept in config.yaml: no secrets."
    )
    max_restarts: Natural = Field(
        default=3, description="Times that the run goes on from its last checkpoint after a worker or a machine was lost."
    )


class Launch(Section):
    """Where a training command runs. Started by torchrun, or by anything that sets RANK and WORLD_SIZE, a process is just a worker."""

    type: Literal["local", "ray"] = Field(default="local", description="local: on this machine. ray: on a Ray cluster.")
    processes: Literal["auto"] | Count = Field(
        default=1, description="local: processes to start; auto: one for each GPU of this machine, without GPUs one."
    )
    mesh: Mesh = Field(default=Mesh(), description="How the processes divide the work.")
    ray: Ray = Field(default=Ray(), description="The Ray cluster, with launch.type=ray.")
