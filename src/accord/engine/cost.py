"""What a step costs a rank: bytes of memory, bytes sent, floating-point operations. Arithmetic on shapes and settings; nothing is loaded.

With P numbers in a model, n ranks, and U bytes in a unit of sharding (a block, or the root: embeddings and head):

    whole copies     weights 4P · gradients 4P · Adam's moments 8P · average 4P         sums of gradients: 2 (n-1)/n · 4P sent
    sharded          each of these divided by n; a unit is brought together to be used   (n-1)/n · U sent, and again for its gradient

Sources: ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054, §5 and §7; "stage 3" is what FSDP does), FSDP (Zhao et al. 2023, arXiv:2304.11277),
a ring's costs (Patarasuk and Yuan 2009), what a transformer's forward keeps (Korthikanti et al. 2022, arXiv:2205.05198, §4, counted anew for
gated blocks without a stored attention matrix). docs/scale.md has tables, tests/engine/test_cost.py what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accord.data.packing import PACKED_AT_ONCE
from accord.engine.generate.kv_cache import BLOCK
from accord.models.logprobs import KEPT_ELEMENTS, vocabulary_blocks
from accord.models.quantized import BYTES
from accord.models.shape import Shape, Weight, shape_of

if TYPE_CHECKING:
    from accord.config import Config

FLOAT = 4  # bytes of what is trained, of its gradient, of each moment and of the average
CACHE_BYTES, MOST_SLOTS = 2 * 2**30, 256  # of a sampler that chooses its slots itself (engine/generate/decoding.py)
SUMMED_AT_ONCE = 2**24  # numbers of whole gradients that travel together (engine/trained.py)
BLOCKS_IN_USE = 3  # the block that computes, and of the next one the buffer it arrives in and the weights made of it
TOKEN_RESULT = 52  # bytes exchanged a token of PPO's answers: id and log-probability as text, five numbers, a value
ANSWER_RESULT, PACK_RESULT = 50, 300  # and an answer and a pack of any stage, about


class Lengths(NamedTuple):
    """Mean tokens of what is trained on."""

    prompt: int
    answer: int


@dataclass(frozen=True)
class Models:
    """The models of a stage."""

    policy: Shape  # the one that is trained; in the stage `reward` the reward model
    critic: Shape | None = None
    reference: Shape | None = None
    reward: Shape | None = None

    @property
    def learning(self) -> list[Shape]:
        return [self.policy] + ([] if self.critic is None else [self.critic])

    @property
    def frozen(self) -> list[Shape]:
        return [shape for shape in (self.reference, self.reward) if shape is not None]

    @property
    def all(self) -> list[Shape]:
        return self.learning + self.frozen


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank's device by what they are for, each at its own peak: their sum is an upper bound."""

    weights: int = 0  # of trained models, a LoRA base included
    moments: int = 0
    average: int = 0  # train.ema_decay
    frozen: int = 0  # reference and reward model
    gathered: int = 0  # sharded: units that are whole
    gradients: int = 0
    casts: int = 0  # the blocks' matrices as autocast rounds them, kept until the backward pass; of a 4-bit base, one at a time
    activations: int = 0  # of one pack
    logits: int = 0  # of one pack: kept for the backward pass, and at work
    copies: int = 0  # the sampler's
    cache: int = 0  # the sampler's keys and values

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step, by what they are."""

    gathers: int  # weights, for forward and backward passes
    reductions: int  # gradients
    sampling: int  # weights, to sample with
    results: int  # what was computed, from each to all
    hops: int  # messages that can only follow each other: a ring of n ranks needs n - 1

    @property
    def total(self) -> int:
        return self.gathers + self.reductions + self.sampling + self.results


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a rank in a step."""

    sample: float
    read: float  # passes without gradient: reference, reward model, π_old, values
    train: float
    decoding_reads: float  # bytes that decoding reads from the device's memory: weights once a token, keys and values


@dataclass(frozen=True)
class Cost:
    """Of one step of a stage; for PPO that is one experience with all its updates."""

    loading: int  # bytes of the models that are whole on the device (and before that in the CPU's memory) before they are divided
    sampling: Memory
    training: Memory
    host: int  # bytes in the CPU's memory with train.offload=params
    checkpoint: int  # bytes a rank writes
    traffic: Traffic
    work: Work
    turns: int  # packs a rank computes for one optimizer step
    pack_tokens: int

    @property
    def peak(self) -> int:
        return max(self.loading, self.sampling.total, self.training.total)


