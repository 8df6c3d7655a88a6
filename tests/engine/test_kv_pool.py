"""How large the KV pool is: what a card's largest step leaves free, or a share of the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.config import EngineConfig
from appliance.engine import model_runner
from appliance.engine.kv_cache import CPU_DEFAULT_LIMIT, GPU_RESERVE, NUM_SNAPSHOTS, pool_bytes_on_cpu
from appliance.engine.memory import CudaMemory, HostMemory
from appliance.engine.model_runner import ModelRunner
from appliance.errors import UsageError
from tests.models.tiny import save_tiny

MIB = 1 << 20
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 2  # keys and values, layers, kv heads, block size, head_dim, bytes


class Card(CudaMemory):
    """A card of 1 GiB on which a desktop holds 300 MiB, the model takes 100 and its largest step `step` more."""

    total = 1024 * MIB
    step = 50 * MIB

    def __init__(self) -> None:
        self.free = [724 * MIB, 624 * MIB]
        self.ran = 0

    def available(self) -> int:
        return self.free.pop(0)

    def held(self) -> int:
        return 0

    def peak_of(self, run: Callable[[], object]) -> int:
        run()  # the largest step really runs, interpreted
        self.ran += 1
        return self.step


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, card: Card, kv_cache_bytes: int | None = None) -> ModelRunner:
    monkeypatch.setattr(model_runner, "memory_of", lambda device: card)
    config = EngineConfig(
        str(folder), device="cuda", dtype="float16", max_num_batched_tokens=20, kv_cache_bytes=kv_cache_bytes
    )
    return ModelRunner(config, lambda stage, done: None)


def test_the_pool_is_what_the_largest_step_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "qwen3")
    card = Card()
    runner = load(tmp_path, monkeypatch, card)
    assert card.ran == 1
    expected = (624 * MIB - card.step - GPU_RESERVE) // BLOCK_BYTES
    assert runner.plan.layout.num_blocks == expected
    memory = runner.loaded.memory
    assert (memory.total, memory.others, memory.step_measured) == (1024 * MIB, 300 * MIB, card.step)
    assert memory.kv_cache == expected * BLOCK_BYTES
    # 20 scored rows and the sampling of as many dominate so small a model.
    assert memory.step_predicted > 20 * 131 * (2 + 20)


def test_a_wish_beyond_what_is_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)
    with pytest.raises(UsageError, match=r"654,311,424 bytes of memory are free"):
        load(tmp_path, monkeypatch, Card(), kv_cache_bytes=700 * MIB)


def test_a_card_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)
    card = Card()
    card.step = 600 * MIB
    with pytest.raises(UsageError, match="at least one block"):
        load(tmp_path, monkeypatch, card)


def test_states_that_do_not_fit_run_fewer_requests(tmp_path: Path) -> None:
    """Half of the pool at most, the rest is blocks; both are counted, and the user is told."""
    save_tiny(tmp_path, "qwen3_5")
    slot_bytes = 8 * 16 * 8 * 4 + 3 * (2 * 2 * 16 + 8 * 8) * 2  # heads, key_dim, value_dim; tail of q, k and v
    block_bytes = BLOCK_BYTES // 2  # one layer of two
    config = EngineConfig(str(tmp_path), dtype="bfloat16", kv_cache_bytes=20 * slot_bytes)
    runner = ModelRunner(config, lambda stage, done: None)
    assert runner.plan.num_state_slots == 10
    assert runner.loaded.memory.recurrent_state == 10 * slot_bytes
    assert runner.plan.layout.num_blocks == 10 * slot_bytes // block_bytes
    assert f"At most 10 requests run at once instead of 64: each takes {slot_bytes:,} bytes" in runner.plan.warnings[-1]


def test_states_that_fit_leave_room_for_snapshots(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_5")
    runner = ModelRunner(EngineConfig(str(tmp_path), max_num_seqs=3, num_kv_blocks=8), lambda stage, done: None)
    assert runner.plan.num_state_slots == 3 + NUM_SNAPSHOTS
    config = EngineConfig(str(tmp_path), max_num_seqs=3, num_kv_blocks=8, enable_prefix_caching=False)
    assert ModelRunner(config, lambda stage, done: None).plan.num_state_slots == 3


def test_a_host_gives_a_share() -> None:
    assert pool_bytes_on_cpu(8 << 30) == 2 << 30
    assert pool_bytes_on_cpu(64 << 30) == CPU_DEFAULT_LIMIT
    memory = HostMemory()
    assert 0 < memory.available() < memory.total
    assert 0 < memory.held() < memory.total
