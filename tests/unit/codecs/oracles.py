"""Simulated quantisation, number by number, written from the formulas of the papers and not from the product's code.

Each function takes one token and returns what a reader sees of it. All arithmetic is float32 with scales in float16.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.calibration.fitting import LayerSample
from kvcache.codecs.datatype import Datatype, LayerConstants

Floats = NDArray[np.float32]
f32, f16 = np.float32, np.float16
LARGEST = f32(65504)


def outlier_rows(rng: np.random.Generator, tokens: int, heads: int, head_dim: int) -> tuple[Floats, Floats]:
    """Random keys with two channels that stick out, one of them one-sided, and values with a few large numbers."""
    keys = rng.standard_normal((tokens, heads, head_dim)).astype(f32)
    keys[:, 0, 1] *= 16
    keys[:, -1, 3] += 9
    values = rng.standard_normal((tokens, heads, head_dim)).astype(f32)
    values[rng.random(values.shape) < 0.01] *= 8
    return keys, values


def random_sample(rng: np.random.Generator, tokens: int, heads: int, head_dim: int) -> LayerSample:
    """Calibration input with outlier channels and uneven gradients."""
    keys, values = (x.reshape(tokens, -1) for x in outlier_rows(rng, tokens, heads, head_dim))
    fisher = rng.exponential(1e-4, (2, *keys.shape)).astype(f32)
    return LayerSample(keys, values, fisher[0], fisher[1])


def half(number: float | np.float32) -> np.float16:
    """To float16, never infinite."""
    return f16(min(max(f32(number), -LARGEST), LARGEST))


def nearest(number: np.float32, centroids: Floats) -> int:
    """The nearest centroid; between two, the lower. Boundaries are the float32 midpoints."""
    code = 0
    while code + 1 < len(centroids) and number > f32((centroids[code] + centroids[code + 1]) * f32(0.5)):
        code += 1
    return code


def clamp(number: np.float32) -> np.float32:
    return f32(min(max(number, f32(-1)), f32(1)))


def nuq_key(token: Floats, constants: LayerConstants, slots: int) -> tuple[list[int], set[int], Floats]:
    """(codes, outliers, expanded) of one token's keys [channels]: KVQuant sections 3.1, 3.3, 3.4."""
    codes, expanded, residuals = [], np.empty_like(token), {}
    for j, key in enumerate(token):
        scale, zero = f32(constants.key_scales[j]), f32(constants.key_zeros[j])
        x = f32(f32(key - zero) / scale)
        codes.append(nearest(clamp(x), constants.keys.centroids))
        expanded[j] = f32(f32(constants.keys.levels[codes[-1]] * scale) + zero)
        if abs(x) > 1:
            residuals[j] = f32(key - expanded[j])
    kept = sorted(residuals, key=lambda j: (-abs(residuals[j]), j))[:slots]
    for j in kept:
        expanded[j] = f32(expanded[j] + f32(half(residuals[j])))
    return codes, set(kept), expanded


def nuq_value(token: Floats, datatype: Datatype, per_side: int) -> tuple[list[int], set[int], Floats]:
    """(codes, outliers, expanded) of one token's values [group]: KVQuant sections 3.1, 3.3, 3.4."""
    order = sorted(range(len(token)), key=lambda j: (token[j], j))
    outliers = {*order[:per_side], *order[len(order) - per_side :]}
    low, high = token[order[per_side]], token[order[-1 - per_side]]
    scale, zero = f32(half(f32(high - low) * f32(0.5))), f32(half(f32(high + low) * f32(0.5)))
    codes, expanded = [], np.empty_like(token)
    for j, value in enumerate(token):
        x = f32(f32(value - zero) / scale) if scale > 0 else f32(0)
        codes.append(nearest(clamp(x), datatype.centroids))
        expanded[j] = f32(f32(datatype.levels[codes[-1]] * scale) + zero)
        if j in outliers:
            expanded[j] = f32(expanded[j] + f32(half(f32(value - expanded[j]))))
    return codes, outliers, expanded