def models_of(config: Config, architecture: Any, scalar: Any = None) -> Models:
    """The models of the stage of `config`; `architecture` and `scalar` (critic, reward model; None: the same) are `transformers` configurations.

    Under `model.lora.share_base: auto` a reward model or critic that is loaded counts as a model of its own, also where an adapter of it will be found.
    """
    lora, stage = config.model.lora, config.stage
    dtypes = {name: getattr(torch, getattr(config, name).dtype) for name in ("model", "reference", "reward_model")}
    rounded = torch.bfloat16 if config.train.precision == "bf16" else None
    base = {"lora": lora, "dtype": dtypes["model"], "quantized": config.model.quantization is not None}
    scalar = scalar or architecture
    if stage == "reward":
        return Models(shape_of(scalar, scalar=True, **base))
    policy = shape_of(architecture, **base)
    asks = (stage == "dpo" and config.dpo.needs_reference and not config.reference.precompute) or stage == "ppo"
    reference = critic = reward = None
    if asks and lora is None:
        reference = shape_of(architecture, trained=False, dtype=dtypes["reference"], rounded=rounded)
    if stage == "ppo":
        shares = lora is not None and lora.share_base is True  # adapters beside the actor's: next to nothing of their own
        if any(source.type == "model" for source in config.ppo.rewards) and not shares:
            reward = shape_of(scalar, scalar=True, trained=False, dtype=dtypes["reward_model"], rounded=rounded)
        if config.ppo.needs_critic and not config.critic.share_trunk:
            critic = shape_of(scalar, scalar=True, **base)
            new = config.critic.path in (None, config.model.path)
            if shares or (lora is not None and lora.share_base == "auto" and new):
                critic = replace(critic, blocks=tuple(map(_trained, critic.blocks)), root=_trained(critic.root))
    return Models(policy, critic, reference, reward)


def cost(config: Config, models: Models, lengths: Lengths, ranks: int = 1, *, gpu: bool = True, rank: int = 0) -> Cost:
    """What one step of `config` (that of a stage) costs `rank` of `ranks`; rank 0 has most.

    `gpu`: NCCL, and attention and logits as a GPU is given them; False: gloo and the CPU's. Answers of one prompt share its computation.
    Sampling is that with whole weights: ValueError for engine.pin_parameters=false and inference_tp_size, which are not counted, as
    launch.mesh.tensor is not.
    """
    assert config.stage is not None, "a configuration made by config.for_stage()"
    if config.stage == "ppo" and (config.engine.inference_tp_size > 1 or not config.engine.pin_parameters):
        raise ValueError(
            "engine.pin_parameters=false and engine.inference_tp_size are not counted: docs/distributed.md says what they hold"
        )
    if config.launch.mesh.tensor > 1:
        raise ValueError("launch.mesh.tensor is not counted: docs/distributed.md says what it divides")
    train, bf16 = config.train, config.train.precision == "bf16"
    sharded = ranks > 1 and (train.shard == "always" or (train.shard == "auto" and gpu))
    parts = (ranks if sharded else 1), (rank if sharded else 0)
    step = _Step.of(config, lengths, ranks)
    several = step.turns > 1

    def held(shapes: Iterable[Shape]) -> int:
        return sum(ceil(weight_part(weight, *parts) * weight.itemsize) for shape in shapes for weight in shape.weights)

    trained = sum(weight_part(weight, *parts) for shape in models.learning for weight in shape.trained)
    averaged = sum(weight_part(weight, *parts) for weight in models.policy.trained) if train.ema_decay is not None else 0
    lasting = Memory(
        weights=held(models.learning), moments=2 * FLOAT * trained, average=FLOAT * averaged, frozen=held(models.frozen)
    )
    sampler = _Sampler.of(config, models.policy, lengths, step, gpu)
    roots = sum(_bytes(shape.root) for shape in models.all) if sharded else 0
    frozen_roots = sum(_bytes(shape.root) for shape in models.frozen) if sharded else 0
    block = max((_bytes(unit) for shape in models.all for unit in shape.blocks), default=0) if sharded else 0
    both = ranks == 1 and step.updates == 1  # a pack is read once, before the update: two graphs are there at once (PPO)
    kept = [
        activations(shape, step.pack_tokens, bf16=bf16, gpu=gpu, checkpointing=config.model.gradient_checkpointing)
        for shape in models.learning
    ]
    training = replace(
        lasting,
        gathered=roots + BLOCKS_IN_USE * block,
        gradients=_gradients(models, sharded, several, parts),
        casts=max(_casts(shape, bf16, getattr(torch, config.model.dtype).itemsize) for shape in models.learning),
        activations=sum(kept) if both else max(kept),
        logits=_logits(models.policy, step.pack_targets, 2 if bf16 else FLOAT, gpu),
    )
    sampling = lasting
    if config.stage == "ppo":
        whole = sum(map(_bytes, models.policy.units)) if sharded else 0
        sampling = replace(lasting, gathered=whole + frozen_roots, copies=sampler.copies, cache=sampler.cache)
        if not config.engine.release_inference_cache:
            training = replace(training, copies=sampler.copies, cache=sampler.cache)
    host = 0
    if sharded and train.offload == "params":
        away = {"weights": 0, "moments": 0, "average": 0, "frozen": 0}
        host = lasting.total + FLOAT * trained
        training, sampling = replace(training, **away, gradients=training.gradients - FLOAT * trained), replace(sampling, **away)
    return Cost(
        loading=_loading(models),
        sampling=sampling,
        training=training,
        host=host,
        checkpoint=(3 * trained + averaged) * FLOAT,
        traffic=_traffic(config, models, lengths, step, ranks, sharded, gpu),
        work=_work(config, models, lengths, step, sampler),
        turns=step.turns,
        pack_tokens=step.pack_tokens,
    )


