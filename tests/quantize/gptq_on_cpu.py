"""The worker, with auto-gptq made to take the CPU for the card that it insists on: its arithmetic needs none.

Runs in the packers' environment, in the worker's place.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from auto_gptq.modeling import _base

torch.cuda.synchronize = lambda *_: None
_base.CUDA_0 = torch.device("cpu")
worker = Path(__file__).parents[2] / "appliance" / "quantize" / "worker.py"
runpy.run_path(str(worker), run_name="__main__")
