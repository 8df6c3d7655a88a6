"""The scheduler's policy, one rule a test; the model is one token repeated."""

from __future__ import annotations

import pytest

from appliance.client import FinishReason, Priority
from appliance.engine.request import Request, RequestStatus, StepOutput
from appliance.engine.scheduler import AnswerLengths, Scheduler, SchedulerConfig, SchedulerOutput
from appliance.errors import CapacityError, ContextLengthError, QueueFullError
from appliance.sampling_params import SamplingParams

EOS, STOP, WORD = 0, 1, 7


def make_scheduler(
    *,
    num_blocks: int = 100,
    block_size: int = 16,
    max_model_len: int = 1024,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_waiting: int = 16,
    initial_answer_tokens: int = 1,
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_waiting,
            enable_prefix_caching=True,
            content_digest=b"model",
            eos_token_ids=frozenset({EOS}),
            initial_answer_tokens=initial_answer_tokens,
        )
    )


def make_request(
    name: str, num_prompt: int, params: SamplingParams | None = None, priority: Priority = Priority.NORMAL
) -> Request:
    """A prompt that shares no prefix with that of another name."""
    tokens = [int.from_bytes(name[-7:].encode(), "little"), *range(100, 99 + num_prompt)]
    return Request(name, tokens, params or SamplingParams(max_tokens=4), priority=priority, seed=0)


def step(scheduler: Scheduler, *tokens: int) -> tuple[SchedulerOutput, list[StepOutput]]:
    """Run one step in which every sampling request gets `tokens` (default: one ordinary one)."""
    output = scheduler.schedule()
    sampled = {chunk.request.request_id: tokens or (WORD,) for chunk in output.scheduled if chunk.samples}
    results = scheduler.commit(output, sampled)
    scheduler.check_integrity()
    return output, results


def chunks(output: SchedulerOutput) -> list[tuple[str, int]]:
    return [(chunk.request.request_id, chunk.num_tokens) for chunk in output.scheduled]


def run(scheduler: Scheduler, max_steps: int = 1000) -> dict[str, list[StepOutput]]:
    """Run until idle; every request's outputs."""
    results: dict[str, list[StepOutput]] = {}
    for _ in range(max_steps):
        if not scheduler.has_requests:
            assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
            return results
        for result in step(scheduler)[1]:
            results.setdefault(result.request_id, []).append(result)
    raise AssertionError(f"still busy after {max_steps} steps")


def test_one_request_is_prefilled_then_decoded_then_freed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 20, SamplingParams(max_tokens=3)))
    output, results = step(scheduler)
    assert chunks(output) == [("a", 20)]
    assert output.scheduled[0].is_prefill
    assert results == [StepOutput("a", (WORD,), None, None, 20, 0)]
    output, _ = step(scheduler)
    assert chunks(output) == [("a", 1)]
    assert not output.scheduled[0].is_prefill
    _, results = step(scheduler)
    assert results == [StepOutput("a", (WORD,), FinishReason.LENGTH, None, 20, 0)]
    assert not scheduler.has_requests
    assert scheduler.block_manager.num_free_blocks == 100


def test_an_idle_scheduler_gives_an_empty_step() -> None:
    output, results = step(make_scheduler())
    assert (output.scheduled, output.num_tokens, output.num_preempted, results) == ([], 0, 0, [])


def test_a_running_stream_gets_a_token_every_step_while_long_prompts_arrive() -> None:
    """Bug 26: prefill first starves streams for as long as prompts keep arriving."""
    scheduler = make_scheduler(max_num_batched_tokens=32)
    scheduler.add(make_request("stream", 4, SamplingParams(max_tokens=40)))
    step(scheduler)
    for index in range(20):
        if scheduler.num_waiting == 0:
            scheduler.add(make_request(f"long {index}", 200))
        output, _ = step(scheduler)
        assert chunks(output)[0] == ("stream", 1)
        assert output.num_tokens == 32