# ------------------------------------------------------------------------------------------------------------------------- a step


class _Step(NamedTuple):
    """How the examples of a step lie in packs, all being of one size."""

    examples: int  # sequences, pairs or answers of a step, over all ranks
    answers: int  # of a rank
    turns: int  # of a rank in one optimizer step
    reads: int  # of a rank over a whole experience (PPO)
    updates: int  # optimizer steps
    rounds: int  # of sampling
    pack_tokens: int
    pack_targets: int

    @classmethod
    def of(cls, config: Config, lengths: Lengths, ranks: int) -> _Step:
        prompt, answer = lengths
        budget, examples, leaves, updates, rounds = config.train.max_tokens, config.train.batch_size, 1, 1, 1
        if config.stage in ("reward", "dpo"):
            leaves = 2
        elif config.stage == "ppo":
            settings = config.ppo
            leaves = max(1, min(settings.samples_per_prompt, (budget - prompt) // answer))  # of one prompt in a pack
            rounds, updates = settings.generation_batches, settings.mini_batches * settings.ppo_epochs
            examples *= rounds * ceil(settings.samples_per_prompt / leaves)
        tokens = prompt + leaves * answer
        share = ceil(examples / (config.ppo.mini_batches if config.stage == "ppo" else 1))
        packs, reads = _packs(share, tokens, budget, ranks), ceil(_packs(examples, tokens, budget, ranks) / ranks)
        trees = ceil(share / packs)
        return cls(
            examples, ceil(examples / ranks) * leaves, ceil(packs / ranks), reads, updates, rounds, trees * tokens, trees * leaves * answer,
        )  # fmt: skip


def _packs(trees: int, tokens: int, budget: int, multiple: int) -> int:
    """As `pack_trees` makes them of trees that have `tokens` each."""
    fitting = max(1, budget // tokens)
    runs = [min(PACKED_AT_ONCE, trees - start) for start in range(0, trees, PACKED_AT_ONCE)]
    return min(ceil(sum(ceil(run / fitting) for run in runs) / multiple) * multiple, trees)


# ------------------------------------------------------------------------------------------------------------------------- memory


def weight_part(weight: Weight, ranks: int, rank: int) -> int:
    """Numbers of a weight that `rank` holds: FSDP2 cuts the first dimension into pieces of ⌈size / ranks⌉; the last ones may be empty."""
    size = weight.shape[0] if weight.shape else 1
    piece = ceil(size / ranks)
    return weight.numbers // max(1, size) * max(0, min(piece, size - rank * piece))


def activations(shape: Shape, tokens: int, *, bf16: bool, gpu: bool, checkpointing: bool) -> int:
    """Bytes that the forward of one pack keeps for its backward, weights and their casts aside.

    Of a block with width d, f in its MLP, q and k numbers of all query and key-value heads, a token keeps

        norms        each its float32 input and what it made of it (2 · 4d), then what the products read: d, in bf16 a copy each
        attention    q, k, v as given to the kernel, its result, and the result in the order of the pack
        MLP          gated: gate, its activation, up, their product (4f); else the input and result of the activation (2f)

    A GPU is given keys and values for every query head (models/packed.py), a CPU computes attention in float32. With checkpointing a block keeps
    only its input, and one block at a time is computed again. Masks between segments, padding of short ones, and what adapters keep come on top.
    """
    d, q, k, f = shape.hidden, shape.queries, shape.keys, shape.intermediate
    narrow = 2 if bf16 else FLOAT
    norms = 2 * 2 * FLOAT * d + (5 * narrow * d if bf16 else 2 * FLOAT * d) + 2 * FLOAT
    if gpu:
        attention = narrow * 5 * q
    else:
        attention = FLOAT * (2 * q + 2 * k) + narrow * q
    attention += FLOAT * shape.heads  # the softmax's normaliser
    block = norms + attention + narrow * (4 if shape.gated else 2) * f
    rest = 2 * FLOAT * d + 2 * FLOAT * shape.head_dim + FLOAT + 8  # last norm, rotary tables, ids
    layers = shape.layers * FLOAT * d + block if checkpointing else shape.layers * block
    return tokens * (layers + rest)


def _logits(shape: Shape, targets: int, itemsize: int, gpu: bool) -> int:
    """Hidden states of the targets; the logits that are kept (models/logprobs.py); three float32 chunks at work."""
    if not shape.vocabulary or not targets:
        return 0
    chunk = targets * max(
        s.stop - s.start for s in vocabulary_blocks(targets, shape.vocabulary, torch.device("cuda" if gpu else "cpu"))
    )
    kept = min(targets * shape.vocabulary, KEPT_ELEMENTS // chunk * chunk)
    return targets * shape.hidden * FLOAT + kept * itemsize + 3 * chunk * FLOAT


def _gradients(models: Models, sharded: bool, several: bool, parts: tuple[int, int]) -> int:
    """Parts of all; while packs are added up, whole ones of the model that learns, else those of a unit; and a buffer to send a unit."""
    own = FLOAT * sum(weight_part(weight, *parts) for shape in models.learning for weight in shape.trained)
    if not sharded:
        return own
    units = [FLOAT * sum(w.numbers for w in unit if w.trained) for shape in models.learning for unit in shape.units]
    whole = [FLOAT * sum(w.numbers for w in shape.trained) for shape in models.learning]
    return own + max(whole if several else units) + max(units)


def _casts(shape: Shape, bf16: bool, itemsize: int) -> int:
    """Autocast keeps a rounded copy of each float32 matrix until the forward has ended, and the graph keeps it until the backward pass.

    One in 4 bits is there for its product alone, in `itemsize` and rounded.
    """
    matrices = [w for block in shape.blocks for w in block if w.multiplies]
    largest = max((w.numbers for w in matrices if w.itemsize == BYTES), default=0)
    kept = 2 * sum(w.numbers for w in matrices if w.itemsize == FLOAT) if bf16 else 0
    return kept + largest * (itemsize + (2 if bf16 and itemsize == FLOAT else 0))


class _Sampler(NamedTuple):
    itemsize: int  # bytes of a number
    slots: int
    copies: int  # bytes
    cache: int  # bytes

    @classmethod
    def of(cls, config: Config, policy: Shape, lengths: Lengths, step: _Step, gpu: bool) -> _Sampler:
        """Copies of all matrices, the head among them, where its type is another or a CPU packs them; none outside PPO."""
        if config.stage != "ppo":
            return cls(0, 0, 0, 0)
        auto = "bfloat16" if config.train.precision == "bf16" else "float32"
        itemsize = getattr(torch, auto if config.engine.dtype == "auto" else config.engine.dtype).itemsize
        base = [w for block in policy.blocks for w in block if w.multiplies and (config.model.lora is None or not w.trained)]
        made = getattr(torch, config.model.dtype).itemsize  # of a base in 4 bits
        shared = gpu and all((made if w.itemsize == BYTES else w.itemsize) == itemsize for w in base)
        tokens = ceil((lengths.prompt + lengths.answer) / BLOCK) * BLOCK
        slot = 2 * policy.layers * policy.keys * tokens * itemsize  # engine/generate/kv_cache.py
        asked = config.engine.max_slots
        most = max(1, min(MOST_SLOTS, CACHE_BYTES // slot)) if isinstance(asked, str) else asked
        slots = min(most, ceil(step.answers / step.rounds))
        return cls(itemsize, slots, 0 if shared else itemsize * _matrices(policy), slots * slot)


def _matrices(shape: Shape) -> int:
    return shape.products + shape.vocabulary * shape.hidden


def _loading(models: Models) -> int:
    """A model is whole on every rank before it is divided; PPO's reward model is there before the policy is.

    A base in 4 bits comes to the device so; before, it is whole in `model.dtype` in the CPU's memory, which is not counted.
    """
    policy = sum(map(_bytes, models.policy.units))
    later = [sum(map(_bytes, shape.units)) for shape in (models.critic, models.reference) if shape is not None]
    first = policy + (0 if models.reward is None else sum(map(_bytes, models.reward.units)))
    return max([first, *later])


def _bytes(unit: Sequence[Weight]) -> int:
    return sum(weight.bytes for weight in unit)


def _trained(unit: Sequence[Weight]) -> tuple[Weight, ...]:
    return tuple(weight for weight in unit if weight.trained)


# ------------------------------------------------------------------------------------------------------------------------ traffic


def _traffic(config: Config, models: Models, lengths: Lengths, step: _Step, ranks: int, sharded: bool, gpu: bool) -> Traffic:
    """A ring of n: a unit of U bytes, padded to n equal pieces, is gathered by sending n - 1 pieces, and reduced by as many. gloo has no
    reduction of its own that leaves each rank its piece: it sums whole (2 (n-1) pieces). Accumulation reduces once an optimizer step.

        trained      a turn: blocks twice (forward, backward), the root once
        frozen       a turn: blocks once; the root stays whole from the first one on
        sampling     every unit once a round

    With whole copies only gradients travel.
    """
    others = ranks - 1
    gathers = reductions = sampling = hops = 0

    def piece(unit: Sequence[Weight], itemsize: int | None = None) -> int:
        return sum(ceil(weight_part(weight, ranks, 0) * (itemsize or weight.itemsize)) for weight in unit)

    reads = step.reads if config.stage == "ppo" else step.turns if config.stage == "dpo" else 0
    turns = step.turns * step.updates
    if sharded and others:
        passes = 1 if gpu else 2
        for shape in models.learning:
            blocks, root = sum(map(piece, shape.blocks)), piece(shape.root)
            gathers += others * turns * (2 * blocks + root)
            reductions += others * passes * step.updates * sum(piece(_trained(unit), FLOAT) for unit in shape.units)
            hops += others * (turns * (2 * shape.layers + 1) + step.updates * passes * (shape.layers + 1))
        for shape in models.frozen + (models.learning if config.stage == "ppo" else []):
            gathers += others * reads * sum(map(piece, shape.blocks))
            hops += others * reads * shape.layers
        if config.stage == "ppo":
            sampling = others * step.rounds * sum(map(piece, models.policy.units))
            hops += others * step.rounds * (models.policy.layers + 1)
    elif others:
        for shape in models.learning:
            numbers = sum(weight.numbers for weight in shape.trained)
            reductions += 2 * others * FLOAT * numbers * step.updates // ranks
            hops += 2 * others * ceil(numbers / SUMMED_AT_ONCE) * step.updates
    of_answer = TOKEN_RESULT * lengths.answer + ANSWER_RESULT if config.stage == "ppo" else ANSWER_RESULT
    own = step.answers * of_answer + (turns + reads) * PACK_RESULT
    return Traffic(gathers, reductions, sampling, others * own, hops)


# --------------------------------------------------------------------------------------------------------------------------- work


def _work(config: Config, models: Models, lengths: Lengths, step: _Step, sampler: _Sampler) -> Work:
    """Operations: 2 a number of the blocks' matrices and token, 2 V d a target, 4 q for each pair of tokens that see each other.

    A backward pass takes twice a forward; with a frozen base once (no gradient of its weights); checkpointing adds the blocks' forward.
    """
    attended = lengths.prompt + lengths.answer  # a token sees half of its sequence

    def blocks(shape: Shape, tokens: int) -> float:
        return tokens * (2.0 * shape.products + 2.0 * shape.queries * attended * shape.layers)

    def head(shape: Shape, targets: int) -> float:
        return 2.0 * shape.vocabulary * shape.hidden * targets

    again = 1 if config.model.gradient_checkpointing else 0
    passes = (2 if config.model.lora else 3) + again
    turns = step.turns * step.updates
    train = turns * sum(
        passes * blocks(shape, step.pack_tokens) + (passes - again) * head(shape, step.pack_targets) for shape in models.learning
    )
    asked = models.frozen
    reads = step.turns if config.stage == "dpo" else 0
    if config.stage == "ppo":
        asked, reads = models.all, step.reads
        if config.model.lora is not None:
            asked = [*asked, models.policy]  # its own start is the reference
    elif config.stage == "dpo" and config.model.lora is not None:
        asked = [models.policy]
    read = reads * sum(blocks(shape, step.pack_tokens) + head(shape, step.pack_targets) for shape in asked)
    if config.stage != "ppo":
        return Work(0, read, train, 0)
    policy, answers = models.policy, step.answers
    sample = blocks(policy, answers * attended) + head(policy, answers * lengths.answer)
    steps = ceil(answers / sampler.slots) * lengths.answer
    seen = sampler.cache * (lengths.prompt + lengths.answer / 2) / attended
    return Work(sample, read, train, steps * (sampler.itemsize * _matrices(policy) + seen))
