"""PPO as a run: from files to a folder, with a learned reward model, and interrupted runs that end in the same bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from accord.config import Config, Model
from accord.config.root import merge
from accord.errors import ConfigError, Interrupted
from accord.models.load import load_scalar
from accord.models.save import save_model
from accord.rewards.base import Sample
from accord.trainers.ppo import PPOTrainer
from tests.trainers.ppo_setup import PROMPTS, function, settings


@pytest.fixture(scope="session")
def reward_folder(tiny_folder, tmp_path_factory) -> Path:
    """A reward model with random weights, saved as `accord reward` would."""
    loaded = load_scalar(str(tiny_folder("llama", seed=5)), Model(), seed=2, trainable=False)
    folder = tmp_path_factory.mktemp("reward") / "model"
    save_model(loaded, folder)
    return folder


@pytest.fixture
def prompts_file(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return file


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_from_files_with_a_reward_model_leaves_what_it_should(tiny_folder, reward_folder, prompts_file, tmp_path):
    run = tmp_path / "run"
    changes = {
        "data": {"train": str(prompts_file), "holdout": 0.25},
        "reward_model": {"path": str(reward_folder)},
        "train": {"batch_size": 2, "epochs": 1, "ema_decay": 0.9},
        "ppo": {"rewards": [{"type": "model"}, function("ended", weight=0.5)], "samples_per_prompt": 2},
        "eval": {"every_steps": 2},
    }
    with PPOTrainer(settings(tiny_folder("llama"), run, changes)) as trainer:
        summary = trainer.train()
        module = trainer.policy.module
    rows = lines(run / "metrics.jsonl")
    train = [row for row in rows if row["split"] == "train"]
    assert [row["step"] for row in train] == [1, 2, 3] and all(
        "ppo/score/model" in row and "ppo/score/ended" in row for row in train
    )
    assert [row["step"] for row in rows if row["split"] == "eval"] == [0, 2, 3]
    assert summary["final"]["ppo/score"] == [row for row in rows if row["split"] == "eval"][-1]["ppo/score"]
    sample = lines(run / "samples.jsonl")[0]
    assert {"prompt", "response", "score", "kl", "finish_reason", "step", "stage"} <= set(sample)
    ids = torch.tensor([[5, 6, 7, 8]])
    saved = AutoModelForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        assert torch.allclose(saved(input_ids=ids).logits, module.eval()(input_ids=ids).logits, atol=1e-6)
    ema = AutoModelForCausalLM.from_pretrained(run / "ema")
    assert not torch.equal(next(ema.parameters()), next(saved.parameters()))
    critic = AutoModelForSequenceClassification.from_pretrained(run / "critic")
    assert critic.config.num_labels == 1
    assert AutoTokenizer.from_pretrained(run / "model").chat_template


def test_the_reward_model_gives_in_ppo_the_score_it_gives_alone(tiny_folder, reward_folder, tmp_path):
    """Whatever is beside a response in a pack: the score of plain transformers on prompt + response."""
    changes = {"reward_model": {"path": str(reward_folder)}, "ppo": {"rewards": [{"type": "model"}], "samples_per_prompt": 3}}
    trainer = PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run", changes), train_dataset=PROMPTS)
    experience = trainer.make_experience([trainer.examples.train[i] for i in range(8)])
    plain = AutoModelForSequenceClassification.from_pretrained(reward_folder).eval()
    for sample, score in zip(experience.rollouts.samples, experience.board.total, strict=True):
        with torch.no_grad():
            alone = plain(input_ids=torch.tensor([[*sample.prompt_ids, *sample.response_ids]])).logits[0, 0].item()
        assert score == pytest.approx(alone, abs=1e-4)


def test_a_reward_model_can_be_normalised_as_it_was_trained(tiny_folder, reward_folder, tmp_path):
    folder = tmp_path / "normal"
    shutil.copytree(reward_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["score_normalization"] = {"mean": 0.5, "std": 0.25, "texts": 8, "data": "held-out"}
    (folder / "config.json").write_text(json.dumps(config))
    rewards = [{"type": "model"}, {"type": "model", "normalize": True, "name": "normal"}]
    changes = {"reward_model": {"path": str(folder)}, "ppo": {"rewards": rewards}}
    trainer = PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run", changes), train_dataset=PROMPTS)
    board = trainer.make_experience([trainer.examples.train[i] for i in range(4)]).board
    assert board.by_source["normal"] == pytest.approx([(score - 0.5) / 0.25 for score in board.by_source["model"]])
    with pytest.raises(ConfigError, match=r"ppo.rewards.1.normalize: .* does not say how its scores lie"):
        changes["reward_model"]["path"] = str(reward_folder)
        PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run", changes), train_dataset=PROMPTS)


def test_the_critic_starts_from_the_reward_model(tiny_folder, reward_folder, tmp_path):
    changes = {"reward_model": {"path": str(reward_folder)}, "ppo": {"rewards": [{"type": "model"}]}}
    trainer = PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run", changes), train_dataset=PROMPTS)
    saved = AutoModelForSequenceClassification.from_pretrained(reward_folder)
    assert torch.equal(trainer.critic.module.score.weight, saved.score.weight)
    alone = PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run"), train_dataset=PROMPTS)
    policy = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
    assert torch.equal(alone.critic.module.model.embed_tokens.weight, policy.model.embed_tokens.weight)


@pytest.fixture(scope="session")
def foreign_reward_folder(tiny_model, tmp_path_factory) -> Path:
    """A reward model whose tokenizer was trained on other texts, with another template."""
    from accord.models.scratch import train_tokenizer

    base = tmp_path_factory.mktemp("foreign")
    tokenizer = train_tokenizer(["A completely different text: zyx wvu. 别的文字。"] * 4, 300, max_length=256)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    tiny_model("llama", seed=7, vocab_size=512).save_pretrained(base / "base")
    tokenizer.save_pretrained(base / "base")
    save_model(load_scalar(str(base / "base"), Model(), seed=2, trainable=False), base / "model")
    return base / "model"


def test_a_reward_model_with_another_tokenizer_gets_the_text(tiny_folder, foreign_reward_folder, tmp_path):
    changes = {
        "reward_model": {"path": str(foreign_reward_folder)},
        "critic": {"path": str(tiny_folder("llama"))},
        "ppo": {"rewards": [{"type": "model"}]},
    }
    trainer = PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run", changes), train_dataset=PROMPTS)
    prompt = trainer.examples.train[0].record
    assert prompt is not None
    (score,) = trainer.sources[0].score([Sample(prompt, [5], [6], "It is naïve 你好.")])
    tokenizer = AutoTokenizer.from_pretrained(foreign_reward_folder)
    text = f"<|im_start|>user: {prompt.messages[0].content}<|im_end|>\n<|im_start|>assistant: It is naïve 你好.<|im_end|>"
    plain = AutoModelForSequenceClassification.from_pretrained(foreign_reward_folder).eval()
    with torch.no_grad():
        alone = plain(input_ids=torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])).logits[0, 0].item()
    assert score == pytest.approx(alone, abs=1e-4)


# -- resume ----------------------------------------------------------------------------------------------------------------


def everything(folder: Path, run: str, file: Path, ptx: Path, **changes) -> Config:
    """Every part that has state: EMA, adaptive KL, running moments, PTX, several mini-batches, a schedule."""
    base = {
        "data": {"train": str(file), "holdout": 0.25},
        "train": {"batch_size": 2, "epochs": 2, "max_steps": 5, "ema_decay": 0.9, "lr_schedule": "cosine", "warmup_ratio": 0.2},
        "critic": {"warmup_steps": 1},
        "checkpoint": {"every_steps": 1},
        "ppo": {
            "samples_per_prompt": 2, "ppo_epochs": 2, "mini_batches": 2, "normalize_score": True, "ptx_coef": 0.5, "ptx_data": str(ptx),
            "kl": {"controller": "adaptive", "horizon": 50},
        },
    }  # fmt: skip
    return settings(folder, Path(run), merge(base, changes))


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}])
def test_an_interrupted_run_ends_in_the_same_bytes(tiny_folder, prompts_file, tmp_path, monkeypatch, lora):
    ptx = tmp_path / "ptx.jsonl"
    ptx.write_text("".join(json.dumps({"prompt": f"Say {i}", "completion": f"It is {i}."}) + "\n" for i in range(7)))
    options = {"model": {"lora": lora}}
    with PPOTrainer(everything(tiny_folder("llama"), str(tmp_path / "whole"), prompts_file, ptx, **options)) as trainer:
        trainer.train()

    plain_step = PPOTrainer.step

    def dies_at_step_3(self, step):
        if step == 3:
            raise Interrupted("killed")
        return plain_step(self, step)

    config = everything(tiny_folder("llama"), str(tmp_path / "cut"), prompts_file, ptx, **options)
    monkeypatch.setattr(PPOTrainer, "step", dies_at_step_3)
    with pytest.raises(Interrupted), PPOTrainer(config) as trainer:
        trainer.train()
    monkeypatch.setattr(PPOTrainer, "step", plain_step)
    with PPOTrainer(config) as trainer:
        trainer.train()

    for part in ("model", "ema", "critic", *(["adapter"] if lora else [])):
        whole, cut = digest(tmp_path / "whole" / part), digest(tmp_path / "cut" / part)
        assert whole and whole == cut, part
    timeless = [
        [
            {
                k: v
                for k, v in row.items()
                if not k.startswith(("time/", "throughput/", "memory/", "wall_s", "train/tokens_per_s"))
            }
            for row in lines(tmp_path / run / "metrics.jsonl")
        ]
        for run in ("whole", "cut")
    ]
    assert timeless[0] == timeless[1]
    samples = [lines(tmp_path / run / "samples.jsonl") for run in ("whole", "cut")]
    assert samples[0] == samples[1]


def test_evaluation_asks_the_same_of_every_step_and_changes_nothing(tiny_folder, tmp_path):
    trainer = PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run"), train_dataset=PROMPTS, valid_dataset=PROMPTS[:5])
    before = {k: v for k, v in trainer.evaluate(0).items() if not k.startswith("time/")}
    shown = trainer.samples
    assert before == {k: v for k, v in trainer.evaluate(7).items() if not k.startswith("time/")} and shown == trainer.samples
    assert len(shown) == 5 and abs(before["ppo/kl"]) < 1e-5
    trainer.config = trainer.config.updated({"eval": {"max_examples": 2}})
    trainer.evaluate(0)
    assert len(trainer.samples) == 2


def test_a_loop_of_ones_own(tiny_folder, tmp_path):
    """The three public steps, with prompts given as records."""
    trainer = PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run"), train_dataset=PROMPTS)
    prompts = [example.record for example in (trainer.examples.train[i] for i in range(3))]
    for number in (1, 2):
        experience = trainer.make_experience(prompts)
        assert experience.number == number and len(experience) == 3
        stats = trainer.update(experience)
        assert stats["ppo/updates"] == 1
