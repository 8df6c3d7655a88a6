"""What the engine says of its memory against what the system says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = """
import dataclasses, json, sys
from pathlib import Path
from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.engine.memory import HostMemory

def anonymous():
    # Not the code of libraries: MKL maps 90 MB of it for float32.
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024

before = anonymous()
core = EngineCore.load(EngineConfig(sys.argv[1], dtype=sys.argv[2], kv_cache_bytes=256 << 20, num_threads=1))
loaded = anonymous()
info = dataclasses.asdict(core.model_info)
core.runner.cache.zero_()
taken, cache, held = loaded - before, anonymous() - loaded, HostMemory().held()
print(json.dumps({**info, "taken": taken, "cache": cache, "held": held}, default=list))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_counted_bytes_are_those_the_process_takes(folder: Path, dtype: str) -> None:
    command = [sys.executable, "-c", LOAD, str(folder), dtype]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    use = found["memory"]
    # What the allocator keeps of temporaries lies around the weights.
    assert found["taken"] == pytest.approx(use["weights"], rel=0.1, abs=60 << 20)
    assert found["cache"] == pytest.approx(use["kv_cache"], rel=0.02)
    assert 250 << 20 < use["kv_cache"] <= 256 << 20
    assert found["taken"] < use["held"] < found["held"]
    assert use["others"] + use["weights"] + use["kv_cache"] < use["total"]
    assert use["step_measured"] is None
