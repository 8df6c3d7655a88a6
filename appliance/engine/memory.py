"""How much memory a device has, how much of it is free, and what this process holds: as the system says, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch


class Memory(Protocol):
    """The memory that models are loaded into."""

    total: int

    def available(self) -> int:
        """What can be allocated now."""

    def held(self) -> int:
        """What this process has allocated."""


class HostMemory:
    """RAM, cut to the cgroup's limit (MemAvailable and MemTotal of /proc/meminfo, VmRSS of /proc/self/status)."""

    def __init__(self) -> None:
        self.total = _kilobytes("/proc/meminfo", "MemTotal")
        self._limit: int | None = None
        limit = Path("/sys/fs/cgroup/memory.max")
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            self._limit = int(text)
            self.total = min(self.total, self._limit)

    def available(self) -> int:
        """Without swapping."""
        available = _kilobytes("/proc/meminfo", "MemAvailable")
        if self._limit is not None:
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            available = min(available, self._limit - used)
        return max(available, 0)

    def held(self) -> int:
        return _kilobytes("/proc/self/status", "VmRSS")


class CudaMemory:
    """A card's memory. What its driver and other programs hold is not available."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = torch.cuda.mem_get_info(device)[1]

    def available(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_of(self, run: Callable[[], object]) -> int:
        """Run something and return the most that was allocated meanwhile beyond what was before."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = self.held()
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


def memory_of(device: torch.device) -> Memory:
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def _kilobytes(file: str, name: str) -> int:
    """A field in kB of a /proc file, in bytes."""
    fields = dict(line.split(":", 1) for line in Path(file).read_text().splitlines() if ":" in line)
    return int(fields[name].split()[0]) * 1024