def test_decodes_that_fill_the_batch_leave_room_for_prefill() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=4)
    for index in range(8):
        scheduler.add(make_request(f"r{index}", 3, SamplingParams(max_tokens=50)))
    for _ in range(20):
        output, _ = step(scheduler)
        assert output.num_tokens <= 4
    assert scheduler.num_running == 4
    assert all(request.output_token_ids for request in scheduler._running)


def test_decodes_come_first_then_prefills_under_way_then_admissions() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    scheduler.add(make_request("decode", 4, SamplingParams(max_tokens=40)))
    step(scheduler)
    scheduler.add(make_request("under way", 40, priority=Priority.NORMAL))
    step(scheduler)
    scheduler.add(make_request("new", 40, priority=Priority.INTERACTIVE))
    output, _ = step(scheduler)
    assert chunks(output) == [("decode", 1), ("under way", 9), ("new", 22)]


def test_a_better_ranked_prompt_does_not_hold_up_a_stream() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("batch", 4, SamplingParams(max_tokens=40), Priority.BATCH))
    step(scheduler)
    scheduler.add(make_request("interactive", 100, priority=Priority.INTERACTIVE))
    for _ in range(6):
        output, _ = step(scheduler)
        assert chunks(output) == [("batch", 1), ("interactive", 15)]


def test_several_tokens_in_one_step_are_computed_after_the_other_streams_got_theirs() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=3)
    scheduler.add(make_request("a", 1, SamplingParams(max_tokens=40)))
    scheduler.add(make_request("b", 1, SamplingParams(max_tokens=40)))
    scheduler.commit(scheduler.schedule(), {"a": [WORD] * 3, "b": [WORD]})
    output, _ = step(scheduler)
    assert chunks(output) == [("b", 1), ("a", 2)]
    assert [chunk.is_prefill for chunk in output.scheduled] == [False, True]


def test_requests_are_admitted_by_priority_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("b", Priority.BATCH), ("n1", Priority.NORMAL), ("n2", Priority.NORMAL)):
        scheduler.add(make_request(name, 4, priority=priority))
    scheduler.add(make_request("i", 4, priority=Priority.INTERACTIVE))
    assert list(run(scheduler)) == ["i", "n1", "n2", "b"]


def test_admission_counts_the_whole_prompt_though_blocks_are_taken_per_chunk() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_batched_tokens=16)
    scheduler.add(make_request("a", 96))
    scheduler.add(make_request("b", 80))
    step(scheduler)
    assert scheduler.block_manager.num_free_blocks == 9
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert set(run(scheduler)) == {"a", "b"}
    assert scheduler.totals.preemptions == 0


def test_admission_keeps_room_for_the_usual_answer_not_for_the_maximum() -> None:
    scheduler = make_scheduler(num_blocks=10, initial_answer_tokens=33)
    for name in ("a", "b", "c", "d"):
        scheduler.add(make_request(name, 16, SamplingParams(max_tokens=1000)))
    step(scheduler)
    # 16 + 33 tokens, the last without KV: 3 blocks each.
    for _ in range(10):
        assert (scheduler.num_running, scheduler.num_waiting) == (3, 1)
        step(scheduler)


def test_no_more_answer_is_expected_than_was_asked_for() -> None:
    scheduler = make_scheduler(num_blocks=4, initial_answer_tokens=500)
    for name in ("a", "b", "c", "d"):
        scheduler.add(make_request(name, 16, SamplingParams(max_tokens=1)))
    assert len(step(scheduler)[1]) == 4


def test_the_expected_answer_follows_the_answers_of_that_priority() -> None:
    scheduler = make_scheduler(num_blocks=10, initial_answer_tokens=100)
    for index in range(64):
        scheduler.add(make_request(f"short {index}", 2, SamplingParams(max_tokens=1), Priority.BATCH))
        run(scheduler)
    for priority, num_running in ((Priority.NORMAL, 1), (Priority.BATCH, 2)):
        for name in ("a", "b"):
            scheduler.add(make_request(name, 10, SamplingParams(max_tokens=100), priority))
        step(scheduler)
        assert scheduler.num_running == num_running
        for name in ("a", "b"):
            scheduler.abort(name)


