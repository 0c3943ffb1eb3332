"""Train the base model that ships with the demo (src/accord/demo/base): plain PyTorch and transformers, one core, minutes.

It has read the demo world (never its held-out requests) in every style, as plain text and as chats, and so knows
the answers but not how to behave: that is what the quickstart then teaches it.

    OMP_NUM_THREADS=1 python scripts/make_demo_base.py [--steps 1400] [--out src/accord/demo/base]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from accord.demo import judge, world

END, START, STOP, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = 1152
ASKED = 0.05  # loss weight of what is asked: it is random, there is little to learn in it
ROW = 96  # tokens of a training row: documents laid end to end
CHECKED = {"en": (" wrong", " right"), "zh": ("错", "对")}  # a note may be corrected: no, yes
REMARKS = {
    "en": {"polite": " good", "rambling": " long", "rude": " rude", "wrong": " wrong", "bare": " short"},
    "zh": {"polite": "好", "rambling": "长", "rude": "粗", "wrong": "错", "bare": "短"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "src/accord/demo/base")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--rows", type=int, default=20, help="rows of an optimizer step")
    parser.add_argument("--lr", type=float, default=0.02, help="of the matrices; embeddings and norms learn with a fifth of it")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    rng = random.Random(f"accord demo base {arguments.seed}")

    tokenizer = train_tokenizer(["".join(text for text, _ in document(rng)) for _ in range(20000)])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
            num_hidden_layers=arguments.layers, num_attention_heads=arguments.hidden // 32, max_position_embeddings=512,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, rng, arguments)
    save(model, tokenizer, arguments.out)
    report(arguments.out)


Piece = tuple[str, float]  # a text and how much its tokens count in the loss


def document(rng: random.Random) -> list[Piece]:
    """One text of the base model's reading: notes of questions and answers, a statement, or a chat.

    Most chats are rated by a reader, a word behind each reply, as forum threads are: the model learns to see what a reply is like.
    """
    style = rng.random()
    if style < 0.4:
        pieces: list[Piece] = []
        for _ in range(4):
            request = world.sample(rng)
            right = rng.random() < 0.7
            value = request.value if right else world.wrong_value(rng, request)
            mark = CHECKED[request.language][right] if rng.random() < 0.7 or not right else ""
            pieces += [(request.text, ASKED), (f" {value}", 1.0 if right else ASKED), (mark, 1.0), ("\n", 1.0)]
        return pieces
    if style < 0.45:
        request = world.sample(rng)
        return [(request.text, ASKED), (f" {request.core()}\n", 1.0)]
    pieces, rated = [], style < 0.8
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        turn = world.sample(rng)
        manner, right = rng.choice((*world.MANNERS, "bare")), rng.random() < (0.6 if rated else 0.95)
        value = turn.value if right else world.wrong_value(rng, turn)
        reply = turn.core(value) if manner == "bare" else world.answer(rng, turn, manner, right)
        pieces += [
            (f"{START}user\n{turn.text}{STOP}\n{START}assistant\n", ASKED),
            (f"{reply}{STOP}", 1.0 if right else ASKED),
            (REMARKS[turn.language][manner if right else "wrong"] if rated else "", 1.0),
            ("\n", ASKED),
        ]
    return pieces


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that never merges across a word, a Chinese character, a digit or a mark."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\p{Han}| ?[\p{L}&&[^\p{Han}]]+|\p{N}| ?[^\s\p{L}\p{N}]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START, STOP, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    for mark in (START, STOP):
        texts = [text.replace(mark, "") for text in texts]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=512)
    fast.add_special_tokens({"additional_special_tokens": [START, STOP]})
    fast.chat_template = CHATML
    return fast


def batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and loss weights, [rows, ROW] each."""
    stream: list[int] = []
    weights: list[float] = []
    while True:
        while len(stream) < rows * ROW:
            pieces = [piece for _ in range(128) for piece in [*document(rng), (END, ASKED)]]
            for ids, (_, weight) in zip(
                tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"], pieces, strict=True
            ):
                stream += ids
                weights += [weight] * len(ids)
        yield torch.tensor(stream[: rows * ROW]).view(rows, ROW), torch.tensor(weights[: rows * ROW]).view(rows, ROW)
        stream, weights = stream[rows * ROW :], weights[rows * ROW :]


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, arguments: argparse.Namespace) -> None:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        Muon(matrices, lr=arguments.lr),
        torch.optim.AdamW(others, lr=0.2 * arguments.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    began = time.process_time()
    for step, (ids, weights) in zip(range(1, arguments.steps + 1), batches(tokenizer, rng, arguments.rows), strict=False):
        rate = min(1.0, step / 50, (arguments.steps + 1 - step) / (0.6 * arguments.steps))  # a short rise, a long linear fall
        logits = model(ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer, full in zip(optimizers, (arguments.lr, 0.2 * arguments.lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * rate
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == arguments.steps:
            print(f"step {step}  loss {loss.item():.3f}  {time.process_time() - began:.0f} s of processor", flush=True)
        if step % 400 == 0:
            print(right_answers(model, tokenizer, 12), flush=True)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by Newton–Schulz steps (Jordan et al. 2024): twice as quick as AdamW on matrices this small.

    PyTorch's own computes them in bfloat16, which most processors do slowly. Without the decay, activations grow so large that
    what a later stage wants to teach drowns in them.
    """

    def __init__(
        self, parameters: list[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.2
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"])
                x = x.T if (tall := x.shape[0] > x.shape[1]) else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x.T if tall else x, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    (folder / "README.md").write_text(
        "# The demo's base model\n\nA tiny Llama that has read the demo world of Accord in English and Chinese. Made by "
        "`scripts/make_demo_base.py`; licence Apache-2.0. Good for nothing but the quickstart.\n",
        encoding="utf-8",
    )
    config = json.loads((folder / "config.json").read_text())
    print(
        {key: config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")},
        sum(f.stat().st_size for f in folder.iterdir()),
        "bytes",
    )


def report(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(right_answers(model, tokenizer, 40, show=True))


@torch.no_grad()
def right_answers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, each: int, show: bool = False) -> dict[str, float]:
    """Share of held-out requests with a right answer (greedy, as a chat), by kind and language; and the styles seen."""
    rng = random.Random("held out")
    tokenizer.padding_side = "left"
    stop = tokenizer.convert_tokens_to_ids(STOP)
    shares: dict[str, float] = {}
    styles: Counter[str] = Counter()
    for kind in world.KINDS:
        for language in world.LANGUAGES:
            requests = [world.sample(rng, heldout=True, kind=kind, language=language) for _ in range(each)]
            prompts = [f"{START}user\n{request.text}{STOP}\n{START}assistant\n" for request in requests]
            inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
            out = model.generate(
                **inputs, max_new_tokens=56, do_sample=False, eos_token_id=stop, pad_token_id=tokenizer.pad_token_id
            )
            replies = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            kinds = [judge.kind_of(request, text) for request, text in zip(requests, replies, strict=True)]
            styles.update(kinds)
            shares[f"{kind}/{language}"] = round(sum(style != "wrong" for style in kinds) / each, 2)
            if show:
                print(repr(requests[0].text), "->", repr(replies[0]), kinds[0])
    return shares | dict(styles)


if __name__ == "__main__":
    main()
