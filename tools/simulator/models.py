# SPDX-License-Identifier: Apache-2.0
"""List the gradients of known models, and when a training step makes and needs them.

Shapes are computed from each paper's description of its architecture:
    ResNet-50: He et al., CVPR 2016, table 1; projection shortcuts, batch normalization after
        every convolution, one linear layer; 25.56 M parameters.
    VGG-16: Simonyan and Zisserman, ICLR 2015, table 1, configuration D; 138.36 M parameters.
    BERT-large: Devlin et al., NAACL 2019: 24 layers, width 1024, 4096 inside; vocabulary 30522,
        512 positions, pooler and heads of pre-training; 336.2 M parameters.

A layer's work is its multiplications; forward takes a third of a step's computation and backward
two thirds, shared among layers by their work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.simulator.plan import Tensor

OVERLAPS = ("full", "backward", "none")
FORWARD_SHARE = 1 / 3
PIXELS = 224  # width and height of an image


@dataclass(frozen=True)
class Layer:
    """Describe one layer: elements of its tensors, and its work in any unit."""

    name: str
    elements: tuple[int, ...]
    work: float


@dataclass(frozen=True)
class Model:
    """Describe a model: layers from front to back, and the computation of one step.

    compute_ms: of forward and backward on one GPU, V100. element_bytes: of a gradient.
    """

    name: str
    layers: tuple[Layer, ...]
    compute_ms: float
    element_bytes: int
    source: str

    @property
    def parameters(self) -> int:
        """Count the parameters."""
        return sum(sum(layer.elements) for layer in self.layers)


def _convolution(name: str, inputs: int, outputs: int, kernel: int, size: int) -> Layer:
    """Give a convolution without bias, with the batch normalization that follows it."""
    weights = kernel * kernel * inputs * outputs
    return Layer(name, (weights, outputs, outputs), float(weights * size * size))


def _resnet50() -> Iterator[Layer]:
    yield _convolution("conv1", 3, 64, 7, PIXELS // 2)
    inputs, size = 64, PIXELS // 4
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=2):
        for block in range(blocks):
            name, before = f"conv{stage}_{block + 1}", size
            if block == 0 and stage > 2:
                size //= 2
            yield _convolution(f"{name}.a", inputs, width, 1, before)
            yield _convolution(f"{name}.b", width, width, 3, size)
            yield _convolution(f"{name}.c", width, 4 * width, 1, size)
            if block == 0:
                yield _convolution(f"{name}.shortcut", inputs, 4 * width, 1, size)
            inputs = 4 * width
    yield Layer("linear", (inputs * 1000, 1000), inputs * 1000.0)


def _vgg16() -> Iterator[Layer]:
    inputs, size = 3, PIXELS
    for stage, (count, width) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], 1):
        for number in range(1, count + 1):
            weights = 9 * inputs * width
            yield Layer(f"conv{stage}_{number}", (weights, width), float(weights * size * size))
            inputs = width
        size //= 2
    inputs *= size * size
    for number, outputs in enumerate((4096, 4096, 1000), start=6):
        yield Layer(f"linear{number}", (inputs * outputs, outputs), float(inputs * outputs))
        inputs = outputs


def _bert_large() -> Iterator[Layer]:
    width, inner, words, positions, length = 1024, 4096, 30522, 512, 128
    yield Layer("embeddings", (words * width, positions * width, 2 * width, width, width), 0.0)
    square = (width * width, width)
    for number in range(24):
        weights = 4 * width * width + 2 * width * inner
        elements = (
            *square * 4, width, width,
            width * inner, inner, inner * width, width, width, width,
        )  # fmt: skip
        yield Layer(f"layer{number}", elements, float(weights + 2 * length * width))
    # The word weights of the output are those of the embeddings.
    heads = (*square, *square, width, width, words, 2 * width, 2)
    yield Layer("heads", heads, 0.15 * words * width)  # 15 % of the words are predicted


def make(name: str) -> Model:
    """Make a model by name; KeyError if there is none."""
    return MODELS[name]


# V100, 64 samples per step. BERT: 6 operations per parameter and word, 128 words, at 45 Tflop/s
# of mixed precision; ResNet-50: 351 images/s, as the artifact of OSDI 2020 reads; VGG-16: some
# 230 images/s. Scale with --compute-ms.
MODELS = {
    "resnet50": Model(
        "resnet50", tuple(_resnet50()), 64 / 351 * 1e3, 4, "V100, float32, 64 images, 351/s"
    ),
    "vgg16": Model("vgg16", tuple(_vgg16()), 64 / 230 * 1e3, 4, "V100, float32, 64 images, 230/s"),
    "bert-large": Model(
        "bert-large",
        tuple(_bert_large()),
        6 * 336.2e6 * 128 * 64 / 45e12 * 1e3,
        2,
        "V100, float16, 64 x 128 words, 45 Tflop/s",
    ),
}


@dataclass(frozen=True)
class Schedule:
    """Tell what a step computes when: tensors with the time they are ready, layers' forward."""

    tensors: tuple[Tensor, ...]
    layer_of: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: float

    @property
    def compute_s(self) -> float:
        """Give the time of a step that has nothing to send."""
        return self.backward_s + sum(self.forward_s)


def schedule(
    model: Model, *, compute_s: float, element_bytes: int, overlap: str = "full"
) -> Schedule:
    """Lay out a step from the start of backward: the last layer's gradients come first.

    Front layers have the higher priority. Tensors are in the order of the model, which is the
    order of their declaration. overlap: with "none" all wait for the end of backward.
    """
    total = sum(layer.work for layer in model.layers)
    shares = [layer.work / total for layer in model.layers]
    backward_s = compute_s * (1 - FORWARD_SHARE)
    tensors: list[Tensor] = []
    layer_of: list[int] = []
    for number, layer in enumerate(model.layers):
        ready = backward_s * (1.0 if overlap == "none" else sum(shares[number:]))
        for part, elements in enumerate(layer.elements):
            name = f"{layer.name}.{part}"
            tensors.append(Tensor(elements * element_bytes, ready, -len(tensors), name))
            layer_of.append(number)
    forward = tuple(compute_s * FORWARD_SHARE * share for share in shares)
    return Schedule(tuple(tensors), tuple(layer_of), forward, backward_s)


def step_s(plan: Schedule, done_s: Sequence[float], overlap: str) -> float:
    """Give the time of a step, from the start of backward to the end of the next forward.

    overlap: "full", each layer's forward waits for its own parameters; "backward", it waits for
    all, as with an optimizer that steps once; "none", as well, and nothing is sent before.
    """
    if overlap != "full":
        return max([plan.backward_s, *done_s]) + sum(plan.forward_s)
    ready = [plan.backward_s] * len(plan.forward_s)
    for layer, done in zip(plan.layer_of, done_s, strict=True):
        ready[layer] = max(ready[layer], done)
    now = plan.backward_s
    for at, forward in zip(ready, plan.forward_s, strict=True):
        now = max(now, at) + forward
    return now
