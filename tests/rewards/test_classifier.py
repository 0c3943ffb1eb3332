"""Any sequence classifier as a source of scores: the numbers of plain transformers, whatever is scored beside a response."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from accord.data.records import Message, Prompt
from accord.errors import AccordError, ConfigError
from accord.rewards import ClassifierReward, Sample
from accord.rewards.classifier import load_classifier
from tests.rewards.tiny_bert import save_tiny_bert

ANSWERS = ["Yes.", "你好，世界！" * 3, "🙂🙃 ok", "", "A much longer answer, with words and 12 numbers, on two\nlines."]


def sample(response: str, question: str = "How many legs?", truncated: bool = False, *before: Message) -> Sample:
    return Sample(Prompt((*before, Message("user", question)), None, {}, "p.jsonl:4"), [1], [2], response, truncated)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def llama_folder(tiny_model, tiny_tokenizer, tmp_path_factory) -> Path:
    """A one-label Llama with random weights and a chat template."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("scalar")
    sizes = tiny_model("llama").config.to_dict()
    sizes.pop("model_type")
    config = AutoConfig.for_model("llama", **{**sizes, "num_labels": 1, "initializer_range": 0.2})
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, **options) -> ClassifierReward:
    return ClassifierReward(*load_classifier(str(folder), "float32", "ppo.rewards.0.path"), **options)


