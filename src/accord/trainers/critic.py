"""PPO's value function in its variants: a model of its own, one with another tokenizer, an adapter on the actor's base, a head on its trunk.

All are trained, saved and resumed alike; `make_critic` chooses (docs/algorithms/ppo.md, "The critic").
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from accord.data.alignment import characters_before, first_beyond
from accord.data.packing import Pack, pack_trees
from accord.data.template import ConversationEncoder
from accord.engine.trained import TrainedModel
from accord.errors import AccordError, ConfigError, DataError
from accord.models import shared
from accord.models.heads import backbone, context_length, new_score_head
from accord.models.load import LoadedModel, load_scalar, load_tokenizer
from accord.models.lora import active_adapter
from accord.models.save import save_model, whole_folder
from accord.models.shared import CRITIC, REWARD, AdapterScorer, head_in_float32
from accord.rewards.base import Sample
from accord.rewards.grouping import prompt_trees
from accord.trainers.common import card

if TYPE_CHECKING:
    from accord.config import Config

log = logging.getLogger(__name__)


class Critic(TrainedModel):
    """V(x, y_<t) from weights of its own, on the policy's tokens. The variants below keep its interface."""

    may_be_sharded = True  # False: processes read it different numbers of times
    shares_trunk = False  # True: read it `beside_policy`, so that one forward and one backward serve both

    def __init__(
        self, loaded: LoadedModel, config: Config, total_steps: int, parameters: dict[str, nn.Parameter] | None = None
    ) -> None:
        super().__init__(
            loaded,
            config.train,
            total_steps=total_steps,
            lr=config.critic.lr,
            ema=False,
            parameters=parameters,
            shard=self.may_be_sharded,
        )
        self.config = config

    def see(self, samples: Sequence[Sample]) -> None:
        """The responses that `values` will be asked about from now on. Only a critic that reads them as text needs to know."""

    @contextmanager
    def beside_policy(self) -> Iterator[None]:
        """Inside, where the trunk is the actor's, the policy's forward over a pack serves `values` too. Elsewhere nothing changes."""
        yield

    def save(self, folder: Path, stop_token_ids: Sequence[int]) -> None:
        """RUN/critic. `stop_token_ids` are the policy's."""
        save_model(self.loaded, folder, stop_token_ids=stop_token_ids, card=card(self.config, "ppo"))


# ---------------------------------------------------------------------------------------------------- another tokenizer


@dataclass(frozen=True)
class Reading:
    """A sample as the critic reads it."""

    prompt: list[int]  # in the critic's tokens
    response: list[int]  # with what ends the turn, even where the policy was cut: the state at the end comes before it
    rows: Tensor  # [T] which of the response's tokens each of the policy's T response tokens is valued before


