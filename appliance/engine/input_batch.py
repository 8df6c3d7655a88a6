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

    input_ids, positions: [T] int64. query_start_loc: B + 1 offsets; seq_lens: lengths after the step.
    slot_mappings, block_tables: one a group of layers, [T] int64 and B lists of block ids.
    logits_rows: [R] int64, the last row of each request that samples, then all `scored_positions`, request by request.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mappings: list[Tensor]
    query_start_loc: list[int]
    seq_lens: list[int]
    block_tables: list[list[list[int]]]
    num_decode: int
    logits_rows: Tensor
    state_slots: Tensor | None = None
    """Of a model with recurrent layers: each request's, [B] int64."""

    def to(self, device: torch.device) -> InputBatch:
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            state_slots=None if self.state_slots is None else self.state_slots.to(device),
            input_ids=self.input_ids.to(device),
            positions=self.positions.to(device),
            slot_mappings=[slots.to(device) for slots in self.slot_mappings],
            logits_rows=self.logits_rows.to(device),
        )

    @classmethod
    def build(cls, scheduled: Sequence[ScheduledRequest], block_size: int) -> InputBatch:
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in scheduled[0].request.block_tables]
        starts, seq_lens = [0], []
        sampling_rows: list[int] = []
        scored_rows: list[int] = []
        for chunk in scheduled:
            request, start = chunk.request, chunk.request.num_computed_tokens
            stop = start + chunk.num_tokens
            scored_rows += (len(input_ids) + position - start for position in chunk.scored_positions)
            input_ids += request.token_ids(start, stop)
            positions += range(start, stop)
            for group, table in zip(slots, request.block_tables, strict=True):
                group += [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]
            starts.append(len(input_ids))
            seq_lens.append(stop)
            if chunk.samples:
                sampling_rows.append(len(input_ids) - 1)
        state_slots = [chunk.request.state_slot for chunk in scheduled if chunk.request.state_slot is not None]
        return cls(
            input_ids=torch.tensor(input_ids),
            positions=torch.tensor(positions),
            slot_mappings=[torch.tensor(group) for group in slots],
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=[[chunk.request.block_tables[group] for chunk in scheduled] for group in range(len(slots))],
            num_decode=sum(not chunk.is_prefill for chunk in scheduled),
            logits_rows=torch.tensor(sampling_rows + scored_rows, dtype=torch.int64),
            state_slots=torch.tensor(state_slots) if state_slots else None,
        )
