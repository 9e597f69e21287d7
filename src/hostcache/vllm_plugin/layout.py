"""Where vLLM's blocks lie in the memory of its KV tensors. Copies nothing; of a tensor it asks address and strides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hostcache.copiers.layout import PageLayout, Segment
from hostcache.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """`count` blocks; block b of every layer lies where `layout` says. `owner` keeps the memory alive."""

    count: int
    layout: PageLayout
    owner: object

    @property
    def block_bytes(self) -> int:
        """Over all layers, on this rank."""
        return self.layout.frame_bytes


def blocks_of(kv_caches: Mapping[str, Any], num_blocks: int) -> Blocks:
    """From the tensors that vLLM registers, one a layer. Layers that share a tensor count once.

    Raises ConfigError, in one line, for a layer whose blocks are not in one piece each.
    """
    segments: dict[int, Segment] = {}
    for name, tensor in kv_caches.items():
        if not hasattr(tensor, "data_ptr"):
            raise ConfigError(f"the KV cache of layer {name} is {type(tensor).__name__}, not one tensor")
        segments.setdefault(int(tensor.data_ptr()), _segment(name, tensor, num_blocks))
    ordered = sorted(segments.values())
    if not ordered:
        raise ConfigError("vLLM registered no KV cache")
    return Blocks(count=num_blocks, layout=PageLayout(segments=tuple(ordered)), owner=tuple(kv_caches.values()))


def evenly_spaced(segments: Iterable[Segment]) -> tuple[int, int, int]:
    """(first address, number, distance) of segments of one size whose pieces adjoin, as the thread copier takes them.
    Raises ConfigError where they are not so."""
    given = tuple(segments)
    first = given[0]
    distance = given[1].address - first.address if len(given) > 1 else 0
    for number, segment in enumerate(given):
        expected = Segment(first.address + number * distance, first.page_bytes, first.page_bytes)
        if segment != expected:
            raise ConfigError(f"layer {number} of the KV cache lies at {segment}, not at {expected}")
    return first.address, len(given), distance


def _segment(name: str, tensor: Any, num_blocks: int) -> Segment:
    shape, strides, item = list(tensor.shape), list(tensor.stride()), int(tensor.element_size())
    outer = max(range(len(shape)), key=lambda axis: int(strides[axis]))
    if shape[outer] != num_blocks:
        raise ConfigError(
            f"the KV cache of layer {name} is {shape} with strides {strides}: its outermost dimension is not the "
            f"{num_blocks} blocks"
        )
    inner = [(int(n), int(strides[axis])) for axis, n in enumerate(shape) if axis != outer]
    elements = 1
    for n, _ in inner:
        elements *= n
    if sum((n - 1) * stride for n, stride in inner) + 1 != elements:
        raise ConfigError(
            f"the KV cache of layer {name} is {shape} with strides {strides}: a block is not in one piece"
        )
    return Segment(int(tensor.data_ptr()), int(strides[outer]) * item, elements * item)
