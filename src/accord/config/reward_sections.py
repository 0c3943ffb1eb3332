"""The sources of `ppo.rewards`, one class a type (docs/rewards.md). Rules between their keys are in `reward_rules.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from accord.config.fields import Count, Dtype, EnvName, FunctionPath, MetricName, Natural, NonNegative, Positive, Section, Text

Fallback = float | None
FALLBACK = (
    "Score of a sample that the source cannot score (counted in ppo/reward_fallbacks); null: the run stops and names the sample."
)


class RewardSection(Section):
    """What every source has."""

    type: str = Field(description="The kind of source.")
    weight: float = Field(default=1.0, description="What the score counts for in the sum; 0: it is only logged.")
    name: MetricName | None = Field(
        default=None, description="Its name in ppo/score/<name>; null: the type (of a function: the function's name)."
    )


class ModelReward(RewardSection):
    """Scores from reward_model.path."""

    type: Literal["model"] = Field(default="model", description="A trained reward model.")
    normalize: bool = Field(
        default=False,
        description="Shift and scale scores by the mean and deviation that accord reward measured (in its config.json).",
    )


class ClassifierReward(RewardSection):
    """Scores from any transformers sequence classifier, with its own tokenizer."""

    type: Literal["classifier"] = Field(default="classifier", description="A sequence classifier.")
    path: Text = Field(description="Model folder or hub id.")
    label: str | Natural | None = Field(
        default=None, description="Which label's score counts, by name or number; needed where there are several."
    )
    output: Literal["logit", "probability"] = Field(
        default="logit", description="The label's logit, or its probability among the labels."
    )
    input: Literal["auto", "chat", "pair", "text"] = Field(
        default="auto",
        description="How it is asked. chat: its tokenizer's chat template. pair: prompt and response as two texts. text: template. "
        "auto: chat where its tokenizer has a template, else text.",
    )
    template: Text | None = Field(
        default=None,
        description="The text it reads, with {response} and perhaps {prompt}, {conversation}, {reference}; "
        "null: prompt, new line, response.",
    )
    max_length: Count | None = Field(
        default=None, description="Longest text in its tokens; longer ones lose their beginning; null: its context."
    )
    batch_size: Count = Field(default=16, description="Texts computed at once.")
    dtype: Dtype = Field(default="float32", description="Type of its weights.")


class FunctionReward(RewardSection):
    """Scores from a Python function, called with what it names of a sample: prompt, response, reference, meta, messages …"""

    type: Literal["function"] = Field(default="function", description="A Python function, ordinary or async.")
    path: FunctionPath = Field(description="module:function")
    per_token: bool = Field(
        default=False, description="It gives a list with one number for each response token instead of one number."
    )
    timeout: Positive | None = Field(default=None, description="Seconds that one call may take; null: no limit.")
    concurrency: Count | None = Field(default=None, description="Calls of an async function under way at once; null: 16.")
    fallback: Fallback = Field(default=None, description=FALLBACK)


class RemoteReward(RewardSection):
    """Scores from a service that is sent samples as JSON."""

    type: Literal["remote"] = Field(default="remote", description="An HTTP service.")
    url: Text = Field(description="Where samples are sent with POST.")
    headers_env: dict[str, EnvName] = Field(
        default={}, description="Header → environment variable that holds its value: {Authorization: MY_TOKEN}."
    )
    batch_size: Count = Field(default=16, description="Samples of one request.")
    concurrency: Count = Field(default=4, description="Requests under way at once.")
    timeout: Positive = Field(default=60.0, description="Seconds that one attempt may take.")
    retries: Natural = Field(default=3, description="Further attempts after no answer, 408, 429 or 5xx, with growing waits.")
    fallback: Fallback = Field(default=None, description=FALLBACK)


class JudgeReward(RewardSection):
    """Scores from a language model behind an OpenAI-compatible chat endpoint."""

    type: Literal["judge"] = Field(default="judge", description="A language model as the judge.")
    base_url: Text = Field(description="The API's address without /chat/completions, such as http://127.0.0.1:8000/v1.")
    model: Text = Field(description="Name of the model there.")
    api_key_env: EnvName | None = Field(default=None, description="Environment variable that holds the key; null: none is sent.")
    template: Text | None = Field(
        default=None,
        description="What it is asked: a text, or a file of it, with {response} and perhaps {prompt}, {conversation}, {reference}, "
        "{low}, {high}; null: a general one. The answer must hold one line `Score: <number>`.",
    )
    scale: Annotated[tuple[float, float], Strict(False)] = Field(
        default=(0.0, 5.0), description="Lowest and highest score; a number outside is no score. The score counts as it is."
    )
    temperature: NonNegative = Field(default=0.0, description="Temperature of its sampling.")
    max_tokens: Count = Field(default=512, description="Longest reply.")
    concurrency: Count = Field(default=8, description="Requests under way at once.")
    timeout: Positive = Field(default=60.0, description="Seconds that one attempt may take.")
    retries: Natural = Field(default=3, description="Further attempts after no answer, 408, 429 or 5xx, with growing waits.")
    fallback: Fallback = Field(default=None, description=FALLBACK)


class LengthReward(RewardSection):
    """0 for a response of a wanted length, less in proportion to what is missing or too much."""

    type: Literal["length"] = Field(default="length", description="The number of response tokens.")
    min_tokens: Count | None = Field(default=None, description="Shorter responses lose (min_tokens - n) / min_tokens.")
    max_tokens: Count | None = Field(default=None, description="Longer responses lose (n - max_tokens) / max_tokens.")


class RepetitionReward(RewardSection):
    """Minus the share of repeated n-grams of the response tokens."""

    type: Literal["repetition"] = Field(default="repetition", description="The share of repeated n-grams.")
    ngram: Count = Field(default=4, description="Tokens of one n-gram.")


class FormatReward(RewardSection):
    """1 for a response of the wanted form, else 0."""

    type: Literal["format"] = Field(default="format", description="A regular expression, or valid JSON.")
    pattern: Text | None = Field(default=None, description="Regular expression; (?s) at its start lets . match line ends.")
    match: Literal["full", "search"] = Field(
        default="full", description="full: the pattern describes the whole response. search: some part of it."
    )
    valid: Literal["json"] | None = Field(default=None, description="json: the whole response is one valid JSON value.")
    timeout: Positive = Field(default=5.0, description="Seconds that one match may take.")
    fallback: Fallback = Field(default=None, description=FALLBACK)


class HumanReward(RewardSection):
    """Scores that people gave, looked up by the texts of prompt and response."""

    type: Literal["human"] = Field(default="human", description="Judgements in a file.")
    path: Text = Field(description='JSON lines {"prompt", "response", "score"}; several judgements of a response: their mean.')
    fallback: Fallback = Field(
        default=None,
        description="Score of a response that nobody has judged (counted in ppo/reward_fallbacks); null: the run stops and names it.",
    )


RewardSource = Annotated[
    ModelReward
    | ClassifierReward
    | FunctionReward
    | RemoteReward
    | JudgeReward
    | LengthReward
    | RepetitionReward
    | FormatReward
    | HumanReward,
    Field(discriminator="type"),
]
