"""The shipped base model, the preset, and a chat in both languages."""

from __future__ import annotations

import io
import json
import random

import pytest
import torch

from accord import demo
from accord.commands import chat
from accord.config import load_config
from accord.demo import judge, world


def test_the_base_model_is_small_and_holds_nothing_but_data():
    files = list(demo.base_path().iterdir())
    assert sum(file.stat().st_size for file in files) <= 4_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= {f.name for f in files}
    assert not [file.name for file in files if file.suffix in (".bin", ".pt", ".py", ".pkl")]


def test_the_base_model_loads_in_plain_transformers_and_knows_what_it_never_read():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.base_path(), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(demo.base_path(), dtype=torch.float32)
    rng = random.Random(0)
    corners = [(kind, language) for kind in world.KINDS for language in world.LANGUAGES]
    requests = [world.sample(rng, heldout=True, kind=kind, language=language) for kind, language in corners for _ in range(6)]
    prompts = [[{"role": "user", "content": request.text}] for request in requests]
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    inputs.pop("token_type_ids", None)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = model.generate(**inputs, max_new_tokens=64, do_sample=False, eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
    replies = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [judge.kind_of(request, reply) != "wrong" for request, reply in zip(requests, replies, strict=True)]
    assert sum(right) / len(right) > 0.85


@pytest.mark.parametrize("text", ["请问候一下小明。 Hello, Anna!", "3加4等于几？\n* o *", "naïve 😀 <|im_end|>"])
def test_the_tokenizer_gives_back_every_text(text):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.base_path())
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text and end_of(tokenizer) not in ids


def end_of(tokenizer) -> int:
    return tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_scripted_chat_of_several_turns_in_both_languages():
    """What `accord chat runs/quickstart/ppo` does, with the base model in the place of the trained one."""
    turns = [("What is 3 plus 4?", "7"), ("5加6等于几？", "11"), ("What is dog in Chinese?", "狗"), ("请向小明问好。", "小明")]
    config = chat.settings("chat", ["generate.temperature=0", "generate.max_new_tokens=64"], chat.READS)
    conversation = chat.Conversation(chat.load_speaker("demo:base", config))
    answers, notes = io.StringIO(), io.StringIO()
    script = "".join(f"{text}\n" for text, _ in turns) + "/clear\nWhich is larger, 12 or 31?\n/quit\nWhat is 1 plus 1?\n"
    chat.talk(conversation, io.StringIO(script), answers, notes)
    told = answers.getvalue().splitlines()
    assert len(told) == 5, "every turn is answered, none after /quit"
    for answer, value in zip(told, [*(value for _, value in turns), "31"], strict=True):
        assert value in answer
    assert [turn.content for turn in conversation.turns if turn.role == "user"] == ["Which is larger, 12 or 31?"]


def test_the_quickstart_preset_loads_and_names_only_what_is_shipped():
    config = load_config("quickstart")
    assert list(config.pipeline.stages) == ["sft", "reward", "dpo", "ppo"]
    assert config.model.path == "demo:base"
    named = {source.path for source in [*config.data.train, *config.pipeline.judge_prompts]}
    assert named == {f"demo:{name}" for name in demo.FILES}
    longest = config.data.max_length + config.generate.max_new_tokens
    assert longest <= json.loads((demo.base_path() / "config.json").read_text())["max_position_embeddings"]