def test_a_cached_prefix_counts_once_for_all_who_share_it() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=128)
    prompt = make_request("shared", 64).prompt_token_ids
    scheduler.add(Request("first", prompt, SamplingParams(max_tokens=1), seed=0))
    run(scheduler)
    for name in ("a", "b"):
        scheduler.add(Request(name, [*prompt, 5], SamplingParams(max_tokens=2), seed=0))
    _, results = step(scheduler)
    assert [result.num_cached_tokens for result in results] == [64, 64]
    totals = scheduler.totals
    assert (totals.prefix_cache_query_tokens, totals.prefix_cache_hit_tokens) == (64 + 65 + 65, 128)
    assert (totals.prompt_tokens, totals.generation_tokens) == (64 + 65 + 65, 3)


def test_a_request_alone_is_admitted_whatever_is_expected_of_its_answer() -> None:
    scheduler = make_scheduler(num_blocks=4, initial_answer_tokens=500)
    scheduler.add(make_request("a", 60, SamplingParams(max_tokens=1000)))
    assert len(run(scheduler)["a"]) == 5


@pytest.mark.parametrize("num_prompt", [1, 63, 64])
def test_an_answer_that_outgrows_the_pool_ends_with_length(num_prompt: int) -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", num_prompt, SamplingParams(max_tokens=1000)))
    results = run(scheduler)["a"]
    # The last token needs no KV.
    assert len(results) == 65 - num_prompt
    assert results[-1].finish_reason is FinishReason.LENGTH


def test_an_answer_that_reaches_the_context_ends_with_length() -> None:
    scheduler = make_scheduler(max_model_len=24)
    scheduler.add(make_request("a", 20, SamplingParams()))
    results = run(scheduler)["a"]
    assert (len(results), results[-1].finish_reason) == (4, FinishReason.LENGTH)


def test_the_victim_is_the_lowest_priority_then_the_newest() -> None:
    scheduler = make_scheduler(num_blocks=4, initial_answer_tokens=1)
    names = ("i", "n1", "n2", "b")
    priorities = (Priority.INTERACTIVE, Priority.NORMAL, Priority.NORMAL, Priority.BATCH)
    for name, priority in zip(names, priorities, strict=True):
        scheduler.add(make_request(name, 16, SamplingParams(max_tokens=40), priority))
    step(scheduler)
    output, _ = step(scheduler)
    assert chunks(output) == [("i", 1), ("n1", 1)]
    assert output.num_preempted == 2
    assert [request.request_id for request in scheduler._waiting] == ["n2", "b"]
    assert set(run(scheduler)) == set(names)


def test_a_victim_leaves_the_step_it_was_in_and_returns_its_budget() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    scheduler.add(make_request("batch", 14, SamplingParams(max_tokens=40), Priority.BATCH))
    step(scheduler)
    scheduler.add(make_request("interactive", 47, priority=Priority.INTERACTIVE))
    for _ in range(2):
        step(scheduler)
    # batch takes the last block for its 17th token, and interactive needs it for its third chunk.
    output, _ = step(scheduler)
    assert (chunks(output), output.num_tokens, output.num_preempted) == ([("interactive", 15)], 15, 1)
    assert set(run(scheduler)) == {"batch", "interactive"}


def test_a_step_that_preempts_admits_nobody() -> None:
    scheduler = make_scheduler(num_blocks=3)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 16, SamplingParams(max_tokens=20)))
    step(scheduler)
    scheduler.add(make_request("c", 4, priority=Priority.INTERACTIVE))
    output, _ = step(scheduler)
    assert (chunks(output), output.num_preempted) == ([("a", 1)], 1)
    output, _ = step(scheduler)
    assert chunks(output) == [("a", 1), ("c", 4)]


