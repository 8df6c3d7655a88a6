"""How much of the KV pool that is given out lies unused: the real scheduler and block manager, no model, a mixed load.

Every answer has its length drawn beforehand and no two prompts share a block. Run it: python -m benchmarks.kv_waste
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass

from appliance.engine.request import Request
from appliance.engine.scheduler import Scheduler, SchedulerConfig
from appliance.sampling_params import SamplingParams

LONGEST = 2048
"""max_model_len: what a server that reserves contiguous room must reserve for each request."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """Sums and means over the steps of one load. Slots hold one token."""

    num_requests: int
    mean_length: float
    """Tokens, prompt and answer."""
    num_steps: int
    preemptions: int
    allocated_slots: int
    """Summed over all steps: block_size for each block that a request held."""
    unused_slots: int
    """Of those: without a token in it when the step had run."""
    concurrent_requests: float
    """Mean number of running requests over the steps in which others waited for room."""
    contiguous_requests: int
    """How many reservations of LONGEST tokens the same pool holds."""

    @property
    def waste(self) -> float:
        return self.unused_slots / self.allocated_slots

    @property
    def gain(self) -> float:
        """Concurrent requests, over those of a server that reserves the longest length for each."""
        return self.concurrent_requests / self.contiguous_requests


def mixed_requests(seed: int, count: int) -> list[Request]:
    """Requests of 100 to 2,000 tokens in all, log-uniform (mean 634), of which 30 to 90 % are prompt."""
    source = random.Random(seed)
    requests = []
    for index in range(count):
        total = round(100 * 20 ** source.random())
        num_prompt = round(total * source.uniform(0.3, 0.9))
        params = SamplingParams(max_tokens=total - num_prompt, ignore_eos=True)
        requests.append(Request(f"{index}", [index] * num_prompt, params, seed=0))
    return requests


def measure(*, seed: int = 0, count: int = 200, pool_tokens: int = 16 * LONGEST, block_size: int = 16) -> KvUse:
    """Run a mixed load, all of it queued at once, through a pool of `pool_tokens` tokens."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=pool_tokens // block_size,
            block_size=block_size,
            max_model_len=LONGEST,
            max_num_seqs=count,
            max_num_batched_tokens=512,
            max_waiting=count,
            enable_prefix_caching=True,
            content_digest=b"",
            eos_token_ids=frozenset(),
        )
    )
    requests = mixed_requests(seed, count)
    for request in requests:
        scheduler.add(request)
    manager = scheduler.block_manager
    num_steps = allocated = unused = 0
    running_when_full = []
    while scheduler.has_requests:
        output = scheduler.schedule()
        # Before `commit`, which frees what has ended: the step's own tokens are in the pool while it runs.
        in_step = {chunk.request: chunk.num_tokens for chunk in output.scheduled}
        holders = [request for request in requests if request.block_tables]
        num_slots = (manager.num_blocks - manager.num_free_blocks) * block_size
        num_tokens = sum(request.num_computed_tokens + in_step.get(request, 0) for request in holders)
        allocated += num_slots
        unused += num_slots - num_tokens
        if scheduler.num_waiting:
            running_when_full.append(scheduler.num_running)
        scheduler.commit(output, {chunk.request.request_id: (1,) for chunk in output.scheduled if chunk.samples})
        num_steps += 1
    return KvUse(
        num_requests=count,
        mean_length=sum(request.num_tokens for request in requests) / count,
        num_steps=num_steps,
        preemptions=scheduler.totals.preemptions,
        allocated_slots=allocated,
        unused_slots=unused,
        concurrent_requests=sum(running_when_full) / len(running_when_full),
        contiguous_requests=pool_tokens // LONGEST,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    use = measure(seed=options.seed, count=options.requests, block_size=options.block_size)
    print(f"{use.num_requests} requests of {use.mean_length:.0f} tokens on average, {use.num_steps} steps")
    print(f"unused of allocated slots  {use.waste:.2%}")
    print(f"concurrent requests        {use.concurrent_requests:.1f}, {use.gain:.2f} times the contiguous reservations")
    print(json.dumps(asdict(use)))


if __name__ == "__main__":
    main()
