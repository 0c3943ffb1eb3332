"""The chat templates that come with Accord, for models that have none of their own (`model.chat_template`).

The chosen one is set on the tokenizer, so that it is saved with the model and whoever serves it writes the same text.
"""

from __future__ import annotations

import logging
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA3 = (
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

# The space after "Assistant:" is left to the answer: " Yes" is one token for most tokenizers, and the prompt then ends as it does when generating.
HUMAN_ASSISTANT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '\\n\\nHuman: ' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}{{ '\\n\\nAssistant: ' + message['content'] | trim + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] | trim }}"
    "{% else %}{{ raise_exception('the human-assistant template has no place for a ' + message['role'] + ' turn') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)

ALPACA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}"
    "{% else %}{{ 'Below is an instruction that describes a task. Write a response that appropriately completes the request.' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '\\n\\n### Instruction:\\n' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}{{ '\\n\\n### Response:\\n' + message['content'] | trim + eos_token }}"
    "{% elif message['role'] != 'system' %}{{ raise_exception('the alpaca template has no place for a ' + message['role'] + ' turn') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif %}"
)

TEMPLATES: dict[str, str] = {"chatml": CHATML, "llama3": LLAMA3, "human-assistant": HUMAN_ASSISTANT, "alpaca": ALPACA}
_NEEDED_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "human-assistant": (),
    "alpaca": (),
}


def set_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    """Give `tokenizer` the chat template and return what to call it in messages.

    `template`: a name of TEMPLATES, Jinja text, a file of it, or None: the tokenizer's own, and for one without: chatml where the
    tokenizer has its tokens, else human-assistant, which needs none.
    Raises ConfigError for an unknown name and for a named template whose special tokens the tokenizer lacks.
    """
    if template is None:
        if tokenizer.chat_template:
            return "the tokenizer's own chat template"
        template = "chatml" if all(_has_token(tokenizer, token) for token in _NEEDED_TOKENS["chatml"]) else "human-assistant"
        log.warning("The tokenizer has no chat template; using %s. Name one with model.chat_template to choose.", template)
    if template in TEMPLATES:
        _check_tokens(tokenizer, template)
        text = TEMPLATES[template]
        if adds_bos(tokenizer):  # so that those who serve the template write it too
            text = "{{ bos_token }}" + text
        tokenizer.chat_template = text
        return f"the chat template {template}"
    if "{{" in template or "{%" in template:
        tokenizer.chat_template = template
        return "the chat template of model.chat_template"
    path = Path(template).expanduser()
    if path.is_file():
        tokenizer.chat_template = path.read_text(encoding="utf-8-sig")
        return f"the chat template {template}"
    near = get_close_matches(template, TEMPLATES, n=1)
    raise ConfigError(
        f"model.chat_template: {template!r} is neither a known template, nor a file, nor Jinja text."
        + (f" Did you mean {near[0]}?" if near else f" Known: {', '.join(TEMPLATES)}.")
    )


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts its BOS before a text."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return False
    ids: list[int] = tokenizer("a", add_special_tokens=True)["input_ids"]
    return ids[:1] == [bos]


def _check_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    missing = [token for token in _NEEDED_TOKENS[template] if not _has_token(tokenizer, token)]
    if missing:
        raise ConfigError(
            f"model.chat_template: {template} needs the token{'s' if len(missing) > 1 else ''} {', '.join(missing)}, which the tokenizer "
            "does not have. Use human-assistant or alpaca, which need none."
        )
    if template in ("human-assistant", "alpaca") and tokenizer.eos_token is None:
        raise ConfigError(f"model.chat_template: {template} ends an answer with the EOS token, and the tokenizer has none.")


def _has_token(tokenizer: Any, token: str) -> bool:
    return token in tokenizer.get_added_vocab() or token in tokenizer.all_special_tokens