def test_a_preempted_request_comes_before_newer_ones_of_its_class() -> None:
    scheduler = make_scheduler(num_blocks=2, initial_answer_tokens=1)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, 16, SamplingParams(max_tokens=8)))
    step(scheduler)
    step(scheduler)
    assert [request.request_id for request in scheduler._waiting] == ["b", "c"]


def test_a_request_preempts_itself_when_it_ranks_last() -> None:
    scheduler = make_scheduler(num_blocks=2, initial_answer_tokens=1)
    scheduler.add(make_request("a", 10, SamplingParams(max_tokens=20)))
    step(scheduler)
    scheduler.add(make_request("b", 15))
    step(scheduler)
    step(scheduler)
    output, _ = step(scheduler)
    assert (chunks(output), output.num_preempted) == ([("a", 1)], 1)
    assert scheduler.num_waiting == 1


def test_a_failed_step_can_be_scheduled_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 100))
    scheduler.add(make_request("b", 10))
    step(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first == second
    scheduler.check_integrity()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_frees_everything_at_once_waiting_prefilling_or_decoding(num_steps: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 80, SamplingParams(max_tokens=50)))
    for _ in range(num_steps):
        step(scheduler)
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert not scheduler.has_requests
    assert scheduler.block_manager.num_free_blocks == 100


def test_a_request_aborted_in_flight_gets_nothing_even_when_its_id_is_used_again() -> None:
    scheduler = make_scheduler()
    old, new = make_request("a", 10), make_request("a", 10)
    scheduler.add(old)
    output = scheduler.schedule()
    scheduler.abort("a")
    scheduler.add(new)
    assert scheduler.commit(output, {"a": [WORD]}) == []
    scheduler.check_integrity()
    assert (old.status, old.output_token_ids, new.output_token_ids) == (RequestStatus.FINISHED, [], [])
    assert len(run(scheduler)["a"]) == 4


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason", "stop_token"),
    [
        (SamplingParams(max_tokens=9), (WORD, EOS, WORD), 2, FinishReason.STOP, None),
        (SamplingParams(max_tokens=9, ignore_eos=True), (WORD, EOS, WORD), 3, None, None),
        (SamplingParams(max_tokens=9, stop_token_ids=(STOP,)), (WORD, WORD, STOP), 3, FinishReason.STOP, STOP),
        (SamplingParams(max_tokens=9, stop_token_ids=(EOS,)), (EOS,), 1, FinishReason.STOP, None),
        (SamplingParams(max_tokens=9, stop_token_ids=(EOS,), ignore_eos=True), (EOS,), 1, FinishReason.STOP, EOS),
        (SamplingParams(max_tokens=2), (WORD, WORD, WORD), 2, FinishReason.LENGTH, None),
        (SamplingParams(max_tokens=2), (WORD, EOS, WORD), 2, FinishReason.STOP, None),
        (SamplingParams(max_tokens=9, min_tokens=2), (EOS, EOS), 2, None, None),
        (SamplingParams(max_tokens=9, min_tokens=2), (WORD, EOS, EOS, WORD), 3, FinishReason.STOP, None),
        (SamplingParams(max_tokens=9, min_tokens=1, stop_token_ids=(STOP,)), (STOP,), 1, None, None),
        (SamplingParams(max_tokens=3, min_tokens=3), (EOS, EOS, EOS), 3, FinishReason.LENGTH, None),
    ],
)
def test_an_answer_ends_at_the_first_token_that_ends_it(
    params: SamplingParams, tokens: tuple[int, ...], kept: int, reason: FinishReason | None, stop_token: int | None
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, params))
    _, results = step(scheduler, *tokens)
    assert results == [StepOutput("a", tokens[:kept], reason, stop_token, 5, 0)]
    assert scheduler.has_requests == (reason is None)