def grouped(token: Floats, bits: int, group: int) -> Floats:
    """One head [head_dim] in groups with minimum and scale: FlexGen section 5."""
    expanded = np.empty_like(token)
    for start in range(0, len(token), group):
        part = token[start : start + group]
        low = f32(half(min(part)))
        scale = f32(half(f32(f32(max(part) - low) / f32(2**bits - 1))))
        for j, x in enumerate(part):
            code = round(float(f32(f32(x - low) / scale))) if scale > 0 else 0  # ties to even, as np.rint
            code = min(max(code, 0), 2**bits - 1)
            expanded[start + j] = f32(f32(f32(code) * scale) + low)
    return expanded


def hadamard(vector: Floats) -> Floats:
    """Walsh-Hadamard by halves: the recursion H(2n) = [[H, H], [H, −H]], neighbours first, not yet divided by √n."""
    if len(vector) == 1:
        return vector
    pairs = vector.reshape(-1, 2)
    sums, differences = pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]
    out = np.empty_like(vector)
    out[0::2], out[1::2] = hadamard(sums), hadamard(differences)
    return out


def fold(numbers: list[np.float32]) -> np.float32:
    """The sum of numbers, one half onto the other, of the next power of two from 16 on."""
    size = max(16, 1 << (len(numbers) - 1).bit_length())
    numbers = [*numbers, *[f32(0)] * (size - len(numbers))]
    while len(numbers) > 1:
        half_size = len(numbers) // 2
        numbers = [f32(a + b) for a, b in zip(numbers[:half_size], numbers[half_size:], strict=True)]
    return numbers[0]


def rotated(token: Floats, signs: Floats, levels: Floats) -> Floats:
    """One head [head_dim], a power of two, coded after a random rotation: TurboQuant section 3, with its own norm."""
    root = f32(1 / np.sqrt(len(token)))
    mixed = hadamard(token * signs) * root
    squares = fold([f32(x * x) for x in mixed])
    deviation = f32(np.sqrt(f32(squares / f32(len(token)))))
    numbers, closest, codes, size = (
        [f32(x / deviation) if deviation > 0 else f32(0) for x in mixed],
        f32(-1),
        [0],
        f32(1),
    )
    for stretch in (1.0, 0.9, 1.1) if len(levels) == 8 else (1.0,):
        tried = [nearest(f32(x * f32(stretch)), levels) for x in numbers]
        length = fold([f32(levels[c] * levels[c]) for c in tried])
        along = fold([f32(x * levels[c]) for x, c in zip(numbers, tried, strict=True)])
        if f32(f32(along * along) / length) > closest:
            closest, codes, size = f32(f32(along * along) / length), tried, length
    scale = f32(half(f32(np.sqrt(f32(squares / size)))))
    coded = np.array([f32(levels[c] * scale) for c in codes], f32)
    return np.asarray(hadamard(coded) * root * signs, f32)


def rotated_uniform(token: Floats, signs: Floats) -> Floats:
    """The same with 8 bits: 256 levels at equal distances up to the largest magnitude."""
    root = f32(1 / np.sqrt(len(token)))
    mixed = hadamard(token * signs) * root
    scale, middle = f32(half(max(abs(mixed)))), f32(127.5)
    coded = []
    for x in mixed:
        step = f32(f32(f32(x / scale) * middle) + middle) if scale > 0 else middle
        code = min(max(round(float(step)), 0), 255)  # ties to even
        coded.append(f32(f32(f32(code - middle) * f32(1 / middle)) * scale))
    return np.asarray(hadamard(np.array(coded, f32)) * root * signs, f32)


def eighth(number: np.float32) -> np.float32:
    """Nearest of the finite numbers of e4m3, ties to an even mantissa, by searching all of them."""
    numbers = [
        (e > 0) * 2.0 ** (e - 7) * (1 + m / 8) + (e == 0) * m * 2.0**-9 for e in range(16) for m in range(8)
    ]
    aim = min(abs(float(number)), 448.0)
    size = min(range(127), key=lambda code: (abs(numbers[code] - aim), code & 1))
    return f32(math.copysign(numbers[size], number))


def bfloat16(number: np.float32) -> np.float32:
    """Nearest bfloat16, ties to even, by searching its two neighbours."""
    bits = int(np.array(number, f32).view(np.uint32)) & 0xFFFF0000
    near = [np.array(bits + step, np.uint32).view(f32)[()] for step in (0, 0x10000) if bits + step < 2**32]
    near = [x for x in near if np.isfinite(x)]
    return f32(min(near, key=lambda x: (abs(float(x) - float(number)), int(x.view(np.uint32)) >> 16 & 1)))
