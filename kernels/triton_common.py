"""What every Triton kernel here shares. Triton's interpreter (TRITON_INTERPRET=1) is chosen when this is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""triton.jit with a type: the decorated function is launched as kernel[grid](...)."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter runs on a CPU: it knows no PTX, and multiplies the bits of bfloat16 as if they were integers."""


@jit
def dot(a: tl.tensor, b: tl.tensor, accumulator: tl.tensor) -> tl.tensor:
    """accumulator + a @ b in fp32; fp32 operands are not rounded to tf32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    else:
        return tl.dot(a, b, accumulator, input_precision="ieee")


constexpr_function: Callable[[Callable[..., Any]], Any] = triton.constexpr_function
"""triton.constexpr_function with a type: plain Python that kernels call while they are compiled."""
