"""The whole of `appliance quantize`, in order: refuse, measure, quantise, write, read back, measure again."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import QuantizationError, UsageError
from appliance.model_cache import Progress
from appliance.quant.round_to_nearest import round_to_gptq
from appliance.quant.shards import ShardWriter
from appliance.quantize.calibration import FEW_TOKENS, Calibration, read_calibration
from appliance.quantize.child import run_child
from appliance.quantize.environment import quantizing_python
from appliance.quantize.output import check_out, free_name, write_configuration, written_whole
from appliance.quantize.perplexity import perplexity
from appliance.quantize.scheme import Scheme
from appliance.quantize.source import Source, link_weights, open_source
from appliance.quantize.verify import Verdict, verify

_WORKER = Path(__file__).with_name("worker.py")
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
"""For glibc: freed memory is used again. autoawq on a CPU frees hundreds of megabytes hundreds of times a layer, and
takes several times as long where the kernel hands them out as new, zeroed pages each time.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for. calibration None is the text that comes with the appliance."""

    model: str
    out: Path
    scheme: Scheme
    calibration: Path | None = None
    python: Path | None = None
    force: bool = False
    measure: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """perplexities: before and after, None where they were not asked for. warnings: what a user should know."""

    out: Path
    verdict: Verdict
    perplexities: tuple[float, float] | None
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """What is printed at the end."""
        module, error = max(self.verdict.errors.items(), key=lambda item: item[1])
        lines = [f"{self.out}: {self.verdict.description}"]
        lines.append(f"self-test  {self.verdict.self_test}")
        lines.append(f"weights    {len(self.verdict.errors)} compared, largest relative error {error:.3f} ({module})")
        if self.perplexities is not None:
            before, after = self.perplexities
            lines.append(f"perplexity {before:.2f} before, {after:.2f} after, ratio {after / before:.3f}")
        return [*lines, *(f"warning    {warning}" for warning in self.warnings)]


def quantize(request: Request, progress: Progress) -> Outcome:
    """Quantise `request.model` into the new folder `request.out`. Nothing is left there unless it is whole and read
    back right.

    Raises UsageError and CheckpointError before anything heavy is done, QuantizationError where it fails.
    """
    source = open_source(request.model)
    check_out(request.out, source.folder, request.force)
    request.scheme.check_model(source.config.get("model_type"))
    request.scheme.check_shapes(source.shapes)
    if request.scheme.method == "gptq":
        _check_cuda()
    calibration = read_calibration(request.calibration, source.folder)
    log = free_name(request.out.with_name(request.out.name + ".log"))
    python = None if request.scheme.method == "rtn" else quantizing_python(request.python, progress)
    before = _perplexity_before(source, calibration, log, progress) if request.measure else None
    with written_whole(request.out) as folder:
        if python is None:
            _round_to_nearest(source, request.scheme, folder, progress)
        else:
            _run_package(python, source, request.scheme, calibration, folder, log, progress)
        write_configuration(source, request.scheme, folder)
        progress("Comparing with the original", 0.0)
        verdict = verify(source, request.scheme, folder)
    perplexities = None
    if before is not None:
        try:
            perplexities = (before, perplexity(request.out, calibration.held_out, log, progress))
        except QuantizationError as error:
            raise QuantizationError(f"{request.out} was written, but could not be run: {error.message}") from error
    return Outcome(request.out, verdict, perplexities, _warnings(request, calibration))


def _perplexity_before(source: Source, calibration: Calibration, log: Path, progress: Progress) -> float:
    try:
        return perplexity(source.folder, calibration.held_out, log, progress)
    except QuantizationError as error:
        raise QuantizationError(
            f"the perplexity of {source.folder} could not be measured: {error.message}; --no-perplexity leaves it out"
        ) from error


def _check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "--method gptq needs an NVIDIA card, which auto-gptq quantises on, and none was found: use --method awq, "
            "which runs on a CPU too, or --method rtn, which only rounds to nearest, at a loss of quality"
        )


def _run_package(
    python: Path, source: Source, scheme: Scheme, calibration: Calibration, out: Path, log: Path, progress: Progress
) -> None:
    with tempfile.TemporaryDirectory() as view:
        link_weights(source, Path(view))
        job = {
            "method": scheme.method,
            "model": view,
            "out": str(out.absolute()),
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "blocks": calibration.blocks,
        }
        # -I: neither this process's PYTHONPATH nor the user's own packages get into the other environment.
        run_child([str(python), "-I", str(_WORKER)], job, log, progress, _KEEP_MEMORY)


def _round_to_nearest(source: Source, scheme: Scheme, out: Path, progress: Progress) -> None:
    writer = ShardWriter(out)
    names = source.checkpoint.names()
    for index, name in enumerate(names):
        progress("Rounding to nearest", index / len(names))
        module = name.removesuffix(".weight")
        tensor = source.checkpoint.tensor(name)
        if module in source.shapes and module != name:
            for part, value in round_to_gptq(tensor, scheme.bits, scheme.group_size).items():
                writer.add(f"{module}.{part}", value)
        else:
            writer.add(name, tensor)
    writer.close()


def _warnings(request: Request, calibration: Calibration) -> tuple[str, ...]:
    if request.scheme.method == "rtn":
        return ("rounded to nearest, without calibration: --method awq or gptq gives better answers",)
    if calibration.num_tokens < FEW_TOKENS:
        return (
            f"calibrated on {calibration.num_tokens} tokens: a text of {FEW_TOKENS} or more, of the kind the model "
            "is to work on, gives better answers (--calibration FILE)",
        )
    return ()
