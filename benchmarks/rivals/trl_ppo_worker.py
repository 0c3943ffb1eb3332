"""TRL's last PPOTrainer (0.24), in a virtual environment and a process of its own.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu     # or a CPU wheel from a folder: --find-links
    VENV/bin/pip install trl==0.24.0 "transformers<5"

Then `benchmarks/ppo.py --trl-ppo-python VENV/bin/python`. Settings and answer are those of accord_ppo_worker.py.

Its step, by its own functions: `batch_generation` is `generate`; `get_reward` of the reward model is `score`; the reference's
forward, the critic's `get_reward` and the log-probabilities around them are `logprob`; from the first forward with gradient on, it is `train`.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from worker import Clock, answer, step_of

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def work(settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
    from trl import PPOTrainer

    logging.disable(logging.WARNING)
    folder = Path(settings["folder"])
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32) for _ in range(2))
    reward, critic = (
        AutoModelForSequenceClassification.from_pretrained(folder / part, num_labels=1, dtype=torch.float32)
        for part in ("reward", "critic")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "policy" / "tokenizer.json"),
        padding_side="left",
        pad_token=settings["pad"],
        eos_token=settings["eos"],
    )
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))["tokens"]
    reads = read(policy, reward, critic, prompts[0])
    steps = Steps(settings, tokenizer.eos_token_id, critic, reference)
    with tempfile.TemporaryDirectory() as output:
        trainer = PPOTrainer(
            args=arguments(settings, output),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=critic,
            train_dataset=dataset(prompts * settings["samples"]),
            eval_dataset=dataset(prompts[:1]),
            callbacks=[steps.callback()],
        )
        trainer.train()
    versions = f"TRL {version('trl')}, torch {version('torch')}, transformers {version('transformers')}"
    return {"steps": steps.done, "reads": reads, "versions": versions}


def arguments(settings: dict[str, Any], output: str) -> Any:
    from trl import PPOConfig

    answers = settings["prompts"] * settings["samples"]
    return PPOConfig(
        output_dir=output,
        seed=settings["seed"],
        use_cpu=True,
        bf16=settings["precision"] == "bf16",
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=answers // settings["micro_batch"],
        local_rollout_forward_batch_size=answers,
        num_mini_batches=1,
        num_ppo_epochs=settings["epochs"],
        total_episodes=answers * settings["steps"],
        response_length=settings["new_tokens"],
        stop_token=None if settings["full_length"] else "eos",
        missing_eos_penalty=1.0,
        temperature=1.0,
        kl_coef=0.05,
        kl_estimator="k1",
        vf_coef=0.1,
        learning_rate=settings["lr"],
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )


def dataset(prompts: list[list[int]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"input_ids": prompt} for prompt in prompts])


def read(policy: Any, reward: Any, critic: Any, prompt: list[int]) -> list[float]:
    """What the models say of one prompt: mean log-probability of its tokens, score, value."""
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        logp = policy.eval()(ids).logits[0, :-1].log_softmax(-1)
        mean = logp.gather(-1, ids[0, 1:, None]).mean()
        return [float(mean)] + [float(model.eval()(ids).logits[0, 0]) for model in (reward, critic)]


class Steps:
    """Times TRL's steps by wrapping the functions that its trainer calls."""

    def __init__(self, settings: dict[str, Any], eos: int, critic: Any, reference: Any) -> None:
        from trl.trainer import ppo_trainer

        self.eos, self.full_length = eos, settings["full_length"]
        self.clock, self.done = Clock(), []
        self.collected: float | None = None  # seconds from the step's beginning to its first forward with gradient
        self.tokens = 0
        generate, get_reward, forward = (getattr(ppo_trainer, name) for name in ("batch_generation", "get_reward", "forward"))
        timed_generate = self.clock.timed("generate", generate)
        timed_score = self.clock.timed("score", get_reward)

        def batch_generation(model: Any, queries: Any, *rest: Any, **options: Any) -> Any:
            out = timed_generate(model, queries, *rest, **options)
            self.tokens = self.count(out[0][:, queries.shape[1] :])
            return out

        def reward(model: Any, *rest: Any, **options: Any) -> Any:
            return (get_reward if model is critic else timed_score)(model, *rest, **options)

        def read(model: Any, *rest: Any, **options: Any) -> Any:
            if model is not reference and self.collected is None:
                self.collected = self.clock.elapsed()
            return forward(model, *rest, **options)

        ppo_trainer.batch_generation, ppo_trainer.get_reward, ppo_trainer.forward = batch_generation, reward, read

    def count(self, answers: Any) -> int:
        """Tokens of the answers, each to its first end token (included); what TRL computes behind it is waste."""
        if self.full_length:
            return answers.numel()
        ends = (answers == self.eos).int()
        ended = ends.any(1)
        return int((ends.argmax(1) + 1)[ended].sum()) + int((~ended).sum()) * answers.shape[1]

    def callback(self) -> Any:
        from transformers import TrainerCallback

        steps = self

        class Timer(TrainerCallback):
            def on_train_begin(self, *args: Any, **options: Any) -> None:
                steps.clock.start()

            def on_step_end(self, *args: Any, **options: Any) -> None:
                steps.close()

        return Timer()

    def close(self) -> None:
        seconds, parts = self.clock.elapsed(), self.clock.seconds
        assert self.collected is not None
        logprob = self.collected - parts["generate"] - parts["score"]
        self.done.append(step_of(seconds, {**parts, "logprob": logprob, "train": seconds - self.collected}, self.tokens))
        self.collected = None
        self.clock.start()


if __name__ == "__main__":
    answer(work)