def test_a_step_that_samples_nothing_computes_the_last_token_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5))
    assert scheduler.commit(scheduler.schedule(), {}) == []
    output, results = step(scheduler)
    assert chunks(output) == [("a", 1)]
    assert results[0].token_ids == (WORD,)


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=64)
    scheduler.add(make_request("fits", 63))
    with pytest.raises(ContextLengthError, match="64 tokens > 64 maximum"):
        scheduler.add(make_request("too long", 64))
    assert set(run(scheduler)) == {"fits"}


def test_a_full_queue_refuses_and_an_impossible_prompt_is_told_so_first() -> None:
    scheduler = make_scheduler(max_waiting=1, num_blocks=4)
    scheduler.add(make_request("a", 5))
    with pytest.raises(QueueFullError, match="the queue holds 1"):
        scheduler.add(make_request("b", 5))
    with pytest.raises(CapacityError):
        scheduler.add(make_request("b", 65))


def test_the_answer_estimate_is_the_75th_percentile_of_recent_answers() -> None:
    lengths = AnswerLengths(128)
    assert lengths.estimate == 128
    for length in range(1, 201):
        lengths.record(length)
    # The last 64 are 137..200; 48 of them are at most 184.
    assert lengths.estimate == 184


def test_bug_22_a_prompt_larger_than_the_pool_is_refused_at_once_and_the_next_one_served() -> None:
    """Queued, it would never be scheduled and hold up all behind it."""
    scheduler = make_scheduler(num_blocks=50, max_model_len=2048)
    for index in range(5):
        with pytest.raises(CapacityError, match=r"1002 tokens needs 63 KV blocks .* the whole pool has 50"):
            scheduler.add(make_request(f"large {index}", 1002))
    assert not scheduler.has_requests
    scheduler.add(make_request("normal", 10))
    assert run(scheduler)["normal"][-1].finish_reason is FinishReason.LENGTH


def test_answers_to_one_prompt_compute_it_once_and_hold_up_nobody() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40)
    leader = make_request("prompt", 70)
    children = [
        Request(f"child {k}", leader.prompt_token_ids, leader.params, seed=0, child_index=k) for k in range(1, 4)
    ]
    for request in (leader, *children, make_request("other", 5)):
        scheduler.add(request)
    assert chunks(step(scheduler)[0]) == [("prompt", 40)]
    assert chunks(step(scheduler)[0]) == [("prompt", 30), ("other", 5)]
    assert chunks(step(scheduler)[0])[2:] == [(child.request_id, 6) for child in children]
    assert [child.num_cached_tokens for child in children] == [64] * 3
    assert set(run(scheduler)) == {"prompt", "other"} | {child.request_id for child in children}


def test_answers_whose_first_was_aborted_start_by_themselves() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40)
    leader = make_request("prompt", 70)
    scheduler.add(leader)
    scheduler.add(Request("child", leader.prompt_token_ids, leader.params, seed=0, child_index=1))
    step(scheduler)
    assert scheduler.abort("prompt")
    assert len(run(scheduler)["child"]) == 4


def test_no_tokens_at_all_end_with_the_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 70, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    assert step(scheduler)[1] == []
    assert step(scheduler)[1] == [StepOutput("a", (), FinishReason.LENGTH, None, 70, 0)]
    assert scheduler.block_manager.num_free_blocks == 100


def test_prompts_that_are_scored_skip_the_prefix_cache() -> None:
    scheduler = make_scheduler()
    for _ in range(2):
        scheduler.add(make_request("a", 33, SamplingParams(max_tokens=1, prompt_logprobs=0)))
        output = scheduler.schedule()
        assert chunks(output) == [("a", 33)]
        assert output.scheduled[0].scored_positions == range(32)
        scheduler.commit(output, {"a": (WORD,)})
    assert scheduler.totals.prefix_cache_query_tokens == 0