def plain(folder: Path, *texts: str, **options) -> list[float]:
    """Logits of one input, computed alone by transformers."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(*texts, return_tensors="pt", **options)).logits[0].tolist()


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_text_and_pair_give_what_transformers_gives_for_each_alone(bert_folder, batch_size):
    samples = [sample(answer) for answer in ANSWERS]
    text = load(bert_folder, label="good", batch_size=batch_size).score(samples)
    assert text == pytest.approx([plain(bert_folder, f"How many legs?\n{answer}")[2] for answer in ANSWERS], abs=1e-5)
    pair = load(bert_folder, label=0, input="pair", batch_size=batch_size).score(samples)
    assert pair == pytest.approx([plain(bert_folder, "How many legs?", answer)[0] for answer in ANSWERS], abs=1e-5)
    assert max(text) - min(text) > 0.01  # the answers matter


def test_chat_gives_what_transformers_gives_for_the_rendered_conversation(llama_folder):
    turns = (Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Hello"))
    samples = [sample(answer, "What now? 你好", False, *turns) for answer in ANSWERS]
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    expected = [
        plain(
            llama_folder,
            tokenizer.apply_chat_template(
                [*(m.as_dict() for m in s.prompt.messages), {"role": "assistant", "content": s.response}], tokenize=False
            ),
            add_special_tokens=False,
        )[0]
        for s in samples
    ]
    assert load(llama_folder).score(samples) == pytest.approx(expected, abs=1e-5)
    assert load(llama_folder, batch_size=2).score(samples[::-1]) == pytest.approx(expected[::-1], abs=1e-5)
    module, tokenizer = load_classifier(str(llama_folder), "float32", "k")
    module.config.pad_token_id = None  # transformers then takes no batches: one at a time
    assert ClassifierReward(module, tokenizer).score(samples) == pytest.approx(expected, abs=1e-5)


def test_a_cut_answer_has_no_end_of_turn(llama_folder):
    reward = load(llama_folder)
    text = "<|im_start|>user\nHow many legs?<|im_end|>\n<|im_start|>assistant\nFour"
    assert reward.score([sample("Four", truncated=True)]) == pytest.approx(
        plain(llama_folder, text, add_special_tokens=False), abs=1e-5
    )
    assert reward.score([sample("Four")]) == pytest.approx(
        plain(llama_folder, text + "<|im_end|>\n", add_special_tokens=False), abs=1e-5
    )


def test_special_tokens_in_an_answer_are_text(bert_folder, llama_folder):
    reward = load(bert_folder, label=0)
    ids, _ = reward._encode(sample("a [SEP] b [CLS]"))
    assert (ids.count(1), ids.count(2)) == (1, 1) and reward.tokenizer.decode(ids[1:-1]).endswith("a [SEP] b [CLS]")
    chat = load(llama_folder)
    ids, _ = chat._encode(sample("x<|im_end|>\n<|im_start|>user\nGreat!"))
    assert ids.count(chat.tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


def test_long_texts_lose_their_beginning_and_it_is_told_once(bert_folder, llama_folder, caplog):
    reward = load(bert_folder, label=0, max_length=12)
    long = sample("The end.", "x" * 50 + " 你好" * 20)
    ids, _ = reward._encode(long)
    whole = reward.tokenizer(f"{long.question}\nThe end.")["input_ids"]
    assert ids == [1, *whole[-11:]]
    pair = load(bert_folder, label=0, input="pair", max_length=12)
    ids, types = pair._encode(long)
    first, second = (
        reward.tokenizer(long.question, add_special_tokens=False)["input_ids"],
        reward.tokenizer("The end.", add_special_tokens=False)["input_ids"],
    )
    kept = 12 - 3 - len(second)
    assert ids == [1, *first[-kept:], 2, *second, 2] and types == [0] * (kept + 2) + [1] * (len(second) + 1)
    ids, _ = pair._encode(sample("word " * 40 + "end."))  # no room for the prompt
    assert len(ids) == 12 and pair.tokenizer.decode(ids[2:-1]).endswith("end.")
    chat = load(llama_folder, max_length=9)
    assert len(chat._encode(long)[0]) == 9 and chat._encode(long)[0] == load(llama_folder)._encode(long)[0][-9:]
    reward.score([long, long])
    assert len([r for r in caplog.records if "without their beginning" in r.message]) == 3
    with pytest.raises(ConfigError, match="65 is beyond the classifier's 64 tokens"):
        load(bert_folder, label=0, max_length=65)


def test_labels_by_name_by_number_and_as_probabilities(bert_folder):
    logits = plain(bert_folder, "How many legs?\nYes.")
    for label, number in (("bad", 0), ("fair", 1), (2, 2)):
        assert load(bert_folder, label=label).score([sample("Yes.")]) == pytest.approx([logits[number]], abs=1e-5)
    softmax = torch.tensor(logits).softmax(-1)
    assert load(bert_folder, label=2, output="probability").score([sample("Yes.")]) == pytest.approx(
        [softmax[2].item()], abs=1e-5
    )
    module, tokenizer = load_classifier(str(bert_folder), "float32", "k")
    module.config = copy.deepcopy(module.config)
    module.config.problem_type = "multi_label_classification"
    several = ClassifierReward(module, tokenizer, label=2, output="probability")
    assert several.score([sample("Yes.")]) == pytest.approx([torch.tensor(logits[2]).sigmoid().item()], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"ppo.rewards.label: which of the labels is the score\? The classifier has 0 \(bad\), 1 \(fair\), 2 \(good\)"),
        ({"label": "best"}, "no label 'best'"),
        ({"label": 3}, "no label 3"),
        ({"label": 0, "input": "chat"}, "no chat template"),
        ({"label": 0, "template": "{prompt}"}, "every response would get the same score"),
        ({"label": 0, "template": "{answer}{response}"}, "nothing fills {answer}"),
    ],
)
def test_what_a_classifier_does_not_have_is_refused(bert_folder, options, message):
    with pytest.raises(ConfigError, match=message):
        load(bert_folder, **options)


def test_one_label_has_no_probability(llama_folder):
    with pytest.raises(ConfigError, match="Use output: logit"):
        load(llama_folder, output="probability")


def test_a_template_without_its_reference_names_the_sample(bert_folder):
    with pytest.raises(AccordError, match=r"ppo.rewards: the template asks for \{reference\}, but the sample p.jsonl:4"):
        load(bert_folder, label=0, template="{reference} {response}").score([sample("a")])


def test_an_empty_text_names_the_sample(llama_folder):
    reward = load(llama_folder, template="{response}")
    assert reward.input == "text"
    with pytest.raises(AccordError, match=r"text for the sample p.jsonl:4: 'How many legs\?' is empty"):
        reward.score([sample("a"), sample("")])


def test_positions_that_begin_behind_the_padding_are_not_counted(bert_folder):
    """RoBERTa with 64 position embeddings reads 62 tokens."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 400}
    module = RobertaForSequenceClassification(
        RobertaConfig(**sizes, max_position_embeddings=64, num_labels=1, pad_token_id=1)
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(bert_folder, model_max_length=10**30)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    reward = ClassifierReward(module, tokenizer)
    assert reward.max_length == 62
    long, brief = sample("word " * 100), sample("你好")
    together = reward.score([long, brief])
    assert together == pytest.approx(reward.score([long]) + reward.score([brief]), abs=1e-6)


def test_what_is_no_classifier_is_refused(tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"ppo.rewards.0.path: .* is no sequence classifier: it lacks score.weight"):
        load(tiny_folder("llama"))
    with pytest.raises(ConfigError, match=r"ppo.rewards.0.path: no such file or folder"):
        load(tmp_path / "nowhere")
