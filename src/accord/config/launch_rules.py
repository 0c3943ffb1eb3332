"""What can't be started on several processes, each refused by a function named as the rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from accord.config.messages import Refusal

if TYPE_CHECKING:
    from accord.config.root import Config


def the_number_of_processes_is_said_once(config: Config) -> Iterator[Refusal]:
    launch = config.launch
    if launch.type == "ray" and launch.processes != 1:
        yield Refusal(
            ("launch", "processes"), "is for launch.type=local. With ray set launch.ray.workers, the number of all processes."
        )


def the_mesh_holds_all_processes(config: Config) -> Iterator[Refusal]:
    launch = config.launch
    mesh = launch.mesh
    total = launch.ray.workers if launch.type == "ray" else launch.processes
    if isinstance(total, int) and isinstance(mesh.data, int) and mesh.data * mesh.tensor != total:
        key = "launch.ray.workers" if launch.type == "ray" else "launch.processes"
        yield Refusal(
            ("launch", "mesh", "data"),
            f"{mesh.data} × tensor {mesh.tensor} are {mesh.data * mesh.tensor} processes, {key} is {total}. Leave it at auto.",
        )


def products_are_divided_of_sharded_models(config: Config) -> Iterator[Refusal]:
    tensor, engine, key = config.launch.mesh.tensor, config.engine, ("launch", "mesh", "tensor")
    if tensor == 1:
        return
    if config.train.shard == "never":
        yield Refusal(
            ("train", "shard"),
            f"never: with launch.mesh.tensor={tensor} weights are divided. Leave it at auto, or set launch.mesh.tensor=1.",
        )
    if config.model.quantization is not None:
        yield Refusal(key, f"{tensor}: a base in 4 bits is not divided. Set it to 1, or model.quantization=null.")
    if config.model.lora is not None and config.model.lora.share_base is True:
        yield Refusal(
            key, f"{tensor}: a base with several adapters on it is not divided. Set it to 1, or model.lora.share_base=auto."
        )
    if config.model.quantization is not None:
        yield Refusal(
            key,
            f"{tensor}: a base in 4 bits (model.quantization) is not divided, every process holds it whole. Set it to 1, or "
            "model.quantization=null.",
        )
    if engine.inference_tp_size not in (1, tensor):
        yield Refusal(
            ("engine", "inference_tp_size"),
            f"{engine.inference_tp_size}: with launch.mesh.tensor={tensor} sampling is divided in the same way. Leave it out.",
        )
    if not engine.pin_parameters:
        yield Refusal(
            ("engine", "pin_parameters"),
            f"false: with launch.mesh.tensor={tensor} each process samples with its part of the layers. Leave it at true.",
        )


def standard_input_is_read_by_one_process(config: Config) -> Iterator[Refusal]:
    if config.launch.type == "local" and config.launch.processes == 1:
        return
    for key in ("train", "valid"):
        if any(source.path == "-" for source in getattr(config.data, key) or ()):
            yield Refusal(
                ("data", key), "standard input can't be read by several processes. Write the rows to a file and name it."
            )


LAUNCH_RULES: tuple[Callable[[Config], Iterator[Refusal]], ...] = (
    the_number_of_processes_is_said_once,
    the_mesh_holds_all_processes,
    products_are_divided_of_sharded_models,
    standard_input_is_read_by_one_process,
)
