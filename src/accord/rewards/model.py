"""A reward that is a trained reward model: `{type: model}`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from accord.data.packing import Pack, pack_trees
from accord.errors import AccordError
from accord.rewards.base import Sample
from accord.rewards.grouping import prompt_trees

if TYPE_CHECKING:
    from torch import Tensor

    from accord.data.template import ConversationEncoder
    from accord.models.normalization import Normalization

log = logging.getLogger(__name__)


class Scorer(Protocol):
    """A model that scores the last token of every sequence of a pack."""

    def scores(self, pack: Pack) -> Tensor: ...  # [S]


def same_tokens(a: Any, b: Any) -> bool:
    """Whether token ids of tokenizer `a` mean the same to a model of tokenizer `b`, with conversations written alike."""
    return a is b or (a.get_vocab() == b.get_vocab() and a.chat_template == b.chat_template)


class ModelReward:
    """Scores responses with a reward model, on the very tokens that were sampled.

    When its tokenizer (or chat template) is another one, `encoder` is the reward model's, and the conversation is handed over as
    text: rendered and encoded as the reward model was trained. A response cut by the length limit gets no end token there either.

    With `normalization` (mean and deviation of the model's scores, as its training measured them) a score is (s - mean) / std.
    Sequences longer than `max_length` lose the oldest tokens of their prompt. The score of a response is the same whatever is
    scored beside it.
    """

    def __init__(
        self,
        model: Scorer,
        *,
        max_tokens: int,
        max_length: int | None = None,
        encoder: ConversationEncoder | None = None,
        normalization: Normalization | None = None,
        weight: float = 1.0,
        name: str = "model",
        each: Callable[[Sequence[Pack], Callable[[Pack], list[float]]], list[list[float]]] | None = None,
    ) -> None:
        """`each`: calls a function for every pack, in a group each process for its share of them."""
        self.model, self.encoder, self.weight, self.name = model, encoder, weight, name
        self.max_tokens, self.max_length, self.normalization = max_tokens, max_length, normalization
        self.divides, self._each = each is not None, each or (lambda packs, read: [read(pack) for pack in packs])
        self._warned = False

    def score(self, samples: Sequence[Sample]) -> list[float]:
        sequences = [self._tokens(sample) for sample in samples]
        trees, members = prompt_trees([p for p, _ in sequences], [r for _, r in sequences], self.max_tokens)
        scores = [0.0] * len(samples)
        # In the reward model's own tokens a sequence may be longer than the policy's budget: it then has a pack to itself.
        packs = pack_trees(trees, max([self.max_tokens, *(tree.num_tokens for tree in trees)]))
        for pack, found in zip(packs, self._each(packs, lambda pack: self.model.scores(pack).tolist()), strict=True):
            numbers = [number for tree in pack.tree_index for number in members[tree]]
            for number, score in zip(numbers, found, strict=True):
                scores[number] = score if self.normalization is None else self.normalization.apply(score)
        return scores

    def _tokens(self, sample: Sample) -> tuple[list[int], list[int]]:
        """(prompt, response) in the reward model's tokens."""
        if self.encoder is None:
            prompt, response = list(sample.prompt_ids), list(sample.response_ids)
        else:
            prompt, response = self._encode(sample)
        if self.max_length is None or len(prompt) + len(response) <= self.max_length:
            return prompt, response
        if len(response) > self.max_length:
            raise AccordError(
                f"the response to {sample.name} has {len(response):,} tokens of the reward model, which takes {self.max_length:,}. "
                "Lower generate.max_new_tokens, or raise reward_model.max_length if the model allows it."
            )
        if not self._warned:
            log.warning(
                "Sequences longer than the %s tokens of the reward model are scored without their oldest tokens.", self.max_length
            )
            self._warned = True
        return prompt[len(prompt) + len(response) - self.max_length :], response

    def _encode(self, sample: Sample) -> tuple[list[int], list[int]]:
        assert self.encoder is not None
        tree = self.encoder.encode_responses(sample.prompt.messages, [sample.response])
        (leaf,) = tree.leaves
        response = tree.segments[leaf].tokens.tolist()
        prompt = tree.sequence(leaf).tolist()[: -len(response)] if response else tree.sequence(leaf).tolist()
        if sample.truncated and response and response[-1] in self.encoder.stop_token_ids:
            response.pop()
        return prompt, response
