"""Requests of recurrent layers: where their chunks end, which prefixes they share, how many run."""

from __future__ import annotations

from appliance.engine.request import Request
from appliance.engine.scheduler import Scheduler
from appliance.sampling_params import SamplingParams
from tests.engine.test_scheduler_properties import PagedModel, make_config, undisturbed_answer

BLOCK = 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def make_scheduler(
    num_state_slots: int = 8, *, chunk: int = 64, enable_prefix_caching: bool = True
) -> tuple[Scheduler, PagedModel]:
    config = make_config(
        num_blocks=64,
        block_size=BLOCK,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=enable_prefix_caching,
        num_state_slots=num_state_slots,
    )
    return Scheduler(config), PagedModel(config)


def ask(scheduler: Scheduler, model: PagedModel, *requests: Request) -> list[list[int]]:
    """Run requests to their ends, check the answers; return the lengths of each one's prefill chunks."""
    chunks: dict[Request, list[int]] = {request: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_requests:
        output = scheduler.schedule()
        for chunk in output.scheduled:
            if chunk.is_prefill:
                chunks[chunk.request].append(chunk.num_tokens)
        scheduler.commit(output, model.execute(output))
        scheduler.check_integrity()
    for request in requests:
        assert request.output_token_ids == undisturbed_answer(request, num_state_slots=1)[0]
    return list(chunks.values())


def make_request(prompt: list[int], name: str = "a", child_index: int = 0) -> Request:
    return Request(name, prompt, PARAMS, seed=0, child_index=child_index)


def test_a_prefill_ends_a_chunk_at_its_last_whole_block() -> None:
    """Strictly before the last token, which has to be computed to sample from."""
    for length, expected in ((3, [3]), (4, [4]), (5, [4, 1]), (12, [8, 4]), (13, [12, 1])):
        assert ask(*make_scheduler(), make_request([1] * length)) == [expected]


def test_chunks_of_a_long_prompt_end_at_blocks() -> None:
    assert ask(*make_scheduler(chunk=10), make_request([1, 2] * 13)) == [[8, 8, 8, 2]]
    assert ask(*make_scheduler(chunk=3), make_request([1, 2] * 4)) == [[3, 1, 3, 1]]


def test_without_a_prefix_cache_a_prompt_is_one_chunk() -> None:
    assert ask(*make_scheduler(enable_prefix_caching=False), make_request([1] * 13)) == [[13]]


def test_a_prompt_is_shared_up_to_the_last_snapshot_in_it() -> None:
    scheduler, model = make_scheduler()
    first = [1, 2, 1, 1] * 3
    ask(scheduler, model, make_request([*first, 2]))
    again, longer, shorter = make_request([*first, 2]), make_request([*first, 1, 2, 2, 2, 1]), make_request(first[:9])
    for request in (again, longer, shorter):
        ask(scheduler, model, request)
    assert again.num_cached_tokens == longer.num_cached_tokens == 12
    assert shorter.num_cached_tokens == 0, "the state after 8 tokens was never kept"
    assert ask(scheduler, model, make_request(first[:10]))[0] == [2]


def test_answers_to_one_prompt_share_its_computation() -> None:
    scheduler, model = make_scheduler()
    requests = [make_request([1, 2, 2] * 5, str(index), index) for index in range(3)]
    assert ask(scheduler, model, *requests) == [[12, 3], [3], [3]]


def test_no_more_requests_run_than_have_slots() -> None:
    scheduler, model = make_scheduler(num_state_slots=2)
    for index in range(5):
        scheduler.add(make_request([1, 2, index % 2 + 1] * 4, str(index)))
    while scheduler.has_requests:
        output = scheduler.schedule()
        assert 1 <= scheduler.num_running <= 2
        scheduler.commit(output, model.execute(output))
        scheduler.check_integrity()


def test_a_token_that_is_computed_again_is_not_in_the_state_twice() -> None:
    scheduler, model = make_scheduler()
    request = make_request([1, 2, 1, 2, 2])
    scheduler.add(request)
    for num_sampled in (1, 1, 1, 0, 1, 0):
        output = scheduler.schedule()
        scheduler.commit(output, model.execute(output, num_sampled))
        scheduler.check_integrity()
    assert request.num_preemptions == 2
    while scheduler.has_requests:
        output = scheduler.schedule()
        scheduler.commit(output, model.execute(output))
    assert request.output_token_ids == undisturbed_answer(request, num_state_slots=1)[0]
