"""Triton kernels compiled for cards that this machine need not have, and what their machine code needs.

`python -m tests.kernels.compiled` takes a list of `Variant`s as JSON on stdin and prints a list of `Facts`: a process
of its own, because the tests' process holds the interpreted kernels.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 86, 89, 90, 120)
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory a block may have, by architecture (CUDA programming guide, technical specifications)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of `kernel` of `appliance.kernels.<module>`.

    pointers: element types of the arguments named *_ptr, "fp16" unless told. constants: the constexpr arguments. Every
    other argument is an int32; `ragged` names those not divisible by 16, `floats` those that are fp32.
    """

    module: str
    kernel: str
    constants: dict[str, int]
    pointers: dict[str, str] = dataclasses.field(default_factory=dict)
    ragged: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What one compilation needs.

    shared: bytes a block takes; stack, local: bytes a thread spills; loop: machine instructions of the innermost
    multiplying loop by name without suffix, empty where there is none.
    """

    architecture: int
    shared: int
    registers: int
    stack: int
    local: int
    loop: dict[str, int]


def compile_offline(variants: list[Variant], architectures: tuple[int, ...] = ARCHITECTURES) -> list[list[Facts]]:
    """Facts of each variant on each architecture, in order."""
    request = json.dumps({"variants": [dataclasses.asdict(v) for v in variants], "architectures": architectures})
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, input=request, capture_output=True, text=True, timeout=1800
    )
    assert result.returncode == 0, result.stderr
    return [[Facts(**facts) for facts in row] for row in json.loads(result.stdout)]


def _compile(variant: Variant, architecture: int) -> Facts:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = pkgutil.resolve_name(f"appliance.kernels.{variant.module}:{variant.kernel}")
    signature: dict[str, str] = {}
    divisible: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(function.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + variant.pointers.get(name, "fp16")
        else:
            signature[name] = "fp32" if name in variant.floats else "i32"
        if signature[name] not in ("constexpr", "fp32") and name not in variant.ragged:
            divisible[(index,)] = [["tt.divisibility", 16]]
    constants = {(function.arg_names.index(name),): value for name, value in variant.constants.items()}
    compiled = triton.compile(
        ASTSource(function, signature, constants, divisible),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.warps, "num_stages": variant.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run_tool("cuobjdump", "-res-usage", file.name)
        code = _run_tool("nvdisasm", "-c", file.name)
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Facts(
        architecture, compiled.metadata.shared, numbers["REG"], numbers["STACK"], numbers["LOCAL"], _inner_loop(code)
    )


def _run_tool(name: str, *arguments: str) -> str:
    """One of the tools that the triton wheel carries."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


def _inner_loop(code: str) -> dict[str, int]:
    """Count the instructions of the longest loop without an inner one that holds a matrix multiply."""
    instructions: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)(.*);", line):
            instructions.append((found[1].split(".")[0], found[2]))
    loops = []
    for end, (name, rest) in enumerate(instructions):
        target = re.search(r"\.L_x_\d+", rest) if name == "BRA" else None
        start = labels.get(target[0], end) if target else end
        if start < end:
            loops.append((start, end))
    inner: list[Counter[str]] = [
        Counter(name for name, _ in instructions[start : end + 1])
        for start, end in loops
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops)
    ]
    multiplying = [body for body in inner if any("MMA" in name for name in body)]
    multiplying.sort(key=lambda body: body.total())
    return dict(multiplying[-1]) if multiplying else {}


def main() -> None:
    request = json.load(sys.stdin)
    variants = [
        Variant(**{**fields, "ragged": tuple(fields["ragged"]), "floats": tuple(fields["floats"])})
        for fields in request["variants"]
    ]
    rows = [[dataclasses.asdict(_compile(v, cc)) for cc in request["architectures"]] for v in variants]
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
