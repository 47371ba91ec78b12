"""The matrix products of the models that we serve, as every rank of 1, 2, 4 or 8 has them.

Sizes are those of the models' config.json. What a product's tile depends on is little, so of the
hundreds of products a few dozen differ for a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

TP_SIZES: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class Experts:
    """num: of a layer. inner: size of one. shared_inner: size of the one that all tokens pass."""

    num: int
    inner: int
    shared_inner: int = 0


@dataclass(frozen=True)
class Shape:
    """Of a model: sizes, as config.json has them."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    has_bias: bool = False
    experts: Experts | None = None


@dataclass(frozen=True)
class Product:
    """A linear layer on one rank. columns: of the result, of each half if gated."""

    columns: int
    inputs: int
    is_gated: bool = False
    has_bias: bool = False
    is_head: bool = False


SHAPES: Final = {
    "Qwen2.5-0.5B": Shape(896, 4864, 14, 2, 64, 151936, has_bias=True),
    "Qwen2.5-1.5B": Shape(1536, 8960, 12, 2, 128, 151936, has_bias=True),
    "Qwen2.5-3B": Shape(2048, 11008, 16, 2, 128, 151936, has_bias=True),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 4, 128, 152064, has_bias=True),
    "Qwen2.5-14B": Shape(5120, 13824, 40, 8, 128, 152064, has_bias=True),
    "Qwen2.5-32B": Shape(5120, 27648, 40, 8, 128, 152064, has_bias=True),
    "Qwen2.5-72B": Shape(8192, 29568, 64, 8, 128, 152064, has_bias=True),
    "Qwen3-0.6B": Shape(1024, 3072, 16, 8, 128, 151936),
    "Qwen3-1.7B": Shape(2048, 6144, 16, 8, 128, 151936),
    "Qwen3-4B": Shape(2560, 9728, 32, 8, 128, 151936),
    "Qwen3-8B": Shape(4096, 12288, 32, 8, 128, 151936),
    "Qwen3-14B": Shape(5120, 17408, 40, 8, 128, 151936),
    "Qwen3-32B": Shape(5120, 25600, 64, 8, 128, 151936),
    "Llama-3.2-1B": Shape(2048, 8192, 32, 8, 64, 128256),
    "Llama-3.2-3B": Shape(3072, 8192, 24, 8, 128, 128256),
    "Llama-3.1-8B": Shape(4096, 14336, 32, 8, 128, 128256),
    "Llama-3.1-70B": Shape(8192, 28672, 64, 8, 128, 128256),
    "Mistral-7B": Shape(4096, 14336, 32, 8, 128, 32768),
    "Gemma-2-2B": Shape(2304, 9216, 8, 4, 256, 256000),
    "Gemma-2-9B": Shape(3584, 14336, 16, 8, 256, 256000),
    "Gemma-2-27B": Shape(4608, 36864, 32, 16, 128, 256000),
    "Gemma-3-1B": Shape(1152, 6912, 4, 1, 256, 262144),
    "Phi-3-mini": Shape(3072, 8192, 32, 32, 96, 32064),
    "Phi-4-mini": Shape(3072, 8192, 24, 8, 128, 200064),
    "Phi-4": Shape(5120, 17920, 40, 10, 128, 100352),
    "Qwen1.5-MoE-A2.7B": Shape(
        2048, 5632, 16, 16, 128, 151936, has_bias=True, experts=Experts(60, 1408, 5632)
    ),
    "Qwen2-57B-A14B": Shape(
        3584, 18944, 28, 4, 128, 151936, has_bias=True, experts=Experts(64, 2560, 20480)
    ),
    "Qwen3-30B-A3B": Shape(2048, 6144, 32, 4, 128, 151936, experts=Experts(128, 768)),
}


def products() -> set[Product]:
    return {
        product
        for shape in SHAPES.values()
        for size in TP_SIZES
        if shape.heads % size == 0
        for product in _products(shape, size)
    }


def experts() -> set[tuple[Product, int]]:
    """Experts' products, each with the number of experts; a token chooses several of them."""
    return {
        (product, experts.num)
        for shape in SHAPES.values()
        if (experts := shape.experts) is not None
        for size in TP_SIZES
        if experts.inner % size == 0
        for product in (
            Product(experts.inner // size, shape.hidden, is_gated=True),
            Product(shape.hidden, experts.inner // size),
        )
    }


def _products(shape: Shape, tp_size: int) -> Iterator[Product]:
    num_heads, num_kv_heads = shape.heads // tp_size, max(1, shape.kv_heads // tp_size)
    width = (num_heads + 2 * num_kv_heads) * shape.head_dim
    yield Product(width, shape.hidden, has_bias=shape.has_bias)
    yield Product(shape.hidden, num_heads * shape.head_dim)
    yield Product(-(-shape.vocabulary // tp_size), shape.hidden, is_head=True)
    inner_sizes = [shape.inner]
    if shape.experts is not None:
        yield Product(shape.experts.num, shape.hidden)  # the router
        inner_sizes = [shape.experts.shared_inner]
        if shape.experts.shared_inner:
            yield Product(1, shape.hidden)  # the gate of the shared one
    for inner in inner_sizes:
        if inner and inner % tp_size == 0:
            yield Product(inner // tp_size, shape.hidden, is_gated=True)
            yield Product(shape.hidden, inner // tp_size)