class TextCritic(Critic):
    """A critic with another tokenizer: the conversation is handed over as text, in its own template.

        V(x, y_<t) = v(the critic's tokens before the first one that ends after character a_t of the response)

    with a_t the characters that y_<t have completed (`characters_before`). All it has read lies within y_<t: where its tokens do not
    end at a_t it stands a little earlier, never later. The end token is valued at the end of the text. Gradients take the way back.

    Sequences longer than its context lose the oldest tokens of their prompt.
    """

    may_be_sharded = False

    def __init__(self, loaded: LoadedModel, config: Config, total_steps: int, policy_tokenizer: Any) -> None:
        super().__init__(loaded, config, total_steps)
        self.encoder = ConversationEncoder(loaded.tokenizer, None)
        self._policy_tokenizer = policy_tokenizer
        self._max_tokens, self._max_length = config.train.max_tokens, context_length(loaded.module)
        self._readings: dict[tuple[bytes, int], Reading] = {}
        self._warned = False

    def see(self, samples: Sequence[Sample]) -> None:
        known, self._readings = self._readings, {}
        for sample in samples:
            key = _key([*sample.prompt_ids, *sample.response_ids], len(sample.response_ids))
            self._readings[key] = known.get(key) or self._read(sample)

    def values(self, pack: Pack) -> Tensor:
        """[N] V of the state before each of the policy's tokens. Float32. Raises ValueError for a sequence not `see`n."""
        readings = [
            self._reading(tree.sequence(leaf), int(tree.sequence_trained(leaf).sum()))
            for tree in pack.trees
            for leaf in tree.leaves
        ]
        trees, members = prompt_trees([r.prompt for r in readings], [r.response for r in readings], self._max_tokens)
        values: dict[int, Tensor] = {}
        # In the critic's own tokens a sequence may be longer than the policy's budget: it then has a pack to itself.
        for own in pack_trees(trees, max([self._max_tokens, *(tree.num_tokens for tree in trees)])):
            found = super().values(own).split(own.target_counts.tolist())
            values.update(zip((number for tree in own.tree_index for number in members[tree]), found, strict=True))
        if not readings:
            return torch.zeros(0, device=self.device)
        return torch.cat([values[i].index_select(0, reading.rows.to(self.device)) for i, reading in enumerate(readings)])

    def save(self, folder: Path, stop_token_ids: Sequence[int]) -> None:
        super().save(folder, self.encoder.stop_token_ids)

    def _reading(self, tokens: np.ndarray, trained: int) -> Reading:
        try:
            return self._readings[_key(tokens, trained)]
        except KeyError:
            raise ValueError("the critic has not seen this response: give the experience's samples to `see` first") from None

    def _read(self, sample: Sample) -> Reading:
        try:
            prompt, response, read = self.encoder.encode_answer(sample.prompt.messages, sample.response)
        except DataError as error:
            raise AccordError(f"the critic can't read the response to {sample.name}: {error}") from error
        limit = self._max_length
        if limit is not None and len(prompt) + len(response) > limit:
            if len(response) >= limit:
                raise AccordError(
                    f"the response to {sample.name} has {len(response):,} tokens of the critic, which takes {limit:,}. "
                    "Lower generate.max_new_tokens, or use a critic with a longer context."
                )
            if not self._warned:
                log.warning("Sequences longer than the %s tokens of the critic are valued without their oldest tokens.", limit)
                self._warned = True
            prompt = prompt[len(prompt) + len(response) - limit :]
        starts = characters_before(sample.response_ids, self._decode, sample.response)
        return Reading(prompt, response, torch.from_numpy(first_beyond(read, starts)))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._policy_tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _key(tokens: Sequence[int] | np.ndarray, response: int) -> tuple[bytes, int]:
    return np.asarray(tokens, dtype=np.int32).tobytes(), response


# ------------------------------------------------------------------------------------------ an adapter on the actor's base


