"""What the engine says of its memory against what the system says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = """
import dataclasses, json, sys
from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.engine.kv_cache import resident_memory

before = resident_memory()
core = EngineCore.load(EngineConfig(sys.argv[1], dtype=sys.argv[2], kv_cache_bytes=256 << 20, num_threads=1))
info = dataclasses.asdict(core.model_info)
core.runner.cache.zero_()
print(json.dumps({**info, "before": before, "with_cache": resident_memory()}, default=list))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_counted_bytes_are_those_the_process_takes(folder: Path, dtype: str) -> None:
    command = [sys.executable, "-c", LOAD, str(folder), dtype]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    loading = found["resident_bytes"] - found["before"]
    # Code that is mapped in by first use, and what the allocator keeps of temporaries, lie around the weights.
    assert loading == pytest.approx(found["weight_bytes"], rel=0.1, abs=100 << 20)
    cache = found["with_cache"] - found["resident_bytes"]
    assert cache == pytest.approx(found["kv_cache_bytes"], rel=0.02)
    assert 250 << 20 < found["kv_cache_bytes"] <= 256 << 20
    assert found["available_bytes"] > found["weight_bytes"] + found["kv_cache_bytes"]
