"""`LLM` on a tiny model: the engine core's answers as text, in order; nothing runs for a call that is refused."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance import LLM, RequestOutput, SamplingParams
from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.engine.request import StepOutput
from appliance.errors import ContextLengthError, InvalidRequestError, UsageError
from tests.appliance.tiny_model import EXACT, save_tiny_model
from tests.appliance.tokenizer_files import byte_level_bpe
from tests.test_repo import NOT_ON_A_GPU_BOX

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = ["hello world", "a", "The sea is wide, and the world", "hello", "0123456789"]

LISTING = """
from appliance import LLM, SamplingParams

llm = LLM(
    model="Qwen/Qwen-7B-Chat",
    max_model_len=32768,
    dtype="half",
    enable_prefix_caching=True
)
"""
"""Of the article this project answers; the import is the only line changed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, **EXACT)


def assert_idle(llm: LLM) -> None:
    stats = llm._core.stats()
    assert stats.requests_running == stats.requests_waiting == 0
    assert stats.kv_blocks_free == stats.kv_blocks_total


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_the_listing_of_the_article_runs(folder: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(LISTING.replace("Qwen/Qwen-7B-Chat", str(folder)), namespace)
    [output] = namespace["llm"].generate("hello", namespace["SamplingParams"](max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


def test_greedy_answers_are_the_engine_core_s(folder: Path, llm: LLM) -> None:
    core = EngineCore.load(EngineConfig(str(folder), **EXACT))
    expected = []
    for prompt in PROMPTS:
        core.add("r", byte_level_bpe().encode(prompt).ids, GREEDY)
        outputs: list[StepOutput] = []
        while core.has_work:
            outputs += core.step()
        expected.append([token for output in outputs for token in output.token_ids])
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


def test_an_output_says_all_about_its_request(llm: LLM) -> None:
    first, second = llm.generate(["hello world", "a"], GREEDY)
    tokenizer = byte_level_bpe()
    assert first.prompt == "hello world"
    assert first.prompt_token_ids == tokenizer.encode("hello world").ids
    [answer] = first.outputs
    assert answer.text == tokenizer.decode(answer.token_ids)
    assert answer.finish_reason == "length"
    assert first.finished
    assert first.request_id != second.request_id


def test_log_probabilities_are_there_when_asked_for(llm: LLM) -> None:
    [output] = llm.generate("hello world", replace(GREEDY, logprobs=2, prompt_logprobs=0))
    [answer] = output.outputs
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    assert all(entry.top[0] == (entry.token_id, entry.logprob) and len(entry.top) == 2 for entry in answer.logprobs)
    assert [entry.token_id for entry in output.prompt_logprobs] == output.prompt_token_ids[1:]


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Of different lengths, so they end in another order."""
    lengths = (9, 1, 5, 3, 7)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(answer) for answer in tokens(outputs)] == list(lengths)


def test_all_prompts_are_batched(llm: LLM) -> None:
    before = llm._core.num_steps
    llm.generate(PROMPTS * 4, GREEDY)
    assert llm._core.num_steps - before < 2 * NUM_TOKENS


def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    ids = byte_level_bpe().encode("hello world").ids
    forms: list[Any] = ["hello world", ids, tuple(ids), {"prompt": "hello world"}, {"prompt_token_ids": ids}]
    [expected] = tokens(llm.generate("hello world", GREEDY))
    assert all(tokens(llm.generate(form, GREEDY)) == [expected] for form in forms)
    assert tokens(llm.generate(forms, GREEDY)) == [expected] * len(forms)
    assert tokens(llm.generate([ids, ids], GREEDY)) == [expected] * 2
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("bad", "error", "sentence"),
    [
        ([5, 268], InvalidRequestError, "Token id 268 is out of range: the model knows 0 to 267"),
        ("", InvalidRequestError, "The prompt is empty"),
        ([5] * 300, ContextLengthError, "maximum context length is 256"),
        (5.0, InvalidRequestError, "found float"),
        ({"text": "hello"}, InvalidRequestError, "a prompt's dict holds 'prompt'"),
        ({"prompt": None}, InvalidRequestError, "a prompt's dict holds 'prompt'"),
        ({"prompt_token_ids": []}, InvalidRequestError, "The prompt is empty"),
        ({"prompt_token_ids": [5, "x"]}, InvalidRequestError, "token ids are a list of integers"),
    ],
)
def test_one_bad_prompt_is_named_before_anything_runs(
    llm: LLM, bad: Any, error: type[InvalidRequestError], sentence: str
) -> None:
    before = llm._core.num_steps
    with pytest.raises(error, match=sentence) as caught:
        llm.generate(["hello", bad], GREEDY)
    assert caught.value.param == "prompts[1]"
    assert llm._core.num_steps == before
    assert_idle(llm)


def test_sampling_params_are_one_for_all_or_one_each(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="lists 3 for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(InvalidRequestError, match="must be a SamplingParams, found dict"):
        llm.generate(["a", "b"], {"temperature": 0})  # type: ignore[arg-type]


def test_chat_answers_what_the_template_makes_of_a_conversation(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    [output] = llm.chat(conversation, GREEDY)
    assert output.prompt == rendered
    assert tokens([output]) == tokens(llm.generate(rendered, GREEDY))
    assert [o.prompt for o in llm.chat([conversation] * 2, GREEDY)] == [rendered] * 2
    [continued] = llm.chat(conversation, GREEDY, chat_template_kwargs={"continue_final_message": True})
    assert continued.prompt == "<|im_start|>user\nhello"


@pytest.mark.parametrize("messages", [[], [[]], ["hello"], [{"content": "hello"}], [[{"role": "user"}], "hello"]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a conversation is a list of dicts"):
        llm.chat(messages, GREEDY)


def test_a_stop_string_ends_an_answer_and_frees_its_blocks(llm: LLM) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    [whole] = llm.generate("hello", endless)
    text = whole.outputs[0].text
    stop = text[len(text) // 4]
    before = llm._core.num_steps
    stopping = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=stop)
    [answer] = llm.generate("hello", stopping)[0].outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert llm._core.num_steps - before < 100
    assert_idle(llm)


def test_a_call_that_is_interrupted_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    step, stop_at = llm._core.step, llm._core.num_steps + 3

    def interrupted() -> list[StepOutput]:
        if llm._core.num_steps == stop_at:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert_idle(llm)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


def test_threads_take_turns(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: tokens(llm.generate(PROMPTS, GREEDY)), range(4)))
    assert answers == [expected] * 4


def test_progress_is_shown_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(PROMPTS, GREEDY, use_tqdm=True)
    assert "5/5" in capsys.readouterr().err


def test_what_is_done_otherwise_than_asked_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "appliance"):
        llm = LLM(folder, max_model_len=32768, dtype="half", kv_cache_bytes=1 << 20)
        llm.generate("hello", GREEDY)
    assert len(caplog.messages) == len(llm.model_info.warnings) == 2
    assert sum("bfloat16" in text for text in caplog.messages) == 1
    assert sum("32768" in text and "256" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization: no setting has this name.*max_num_seqs"),
        ({"max_model_len": "32k"}, "max_model_len must be an integer of at least 1, found '32k'"),
        ({"num_threads": -1}, "num_threads must be an integer of at least 0"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false"),
        ({"dtype": "int4"}, "dtype 'int4' is not known: use auto"),
        ({"model": "/does/not/exist"}, "/does/not/exist does not exist"),
    ],
)
def test_a_wrong_setting_is_named(folder: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        LLM(**{"model": folder, **settings})


def test_no_more_than_torch_and_the_tokenizer_is_needed(folder: Path) -> None:
    code = f"""
import sys
for name in {NOT_ON_A_GPU_BOX}: sys.modules[name] = None
from appliance import LLM, SamplingParams
llm = LLM({str(folder)!r}, num_threads=1)
[one] = llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))
[two] = llm.chat([{{"role": "user", "content": "hello"}}], SamplingParams(max_tokens=3, ignore_eos=True))
print(len(one.outputs[0].token_ids), len(two.outputs[0].token_ids))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["3", "3"], result.stderr


def test_an_unknown_name_of_the_package_is_an_error() -> None:
    import appliance

    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        _ = appliance.LLN  # type: ignore[attr-defined]