class AdapterCritic(Critic):
    """A critic that is a LoRA adapter and a float32 head on the base that the actor's adapter stands on.

    Forward and backward run under its adapter: with gradient checkpointing the backward computes the forward again.
    """

    def __init__(self, policy: TrainedModel, head: nn.Linear, config: Config, total_steps: int) -> None:
        own = shared.adapter_parameters(policy.module, CRITIC, head)
        super().__init__(policy.loaded, config, total_steps, own)
        self.head = head

    def hidden(self, pack: Pack, embedding_noise: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        with active_adapter(self.module, CRITIC):
            return super().hidden(pack, embedding_noise)

    def _scalar(self, hidden: Tensor) -> Tensor:
        return head_in_float32(self.head, hidden)

    def backward(self, loss: Tensor) -> None:
        with active_adapter(self.module, CRITIC):
            super().backward(loss)

    def save(self, folder: Path, stop_token_ids: Sequence[int]) -> None:
        """RUN/critic: the adapter with its head, as peft writes those of a classifier. `critic.path` takes it."""
        with whole_folder(folder) as beside:
            shared.save_scalar_adapter(self.module, CRITIC, self.head, beside)
            (beside / "README.md").write_text(card(self.config, "ppo"), encoding="utf-8")


# ------------------------------------------------------------------------------------------------ a head on the actor's trunk


class HeadCritic(Critic):
    """A float32 linear head on the actor's own hidden states; only the head has an optimizer here.

        with critic.beside_policy():
            out = policy.token_logprobs(pack)
            values = critic.values(pack)                    # no second forward
            policy.backward(policy_loss + value_coef * value_loss)

    The value loss reaches the trunk through the policy's backward, and the policy's optimizer makes the step; with
    `critic.trunk_gradient: false` it ends at the head. Where the policy's forward had no gradient (the critic's warm-up), so it does.
    """

    shares_trunk = True

    def __init__(self, policy: TrainedModel, config: Config, total_steps: int) -> None:
        width = policy.inner.get_output_embeddings().weight.shape[1]
        self.head = new_score_head(width, config.run.seed, policy.device)
        super().__init__(policy.loaded, config, total_steps, dict(self.head.named_parameters()))
        self.trunk_gradient = config.critic.trunk_gradient
        self._beside = False
        self._left: Tensor | None = None  # what the policy's forward left

    @contextmanager
    def beside_policy(self) -> Iterator[None]:
        """Inside, `values` reads the hidden states of the first forward of the policy, which must be over the same pack."""

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._left is None:  # later ones are the reference's
                self._left = output.last_hidden_state

        hook = backbone(self.module).register_forward_hook(keep)
        self._beside, self._left = True, None
        try:
            yield
        finally:
            hook.remove()
            self._beside, self._left = False, None

    def hidden(self, pack: Pack, embedding_noise: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Raises RuntimeError where a gradient would reach the trunk behind the policy's back, or no forward was left."""
        if not self._beside:
            if torch.is_grad_enabled() and self.trunk_gradient:
                raise RuntimeError("a critic on the actor's trunk learns beside it: use `with critic.beside_policy():`")
            with torch.no_grad():
                return super().hidden(pack, embedding_noise)
        if self._left is None or (self.packed and self._left.shape[1] != len(pack)):
            raise RuntimeError("the policy has not read this pack inside `beside_policy`")
        return self._rows(self._left if self.trunk_gradient else self._left.detach(), pack.to(self.device))

    def _scalar(self, hidden: Tensor) -> Tensor:
        return head_in_float32(self.head, hidden)

    def save(self, folder: Path, stop_token_ids: Sequence[int]) -> None:
        """RUN/critic: the head alone (value_head.safetensors); its trunk is RUN/model."""
        with whole_folder(folder) as beside:
            save_file({name: p.detach().cpu() for name, p in self.head.named_parameters()}, beside / "value_head.safetensors")
            text = (
                card(self.config, "ppo")
                + "\nA value head: V = weight · h, h the last hidden state of `../model` before each token.\n"
            )
            (beside / "README.md").write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ which one it is


def make_critic(config: Config, policy: TrainedModel, total_steps: int) -> Critic:
    """The critic that the configuration describes, for `total_steps` optimizer steps.

    - `critic.share_trunk`: a head on the actor's trunk;
    - with LoRA, where `critic.path` names an adapter over the actor's base (RUN/adapter, RUN/critic) or nothing: an adapter beside the actor's;
    - else a model of its own, from `critic.path` or the policy's start; with another tokenizer it reads text.

    Raises ConfigError for what does not go together.
    """
    if config.critic.share_trunk:
        return HeadCritic(policy, config, total_steps)
    path, lora = config.critic.path, config.model.lora
    adapter = _on_the_base(config, "critic", path)
    if adapter is not None:
        head = shared.load_adapter(policy.module, CRITIC, adapter, seed=config.run.seed, trainable=True)
        return AdapterCritic(policy, head, config, total_steps)
    if lora is not None and _share_base(config) is not False and path in (None, config.model.path):
        return AdapterCritic(policy, shared.new_adapter(policy.module, CRITIC, lora, seed=config.run.seed), config, total_steps)
    return _own_critic(config, policy, total_steps)


def _own_critic(config: Config, policy: TrainedModel, total_steps: int) -> Critic:
    model = config.model
    path = config.critic.path or str(model.path)
    if model.lora is not None and model.lora.path is not None:  # the adapter to continue is the policy's
        model = model.model_copy(update={"lora": model.lora.model_copy(update={"path": None})})
    same = load_tokenizer(path).get_vocab() == policy.tokenizer.get_vocab()
    if not same:  # it keeps the template it was trained with
        model = model.model_copy(update={"chat_template": None})
    loaded = load_scalar(path, model, seed=config.run.seed, trainable=True)
    if same:
        return Critic(loaded, config, total_steps)
    log.warning(
        "The critic has another tokenizer: answers are handed over as text, and values mapped back to the policy's tokens."
    )
    return TextCritic(loaded, config, total_steps, policy.tokenizer)


def reward_on_base(config: Config, policy: LoadedModel) -> AdapterScorer | None:
    """The reward model as an adapter on the actor's base, where `reward_model.path` names one over it; None: it is a model of its own.

    Raises ConfigError as `make_critic` does.
    """
    adapter = _on_the_base(config, "reward_model", config.reward_model.path)
    if adapter is None:
        return None
    others = sum(name.startswith(REWARD) for name in policy.module.peft_config)  # type: ignore[union-attr]
    name = f"{REWARD}-{others + 1}" if others else REWARD
    head = shared.load_adapter(policy.module, name, adapter, seed=None, trainable=False)
    tokenizer, beside = policy.tokenizer, adapter.parent / "model"
    whole = beside if (beside / "config.json").is_file() else None
    if whole is not None:  # an adapter has the base's tokens, but may have been trained with another template
        template = load_tokenizer(str(whole)).chat_template
        if template != tokenizer.chat_template:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.chat_template = template
    return AdapterScorer(policy.module, name, head, tokenizer, whole=whole, precision=config.train.precision)


def _on_the_base(config: Config, key: str, path: str | None) -> Path | None:
    """The adapter that `path` stands for, where it can stand on the actor's base. What was asked for and can't be is refused."""
    lora, share_base = config.model.lora, _share_base(config)
    adapter = shared.find_adapter(path) if path != config.model.path else None
    named = adapter is not None and path is not None and shared.is_adapter(Path(path).expanduser())
    if lora is None or share_base is False:
        if named:
            needed = "model.lora={}" if lora is None else "model.lora.share_base=auto"
            if config.launch.mesh.tensor > 1:
                needed = "launch.mesh.tensor=1"
            raise ConfigError(
                f"{key}.path: {path} holds an adapter, which stands on the actor's base only with {needed.split('=')[0]}. "
                f"Set {needed}, or name a whole model, such as RUN/model."
            )
        return None
    why = None
    if adapter is None:
        why = f"{path} has no adapter" if path not in (None, config.model.path) else None
    elif key == "reward_model" and config.reward_model.dtype != config.model.dtype:
        why = f"it is to have another dtype ({config.reward_model.dtype}) than the base ({config.model.dtype})"
    else:
        why = shared.why_not_on(adapter, config.model)
    if why is None:
        return adapter
    if named or share_base is True:
        cure = "Name a whole model, such as RUN/model" if named else "Name an adapter trained over model.path"
        also = "" if share_base == "auto" else ", or set model.lora.share_base=auto"
        raise ConfigError(f"{key}.path: {path} can't stand on the actor's base: {why}. {cure}{also}.")
    return None


def _share_base(config: Config) -> bool | Literal["auto"]:
    """`model.lora.share_base`; a base whose products are divided is not shared."""
    lora = config.model.lora
    return False if lora is None or config.launch.mesh.tensor > 1 else lora.share_base
