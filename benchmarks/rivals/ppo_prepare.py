"""Makes what every system reads, once: the four models' folders and the prompts. Runs under Accord's Python.

    {"folder", "case": fields of a Case, "model": folder or null, "data": file}  →  {"pad", "eos", "prompt_tokens", "cpu"}

FOLDER/policy is also the reference; FOLDER/reward and FOLDER/critic are classifiers on the policy's backbone with random heads.
FOLDER/prompts.json holds tokens and texts. A process of its own, so that the one that waits for turns stays small.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from worker import answer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from base_models import smollm2, tiny_llama
from machine_floor import cpu_name
from ppo_cases import TooFewPromptsError, between, exactly, faithful

END_OF_TEXT = "<|endoftext|>"


def work(settings: dict[str, Any]) -> dict[str, Any]:
    from accord.data.reading import read_records
    from accord.data.template import ConversationEncoder

    logging.disable(logging.WARNING)
    folder, case = Path(settings["folder"]), settings["case"]
    records = list(read_records(Path(settings["data"]), "prompt", on_bad_row="drop"))
    model = Path(settings["model"]) if settings["model"] else None
    tokenizer = save_models(folder, case["model"], model, records)
    encoder = ConversationEncoder(tokenizer, None)
    candidates = [encoder.encode_prompt(record.messages) for record in records]
    shortest, longest = case["prompt_tokens"]
    try:
        if shortest == longest:
            cut = (list(ids[-longest:]) for ids in candidates if len(ids) >= longest)
            if case["method"] == "grpo":  # TRL's GRPO takes text
                cut = faithful(cut, tokenizer.decode, lambda text: tokenizer(text)["input_ids"])
            prompts = exactly(cut, case["prompts"], longest)
        else:
            prompts = between(candidates, case["prompts"], shortest, longest)
    except TooFewPromptsError as error:
        raise SystemExit(f"error: {case['name']}: {error}") from error
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    (folder / "prompts.json").write_text(json.dumps({"tokens": prompts, "texts": texts}), encoding="utf-8")
    return {"pad": tokenizer.pad_token, "eos": tokenizer.eos_token, "prompt_tokens": sum(map(len, prompts)), "cpu": cpu_name()}


def save_models(folder: Path, name: str, model: Path | None, records: list[Any]) -> Any:
    """The folders, and the tokenizer: with a pad token that ends nothing, which TRL needs and Accord does not look at."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

    from accord.models.scratch import train_tokenizer

    if name == "tiny":
        tokenizer = train_tokenizer((message.content for record in records for message in record.messages), 4096)
        policy = tiny_llama(eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    else:
        source = smollm2(model)
        tokenizer = AutoTokenizer.from_pretrained(source)
        policy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        if END_OF_TEXT not in tokenizer.get_vocab():
            raise SystemExit(f"error: the model's tokenizer has no pad token of its own, and no {END_OF_TEXT} to take for it")
        tokenizer.pad_token = END_OF_TEXT
    policy.config.pad_token_id = tokenizer.pad_token_id
    # Nothing but the tokens: transformers would let temperature or top_p from here into TRL's sampling.
    policy.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    save(policy, tokenizer, folder / "policy")
    policy.config.num_labels = 1
    for seed, part in enumerate(("reward", "critic")):
        torch.manual_seed(seed)
        classifier = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1, dtype=torch.float32)
        torch.nn.init.normal_(classifier.score.weight, std=policy.config.hidden_size**-0.5)
        save(classifier, tokenizer, folder / part)
    return tokenizer


def save(module: Any, tokenizer: Any, folder: Path) -> None:
    """As `transformers` saves it, and readable by its fourth version as well, which looks elsewhere for the rotary base."""
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rotary = config.get("rope_parameters") or {}
    if rotary.get("rope_type", "default") != "default":
        raise SystemExit(
            f"error: {config['model_type']} with {rotary['rope_type']} rotary positions: TRL 0.24 would read other ones"
        )
    if "rope_theta" in rotary:
        config["rope_theta"] = rotary["rope_theta"]
    config["torch_dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


if __name__ == "__main__":
    answer(work)
