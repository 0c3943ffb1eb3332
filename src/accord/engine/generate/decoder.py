"""One forward step of a transformer over tokens of many sequences, written out: no module's `forward`, no padding.

A step takes T tokens in one row: first one token of every sequence under way (decoding), then whole prompts laid end to end
(prefill). Matrix products see all of them at once; attention looks up its keys sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.pytorch_utils import Conv1D

from accord.engine.generate.attention import DecodeAttention, prompt_attention
from accord.engine.generate.kv_cache import KeyValueCache
from accord.engine.generate.lockstep import Lockstep, divide
from accord.engine.generate.native import LANES, Kernels, kernels
from accord.engine.generate.projection import Placement, Projection, Slice, can_pack, is_projection, renewed
from accord.engine.generate.spec import DecoderSpec, LayerSpec, Norm, NoSpecError
from accord.models.packed import SegmentLayout
from accord.models.precision import check_bfloat16

if TYPE_CHECKING:
    from accord.engine.ranks import Ranks

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Step:
    """What one forward computes."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] the sequence of each token
    decoding: int  # the first so many tokens are one of each slot 0 … decoding-1
    longest: int  # tokens of the longest of these, the new one included
    prompts: SegmentLayout | None  # of the other tokens
    last: Tensor  # [R] tokens whose logits are wanted
    masked: bool = False  # some slots are shorter than `longest`, for certain: no need to look


