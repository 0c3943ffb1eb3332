"""A model read through packs: hidden states, log-probabilities, distributions, values and scores."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accord.data.packing import Pack, make_pack
from accord.data.trees import branching, single
from accord.models import heads
from accord.models.distribution import Distribution
from accord.models.logprobs import TokenLogprobs
from accord.models.packed import ATTENTION_NAME, SegmentLayout, packed_forward
from accord.models.precision import check_bfloat16

log = logging.getLogger(__name__)


class PackedModel:
    """Reads packs with a `transformers` model, padding-free where its architecture allows it.

    Architectures outside the attention interface are found by a self-test when the model is wrapped; they compute the same
    numbers on padded rows, one a sequence (`packed` is False then).
    """

    def __init__(self, module: nn.Module, *, precision: str = "float32") -> None:
        self.module = module
        self.inner = heads.unwrap(module)
        self.device = next(module.parameters()).device
        self.compute_dtype = torch.bfloat16 if precision == "bf16" else None
        check_bfloat16(self.compute_dtype or next(module.parameters()).dtype, self.device)
        self.packed = enable_segments(self.inner)
        self._head_is_linear = _head_is_linear(self.inner)

    # -- hidden states -----------------------------------------------------------------------------------------------

    def hidden(self, pack: Pack, embedding_noise: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states of the last layer, as ([rows, d], rows of `pack.predict`, rows of `pack.ends`)."""
        pack = pack.to(self.device)
        with self._autocast():
            hidden = _packed_hidden(self.inner, pack, embedding_noise) if self.packed else _padded_hidden(self.inner, pack)
        return self._rows(hidden, pack)

    def _rows(self, hidden: Tensor, pack: Pack) -> tuple[Tensor, Tensor, Tensor]:
        """What the backbone gave for `pack` ([1, T, d], or [S, L, d] where it was padded) as rows, and which rows are read."""
        if self.packed:
            return hidden[0], pack.predict, pack.ends
        width = hidden.shape[1]
        predict = pack.sequence * width + pack.position_ids[pack.predict]
        ends = torch.arange(pack.num_sequences, device=self.device) * width + pack.position_ids[pack.ends]
        return hidden.flatten(0, 1), predict, ends

    def _autocast(self):
        return torch.autocast(self.device.type, self.compute_dtype) if self.compute_dtype else contextlib.nullcontext()

    # -- language models ---------------------------------------------------------------------------------------------

    def token_logprobs(
        self,
        pack: Pack,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        mean: bool = False,
        embedding_noise: float | None = None,
    ) -> TokenLogprobs:
        """log π(target | what comes before, temperature) of the pack's N targets, in float32, with gradient where enabled.

        `entropy` and `mean` ask for the distribution's entropy and its mean log-probability at the same positions.
        """
        return self.distribution(pack, temperature, embedding_noise).at(pack.targets.to(self.device), entropy, mean)

    def distribution(self, pack: Pack, temperature: float = 1.0, embedding_noise: float | None = None) -> Distribution:
        """π(· | what comes before, temperature) where the pack's N targets are predicted, with gradient where enabled."""
        if self._head_is_linear:
            hidden, predict, _ = self.hidden(pack, embedding_noise)
            head = self.inner.get_output_embeddings()  # type: ignore[operator]
            return Distribution(temperature, hidden.index_select(0, predict), head.weight, head.bias, self.compute_dtype)
        with self._autocast():
            return Distribution(temperature, logits=_logits(self.inner, pack.to(self.device), self.packed, embedding_noise))

    # -- models with a scalar head -----------------------------------------------------------------------------------

    def values(self, pack: Pack) -> Tensor:
        """[N] the scalar head at `pack.predict`: V of the state before each target token. Float32."""
        hidden, predict, _ = self.hidden(pack)
        return self._scalar(hidden.index_select(0, predict))

    def scores(self, pack: Pack) -> Tensor:
        """[S] the scalar head on each sequence's last token. Float32."""
        hidden, _, ends = self.hidden(pack)
        return self._scalar(hidden.index_select(0, ends))

    def position_scores(self, pack: Pack) -> list[Tensor]:
        """S tensors [L_s]: the scalar head at every position of each sequence, from its first token to its last. Float32.

        What sequences share is computed once and stands in each of them; the last of each is what `scores` gives, but for rounding.
        """
        hidden, _, _ = self.hidden(pack)
        scores = self._scalar(hidden)
        return [scores.index_select(0, rows.to(scores.device)) for rows in self._rows_of_sequences(pack, len(hidden))]

    def _rows_of_sequences(self, pack: Pack, count: int) -> list[Tensor]:
        """For each sequence the rows of `hidden` that hold its positions. `count`: how many rows there are."""
        lengths = (pack.position_ids[pack.ends] + 1).tolist()
        if not self.packed:
            width = count // pack.num_sequences
            return [torch.arange(s * width, s * width + length) for s, length in enumerate(lengths)]
        rows, first = [], 0
        for tree in pack.trees:
            for leaf in tree.leaves:
                spans = [pack.segments[first + i][:2] for i in tree.path(leaf)]
                rows.append(torch.cat([torch.arange(start, end) for start, end in spans]))
            first += len(tree.segments)
        return rows

    def _scalar(self, hidden: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            return heads.scores(self.inner, hidden)


class FrozenModel(PackedModel):
    """A reference or reward model: the same numbers, never a gradient."""

    def __init__(self, module: nn.Module, *, precision: str = "float32") -> None:
        module.requires_grad_(False).eval()
        super().__init__(module, precision=precision)
        if self.compute_dtype is not None:
            round_linears(self.inner, self.compute_dtype)

    @torch.no_grad()
    def hidden(self, pack: Pack, embedding_noise: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return super().hidden(pack)

    @torch.no_grad()
    def token_logprobs(self, pack: Pack, **options) -> TokenLogprobs:
        return super().token_logprobs(pack, **options)

    @torch.no_grad()
    def distribution(self, pack: Pack, temperature: float = 1.0, embedding_noise: float | None = None) -> Distribution:
        return super().distribution(pack, temperature)


def round_linears(module: Any, dtype: torch.dtype) -> None:
    """Keep the weights of frozen linear layers in `dtype`: autocast would round them to it in every forward, so no number changes.

    Not the heads: a score is computed in float32, and the output embedding may be the input embedding too.
    """
    kept = {id(module.get_output_embeddings()), *(id(getattr(module, name, None)) for name in ("score", "classifier"))}
    for part in module.modules():
        if type(part) is nn.Linear and id(part) not in kept:
            part.to(dtype)
    for parameter in module.parameters():
        # Weights are pages of the file they came from. As long as one of them is, the pages of the others stay resident too.
        if parameter.dtype != dtype and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _packed_inputs(pack: Pack) -> dict:
    return {
        "input_ids": pack.input_ids[None],
        "position_ids": pack.position_ids[None],
        "use_cache": False,
        "accord_layout": SegmentLayout(pack.segments, pack.position_ids),
    }


@contextlib.contextmanager
def _noisy_embeddings(module: nn.Module, pack: Pack, alpha: float | None) -> Iterator[None]:
    """Inside, a forward over `pack` adds noise to what the embedding gives.

    The embedding is read within the forward: gradients of one read before it come after a sharded model has summed its own.
    """
    if not alpha:
        yield
        return

    def add(part: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
        return embedded + _neftune_noise(pack, embedded, alpha)

    hook = module.get_input_embeddings().register_forward_hook(add)  # type: ignore[operator]
    try:
        yield
    finally:
        hook.remove()


def _neftune_noise(pack: Pack, embedded: Tensor, alpha: float) -> Tensor:
    """Uniform noise of size α / sqrt(L d), L the length of each sequence (NEFTune, arXiv:2310.05914, §2)."""
    scale = torch.empty(len(pack), device=embedded.device)
    for (start, end, _), length in zip(pack.segments, _lengths(pack), strict=True):
        scale[start:end] = alpha / (length * embedded.shape[-1]) ** 0.5
    return (torch.rand_like(embedded) * 2 - 1) * scale[None, :, None]


def _lengths(pack: Pack) -> list[int]:
    """For each segment the length of the longest sequence it belongs to."""
    return [tree.longest for tree in pack.trees for _ in tree.segments]


def _packed_hidden(module: nn.Module, pack: Pack, embedding_noise: float | None = None) -> Tensor:
    """[1, T, d]"""
    with packed_forward(), _noisy_embeddings(module, pack, embedding_noise):
        return heads.last_hidden(module, **_packed_inputs(pack))


def _padded_batch(pack: Pack) -> tuple[Tensor, Tensor]:
    """The pack's sequences as right-padded rows: ids [S, L] and attention mask [S, L]."""
    rows = [tree.sequence(leaf) for tree in pack.trees for leaf in tree.leaves]
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row.astype("int64"))
        mask[i, : len(row)] = 1
    return ids.to(pack.input_ids.device), mask.to(pack.input_ids.device)


def _padded_hidden(module: nn.Module, pack: Pack) -> Tensor:
    ids, mask = _padded_batch(pack)
    return heads.last_hidden(module, input_ids=ids, attention_mask=mask, use_cache=False)


def _logits(module: nn.Module, pack: Pack, packed: bool, embedding_noise: float | None = None) -> Tensor:
    """[N, V] logits at `pack.predict` through the model's own forward, with its own scaling and soft-capping."""
    if packed:
        with packed_forward(), _noisy_embeddings(module, pack, embedding_noise):
            return module(**_packed_inputs(pack), logits_to_keep=pack.predict).logits[0]
    ids, mask = _padded_batch(pack)
    logits = module(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits[pack.sequence, pack.position_ids[pack.predict]]


# -- self-tests when a model is wrapped --------------------------------------------------------------------------------


def _probe_pack(module: nn.Module) -> Pack:
    """Two small trees, and one sequence longer than the attention window where that is short enough to try."""
    config = module.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr,operator]
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(0, config.vocab_size, (n,), generator=generator).tolist()  # type: ignore[union-attr]

    trees = [branching(tokens(5), [tokens(4), tokens(2)]), branching(tokens(7), [tokens(3), tokens(6)])]
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window + 8 <= 512:
        trees.append(branching(tokens(window), [tokens(8), tokens(3)]))
    trees.append(single(tokens(6), [True] * 6))
    return make_pack(trees, range(len(trees)))


@torch.no_grad()
def enable_segments(module: nn.Module) -> bool:
    """Switch `module` to segment attention if it then computes what separate forwards compute; say so and leave it alone if not.

    A list of names would not do: some architectures swallow the layout and answer wrongly.
    """
    if module.config._attn_implementation == ATTENTION_NAME:  # type: ignore[union-attr]
        return True
    before = module.config._attn_implementation  # type: ignore[union-attr]
    was_training = module.training
    module.eval()
    pack = _probe_pack(module).to(next(module.parameters()).device)
    expected = []
    try:
        for i, tree in enumerate(pack.trees):
            for leaf in tree.leaves:
                alone = make_pack([single(tree.sequence(leaf).tolist(), tree.sequence_trained(leaf).tolist())], [i]).to(
                    pack.input_ids.device
                )
                expected.append(_padded_hidden(module, alone)[0])
        reason = "its attention cannot be replaced"
        try:
            module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
            hidden = _packed_hidden(module, pack)[0]
            if len(hidden) == len(pack):
                difference = _largest_difference(pack, hidden, expected)
                if difference < (1e-3 if hidden.dtype == torch.float32 else 0.1):
                    return True
                reason = f"its packed hidden states differ by {difference:.1g}"
        except (TypeError, ValueError, NotImplementedError, RuntimeError, AttributeError, KeyError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        module.set_attn_implementation(before)  # type: ignore[operator]
        module.config._attn_implementation = before  # type: ignore[union-attr]
        log.warning(
            "%s does not take segment attention (%s): padded batches are used, slower and with the same numbers.",
            type(module).__name__,
            reason,
        )
        return False
    finally:
        module.train(was_training)


def _largest_difference(pack: Pack, hidden: Tensor, expected: list[Tensor]) -> float:
    """Over all sequences, relative to the largest hidden value."""
    worst, sequence, row = 0.0, 0, 0
    for tree in pack.trees:
        starts = []
        for segment in tree.segments:
            starts.append(row)
            row += len(segment)
        for leaf in tree.leaves:
            rows = torch.cat([torch.arange(starts[i], starts[i] + len(tree.segments[i])) for i in tree.path(leaf)])
            want = expected[sequence].float()
            got = hidden[rows.to(hidden.device)].float()
            worst = max(worst, float((got - want).abs().max() / want.abs().max().clamp_min(1e-6)))
            sequence += 1
    return worst


@torch.no_grad()
def _head_is_linear(module: nn.Module) -> bool:
    """Whether logits are just hidden · Wᵀ + b: no soft-cap, no scaling, no bias of another kind. False for a scalar model."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        return False
    ids = torch.arange(min(8, head.out_features), device=head.weight.device)[None]
    was_training = module.training
    module.eval()
    hidden = heads.last_hidden(module, input_ids=ids, use_cache=False)
    # Large hidden states would show a soft-cap that small ones hide: compare through the model's own forward and by its config.
    logits = module(input_ids=ids, use_cache=False).logits
    module.train(was_training)
    config = module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config  # type: ignore[union-attr,operator]
    if getattr(config, "final_logit_softcapping", None):
        return False
    if hidden.shape[-1] != head.in_features:
        return False
    return bool(torch.allclose(logits.float(), head(hidden).float(), rtol=1e-3, atol=1e-3 * float(logits.float().abs().max())))
