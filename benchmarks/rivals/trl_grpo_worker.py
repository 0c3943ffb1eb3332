"""TRL's GRPOTrainer (1.16), in a virtual environment and a process of its own.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu     # or a CPU wheel from a folder: --find-links
    VENV/bin/pip install trl==1.16.0 transformers==5.24.0

Then `benchmarks/ppo.py --trl-python VENV/bin/python`. Settings and answer are those of accord_ppo_worker.py.

Its step, by its own methods: `_generate` is `generate`, `_calculate_rewards` is `score`, what else is in
`_generate_and_score_completions` is `logprob`, and the rest of the step is `train`.
"""

from __future__ import annotations

import json
import logging
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from length_reward import score
from worker import Clock, answer, step_of


def work(settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logging.disable(logging.WARNING)
    folder = Path(settings["folder"])
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    reads = read(policy, prompts["tokens"][0])
    steps = Steps()
    with tempfile.TemporaryDirectory() as output:
        trainer = timed_trainer(steps)(
            model=policy,
            reward_funcs=lambda completions, **_: [score(completion) for completion in completions],
            args=arguments(settings, output),
            train_dataset=Dataset.from_list([{"prompt": text} for text in prompts["texts"]]),
            processing_class=AutoTokenizer.from_pretrained(folder / "policy", padding_side="left"),
            callbacks=[steps.callback()],
        )
        trainer.train()
    if steps.prompt_tokens != len(prompts["tokens"][0]):
        raise RuntimeError(f"TRL read prompts of {steps.prompt_tokens} tokens instead of {len(prompts['tokens'][0])}")
    versions = f"TRL {version('trl')}, torch {version('torch')}, transformers {version('transformers')}"
    return {"steps": steps.done, "reads": reads, "versions": versions}


def arguments(settings: dict[str, Any], output: str) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=output,
        seed=settings["seed"],
        use_cpu=True,
        bf16=settings["precision"] == "bf16",
        per_device_train_batch_size=settings["prompts"] * settings["samples"],
        gradient_accumulation_steps=1,
        num_generations=settings["samples"],
        max_completion_length=settings["new_tokens"],
        generation_kwargs={"min_new_tokens": settings["new_tokens"]} if settings["full_length"] else None,
        max_steps=settings["steps"],
        num_iterations=settings["epochs"],
        beta=0.0,
        temperature=1.0,
        learning_rate=settings["lr"],
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )


def read(policy: Any, prompt: list[int]) -> list[float]:
    """What the model says of one prompt: mean log-probability of its tokens."""
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        logp = policy(ids).logits[0, :-1].log_softmax(-1)
    return [float(logp.gather(-1, ids[0, 1:, None]).mean())]


class Steps:
    """The steps of a trainer, timed."""

    def __init__(self) -> None:
        self.clock, self.done = Clock(), []
        self.tokens = self.prompt_tokens = 0

    def callback(self) -> Any:
        from transformers import TrainerCallback

        steps = self

        class Timer(TrainerCallback):
            # A step's prompts are answered before on_step_begin is called: it lasts from one end to the next.
            def on_train_begin(self, *args: Any, **options: Any) -> None:
                steps.clock.start()

            def on_step_end(self, *args: Any, **options: Any) -> None:
                steps.close()

        return Timer()

    def close(self) -> None:
        seconds, parts = self.clock.elapsed(), self.clock.seconds
        generate, score_, everything = (
            parts[name] for name in ("_generate", "_calculate_rewards", "_generate_and_score_completions")
        )
        known = {"generate": generate, "score": score_, "logprob": everything - generate - score_, "train": seconds - everything}
        self.done.append(step_of(seconds, known, self.tokens))
        self.clock.start()


def timed_trainer(steps: Steps) -> Any:
    """TRL's trainer with three of its methods timed."""
    from trl import GRPOTrainer

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, *args: Any, **options: Any) -> Any:
            out = super()._generate_and_score_completions(*args, **options)
            steps.tokens, steps.prompt_tokens = int(out["completion_mask"].sum()), out["prompt_ids"].shape[1]
            return out

    for name in ("_generate", "_calculate_rewards", "_generate_and_score_completions"):
        setattr(Timed, name, steps.clock.timed(name, getattr(Timed, name)))
    return Timed


if __name__ == "__main__":
    answer(work)