class Decoder:
    """The logits of `Step`s, from the tensors of a training module.

    `dtype`: what it computes in; None: the module's own. On a CPU the weights are copied into oneDNN's layout (`placement` packed); elsewhere
    they are copied only where the type differs. `refresh()` renews copies, `release()` frees them.

    `lockstep`: every forward, and every renewal of copies, is one of several ranks together. By groups of layers there are no copies but, in
    another type, that of the group which is computed; tensor parallel each rank copies its part of the layers. The head is whole everywhere.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        module: nn.Module,
        dtype: torch.dtype | None = None,
        placement: Placement | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        """Raises NoSpecError for parts that it can't apply, ConfigError for those that the ranks can't share."""
        self.module, self.whole_spec = module, spec
        self.split = lockstep.ranks if lockstep is not None and lockstep.tensor_parallel else None
        self.groups = None if lockstep is None else lockstep.groups
        if self.split is not None:
            spec = divide(spec, self.split.world, {n: _inputs(layer.down) for n, layer in enumerate(spec.layers)})
        self.spec = spec
        weight = spec.embed.weight
        self.device = weight.device
        self.dtype = dtype or weight.dtype
        check_bfloat16(self.dtype, self.device)
        in_place: Placement = "shared" if self.dtype == weight.dtype else "copied"
        of_head = in_place if lockstep is not None else placement
        if placement is None:
            placement = "packed" if can_pack(self.dtype, self.device) else in_place if self.split is None else "copied"
        if lockstep is not None and self.split is None:
            placement = in_place
        self.placement = placement
        linear = [part for layer in spec.layers for part in (*layer.qkv, layer.out, *layer.up, layer.down)] + [spec.head]
        for part in linear:
            if placement != "shared" and not is_projection(part):
                raise NoSpecError(f"it has a linear layer of another kind ({type(part).__name__})")
        for layer in spec.layers:
            if layer.activation not in _ACTIVATIONS:
                raise NoSpecError(f"its activation {layer.activation} is not known")
        self.native = kernels(self.dtype, self.device, spec.head_dim, spec.heads // spec.key_value_heads)
        self.layers = [_Layer(layer, spec, self.dtype, placement, self.native, self.split) for layer in spec.layers]
        self.head = Projection((spec.head,), self.dtype, of_head or placement)
        self._here: list[_Layer] = []  # whose group is whole
        self.final_norm = _Norm(spec.final_norm, self.dtype, self.native)
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        self._seen: list[Any] = []
        self.fresh = False
        self.moves = 0  # how often what a recorded step points to has moved: tensors given back or replaced, adapters switched

    @property
    def vocabulary(self) -> int:
        """Entries of a row of logits."""
        head: Tensor = _base(self.spec.head).weight
        return len(head)

    # -- weights -----------------------------------------------------------------------------------------------------

    @property
    def copied_bytes(self) -> int:
        """Memory of the copies, 0 while there are none."""
        return sum(projection.copied_bytes for projection in self._projections())

    def refresh(self) -> None:
        """Take the weights as they are now. Nothing to do for shared ones; the norms' few numbers are always copied."""
        with torch.no_grad():
            self.head.refresh()
            self.final_norm.refresh()
            if self.groups is None or self.split is not None:  # else each group is taken as it comes
                for number, layer in enumerate(self.layers):
                    if self.groups is not None and number % self.groups.size == 0:
                        self.groups.gather(number)
                    layer.refresh()
            if self.groups is not None:
                self.groups.free()
        before, self._seen, self.fresh = self._seen, self._versions(), True
        if self.placement == "shared" and [now[0] for now in self._seen] != [then[0] for then in before]:
            self.moves += 1

    def refresh_if_changed(self) -> bool:
        """Refresh when a parameter was replaced or written to since the last time. (Writing through `.data` leaves no trace.)"""
        if self.fresh and self._seen == self._versions():
            return False
        self.refresh()
        return True

    def release(self) -> None:
        """Free all copies; the next use makes them again."""
        for projection in self._projections():
            projection.release()
        self._tables.clear()
        self.fresh, self.moves = False, self.moves + 1

    def _versions(self) -> list[Any]:
        parts: list[Any] = [part for part in self.module.modules() if hasattr(part, "_disable_adapters")]
        adapters = [
            (
                (
                    part.disable_adapters,
                    [*part.active_adapters],
                    [*getattr(part, "merged_adapters", ())],
                    {**getattr(part, "scaling", {})},
                ),
            )
            for part in parts
        ]
        # Tensors made in inference mode have no version: they count as changed every time.
        return [(p.data_ptr(), object() if p.is_inference() else p._version) for p in self.module.parameters()] + adapters

    def _projections(self) -> Iterator[Projection]:
        for layer in self.layers:
            yield from layer.projections
        yield self.head

    def _enter(self, number: int) -> None:
        """Layer `number` is next: at the first one of a group, that is brought together."""
        assert self.groups is not None
        if number % self.groups.size == 0:
            self._leave()
            self.groups.gather(number)
            self._here = self.layers[number : number + self.groups.size]
            for layer in self._here:
                layer.refresh()

    def _leave(self) -> None:
        assert self.groups is not None
        for layer in self._here:
            layer.release()
        self._here = []
        self.groups.free()

    def cache(self) -> KeyValueCache:
        """An empty cache in the layout that it reads."""
        return KeyValueCache(self.spec, self.dtype, self.device, LANES if self.native is not None else None)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, step: Step, cache: KeyValueCache) -> Tensor:
        """The logits [R, V] float32 at `step.last`. Writes the keys and values of all T tokens to the cache."""
        spec = self.spec
        h = spec.embed(step.ids)
        if spec.embed_positions is not None:
            h = h + F.embedding(step.positions + spec.position_offset, spec.embed_positions.weight)
        h = h.to(self.dtype)
        rotations = {
            name: self._rotation(name, step.positions, cache.capacity) for name in {layer.rotary for layer in spec.layers} if name
        }
        attention = DecodeAttention(step.longest, step.positions[: step.decoding], self.dtype, step.masked)
        by_groups = self.groups is not None and self.split is None
        for number, layer in enumerate(self.layers):
            if by_groups:
                self._enter(number)
            h = layer(number, h, step, cache, attention, rotations.get(layer.spec.rotary or ""))
        if by_groups:
            self._leave()
        logits = self.head(self.final_norm(h.index_select(0, step.last))).float()
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits

    def _rotation(self, name: str, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin of one kind of layer: the whole tables for the compiled kernel, else those of the tokens [T, 1, rotary dims].

        Tables reach as far as the cache: a model with a context of 128k would need 100 MB for the whole.
        """
        if name not in self._tables or len(self._tables[name][0]) < longest:
            assert self.spec.rotary_table is not None
            cos, sin = self.spec.rotary_table(name, torch.arange(longest, device=self.device))
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)  # rotate_half's minus, once and for all
            self._tables[name] = cos.float().contiguous(), signed.float().contiguous()
        if self.native is not None:
            return self._tables[name]
        cos, sin = (table.index_select(0, positions)[:, None].to(self.dtype) for table in self._tables[name])
        return cos, sin


class _Norm:
    """A norm with its weights at hand in the type the decoder computes in. The identity where a family has none."""

    def __init__(self, norm: Norm | None, dtype: torch.dtype, native: Kernels | None = None) -> None:
        self.norm, self.dtype, self.native = norm, dtype, native
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def refresh(self) -> None:
        if self.norm is None:
            return
        module: Any = self.norm.module
        layer, bias = self.norm.kind == "layer", getattr(module, "bias", None)
        if module.weight is not None:  # RMS norms multiply in float32 and round once
            weight = module.weight.detach().to(self.dtype if layer else torch.float32)
            self.weight = renewed(self.weight, weight + 1.0 if self.norm.kind == "gemma" else weight)
        if bias is not None:
            self.bias = renewed(self.bias, bias.detach().to(self.dtype))

    def __call__(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return x
        if self.norm.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.norm.eps)
        assert self.weight is not None
        if self.native is not None:
            return self.native.rms_norm(x.contiguous(), self.weight, self.norm.eps)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm.eps) * self.weight).to(x.dtype)


class _Layer:
    """One block: its projections and norms, and the order in which they are applied."""

    def __init__(
        self,
        spec: LayerSpec,
        model: DecoderSpec,
        dtype: torch.dtype,
        placement: Placement,
        native: Kernels | None,
        split: Ranks | None,
    ) -> None:
        self.spec, self.native = spec, native
        self.heads, self.key_heads, self.head_dim = model.heads, model.key_value_heads, model.head_dim
        of_heads = of_inputs = of_width = sum_ = None
        if split is not None:  # Megatron's: heads and the MLP's width are divided, and summed when a branch ends
            fused = len(spec.qkv) == 1 and not spec.interleaved
            of_heads, of_width = Slice(split.rank, split.world, parts=3 if fused else 1), Slice(split.rank, split.world)
            of_inputs, sum_ = Slice(split.rank, split.world, inputs=True), split.sum_
        self.qkv = Projection(spec.qkv, dtype, placement, of_heads)
        self.out = Projection((spec.out,), dtype, placement, of_inputs, sum_)
        self.up = Projection(spec.up, dtype, placement, of_width)
        self.down = Projection((spec.down,), dtype, placement, of_inputs, sum_)
        self.act = _ACTIVATIONS[spec.activation]
        self.gated = len(spec.up) == 2
        self.attention_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm, self.query_norm, self.key_norm = self.norms = [
            _Norm(norm, dtype, native)
            for norm in (
                spec.attention_norm, spec.post_attention_norm, spec.mlp_norm, spec.post_mlp_norm, spec.query_norm, spec.key_norm,
            )
        ]  # fmt: skip

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.out, self.up, self.down

    def refresh(self) -> None:
        for projection in self.projections:
            projection.refresh()
        for norm in self.norms:
            norm.refresh()

    def release(self) -> None:
        for projection in self.projections:
            projection.release()

    def __call__(
        self,
        number: int,
        h: Tensor,  # [T, width]
        step: Step,
        cache: KeyValueCache,
        attention: DecodeAttention,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        seen = self._attend(number, self.attention_norm(h), step, cache, attention, rotation)
        if self.spec.parallel:
            return self._mlp(h, self.out.add_to(seen, h))
        if self.spec.post_attention_norm is None:
            h = self.out.add_to(seen, h)
        else:
            h = h + self.post_attention_norm(self.out(seen))
        return self._mlp(h, h)

    def _attend(
        self,
        number: int,
        x: Tensor,
        step: Step,
        cache: KeyValueCache,
        attention: DecodeAttention,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """[T, heads · d]: keys and values of all tokens go to the cache; each token sees its own sequence."""
        spec, n = self.spec, step.decoding
        keys, values = cache.keys[number], cache.values[number]
        heads = self._normalised(self.qkv(x))  # [T, heads + 2 key heads, d]
        q, k, v = heads.split([self.heads, self.key_heads, self.key_heads], dim=1)
        if self.native is not None:
            self.native.rotate_and_write(heads, rotation, step.positions, step.slots, keys, values)  # in place: q is a view
            return self.native.attention(
                q, keys, values, step.positions, step.slots, spec.scaling, spec.window, spec.softcap
            ).flatten(1)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        cache.write(number, step.slots, step.positions, k, v)
        mixed = []
        if n:
            mixed.append(attention(q[:n], keys, values, spec.scaling, spec.window, spec.softcap))
        if step.prompts is not None:
            mixed.append(prompt_attention(q[n:], k[n:], v[n:], step.prompts, spec.scaling, spec.window, spec.softcap))
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(1)

    def _mlp(self, h: Tensor, residual: Tensor) -> Tensor:
        x = self.up(self.mlp_norm(h))
        if not self.gated:
            x = self.act(x)
        elif self.native is not None and self.act is F.silu:
            x = self.native.silu_mul(x)
        else:
            gate, up = x.chunk(2, dim=-1)
            x = self.act(gate).mul_(up)
        if self.spec.post_mlp_norm is None:
            return self.down.add_to(x, residual)
        return residual + self.post_mlp_norm(self.down(x))

    def _normalised(self, qkv: Tensor) -> Tensor:
        """[T, …] → [T, heads + 2 key heads, d] contiguous: queries, keys, values, normalised where the family does."""
        tokens, d = len(qkv), self.head_dim
        if self.spec.interleaved:
            return qkv.view(tokens, self.heads, 3, d).transpose(1, 2).reshape(tokens, 3 * self.heads, d)
        if self.spec.query_norm is None:
            return qkv.view(tokens, -1, d)
        q, k, v = qkv.split([self.heads * d, self.key_heads * d, self.key_heads * d], dim=-1)
        if self.spec.norm_heads:
            q, k = q.reshape(-1, d), k.reshape(-1, d)
        q, k = self.query_norm(q).view(tokens, -1), self.key_norm(k).view(tokens, -1)
        return torch.cat([q, k, v], dim=-1).view(tokens, -1, d)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first dimensions of x [T, heads, d]: x · cos + rotate_half(x) · sin, the sign being in `sin` already."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(width // 2, dims=-1), sin)
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat([torch.addcmul(turned * cos, turned.roll(width // 2, dims=-1), sin), rest], dim=-1)


def _base(module: nn.Module) -> Any:
    return getattr(module, "base_layer", module)


def _inputs(module: nn.Module) -> int:
    """Numbers that a linear layer reads."""
    part = _base(module)
    return int(part.weight.shape[0 if isinstance(part, Conv1D) else 1])


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise the version of what an optimizer has written to: its fused kernels don't, and `refresh_if_changed` goes by it."""
    torch.autograd.graph.increment_version([p for group in optimizer.param_groups for p in group["params"] if p.grad is not None])


register_optimizer_step_post_hook(_count_step)
