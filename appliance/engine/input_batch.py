"""One step's requests as the arrays that the model runner feeds to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from appliance.engine.scheduler import ScheduledRequest


@dataclass(frozen=True, slots=True)
class InputBatch:
    """T rows of B requests, decodes first.

    input_ids, positions, slot_mapping: [T] int64. query_start_loc: B + 1 offsets; seq_lens: lengths after the step.
    logits_rows: [R] int64, the last row of each request that samples, then all `scored_positions`, request by request.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]
    num_decode: int
    logits_rows: Tensor

    def to(self, device: torch.device) -> InputBatch:
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            positions=self.positions.to(device),
            slot_mapping=self.slot_mapping.to(device),
            logits_rows=self.logits_rows.to(device),
        )

    @classmethod
    def build(cls, scheduled: Sequence[ScheduledRequest], block_size: int) -> InputBatch:
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, seq_lens = [0], []
        sampling_rows: list[int] = []
        scored_rows: list[int] = []
        for chunk in scheduled:
            request, start = chunk.request, chunk.request.num_computed_tokens
            stop = start + chunk.num_tokens
            scored_rows += (len(input_ids) + position - start for position in chunk.scored_positions)
            input_ids += request.token_ids(start, stop)
            positions += range(start, stop)
            table = request.block_table
            slots += [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]
            starts.append(len(input_ids))
            seq_lens.append(stop)
            if chunk.samples:
                sampling_rows.append(len(input_ids) - 1)
        return cls(
            input_ids=torch.tensor(input_ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=[chunk.request.block_table for chunk in scheduled],
            num_decode=sum(not chunk.is_prefill for chunk in scheduled),
            logits_rows=torch.tensor(sampling_rows + scored_rows, dtype=torch.int64),
        )
