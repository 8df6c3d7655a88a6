"""`LLM`: a model in this process, for programs that have all their prompts at hand.

Knows text on one side and the engine core on the other. Everything here and below runs with torch, transformers,
tokenizers, safetensors and NumPy alone.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from appliance.client import ModelInfo, TokenLogprobs
from appliance.detokenizer import Detokenizer
from appliance.engine.core import EngineCore
from appliance.engine.request import StepOutput
from appliance.engine_arguments import engine_config, log_warnings
from appliance.errors import InvalidRequestError
from appliance.model_text import ModelText
from appliance.outputs import CompletionOutput, RequestOutput
from appliance.prompts import Prompt, PromptLike, blame, check_prompt, read_prompts
from appliance.sampling_params import SamplingParams, params_or_defaults

Message = Mapping[str, Any]

_Question = TypeVar("_Question")


@dataclass(slots=True)
class _Job:
    """A prompt and its answer so far."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    detokenizer: Detokenizer
    text: list[str] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def take(self, output: StepOutput) -> RequestOutput | None:
        """Add what a step gave; the whole answer once it has ended."""
        increment = self.detokenizer.push(output)
        if increment is None:
            return None
        self.text.append(increment.text)
        self.output_token_ids += increment.token_ids
        self.logprobs += increment.logprobs
        self.prompt_logprobs += increment.prompt_logprobs
        if increment.finish_reason is None:
            return None
        answer = CompletionOutput(
            index=0,
            text="".join(self.text),
            token_ids=self.output_token_ids,
            finish_reason=increment.finish_reason,
            stop_reason=increment.stop_reason,
            logprobs=self.logprobs,
            error=increment.error,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.token_ids,
            outputs=[answer],
            finished=True,
            num_cached_tokens=increment.usage.cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )


class LLM:
    """A loaded model. May be used from several threads, which take turns."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        max_model_len: int | None = None,
        dtype: str = "auto",
        enable_prefix_caching: bool = True,
        **settings: Any,
    ) -> None:
        """Load a model: a folder, a .gguf file, or None for the built-in one.

        `settings` are further fields of `appliance.config.EngineConfig`, such as max_num_seqs or kv_cache_bytes. What
        the engine does otherwise than asked (a context that was cut, a dtype that was replaced) is logged as a warning
        and kept in `model_info.warnings`.

        Raises UsageError if a setting is wrong, CheckpointError if the model cannot be loaded.
        """
        settings |= {"max_model_len": max_model_len, "dtype": dtype, "enable_prefix_caching": enable_prefix_caching}
        config = engine_config(model, settings)
        self._text = ModelText.load(config.model)
        self._core = EngineCore.load(config)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self.model_info: ModelInfo = self._text.describe(self._core.model_info)
        log_warnings(self.model_info)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, all batched continuously. The answers come in the order of the prompts.

        sampling_params is one for all or a list of one each; None is the sampling the model's makers suggest, with
        answers of up to the rest of the context. use_tqdm shows a progress bar.

        Raises InvalidRequestError, ContextLengthError or CapacityError before anything is computed if one of the
        prompts cannot be answered; its `param` says which.
        """
        return self._answer(read_prompts(prompts), self._encode_text, sampling_params, "prompts", use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role": ..., "content": text}`, or a list of conversations.

        chat_template_kwargs are the template's own variables; `continue_final_message` continues the last message
        instead of answering it. Else as `generate`.
        """
        variables = chat_template_kwargs or {}
        conversations = _conversations(messages)
        return self._answer(
            conversations, lambda each: self._encode_chat(each, variables), sampling_params, "messages", use_tqdm
        )

    def _encode_text(self, prompt: Prompt) -> Prompt:
        if prompt.token_ids is not None:
            return prompt
        assert prompt.text is not None, "a prompt has text or token ids"
        return Prompt(prompt.text, self._text.tokenizer.encode_text(prompt.text))

    def _encode_chat(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> Prompt:
        text = self._text.render_chat(messages, variables)
        return Prompt(text, self._text.tokenizer.encode_rendered(text))

    def _answer(
        self,
        questions: Sequence[_Question],
        encode: Callable[[_Question], Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        name: str,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        jobs: list[_Job] = []
        wishes = self._one_each(sampling_params, len(questions))
        with self._lock:
            try:
                for index, (question, params) in enumerate(zip(questions, wishes, strict=True)):
                    try:
                        jobs.append(self._add(encode(question), params))
                    except InvalidRequestError as error:
                        if len(questions) > 1:
                            blame(error, f"{name}[{index}]")
                        raise
                return self._run(jobs, use_tqdm)
            finally:
                for job in jobs:
                    self._core.abort(job.request_id)  # nothing, unless something was raised

    def _add(self, prompt: Prompt, params: SamplingParams) -> _Job:
        assert prompt.token_ids is not None, "prompts are encoded before they are added"
        check_prompt(prompt.token_ids, params, self.model_info, "prompt")
        job = _Job(
            request_id=str(next(self._numbers)),
            prompt=prompt.text,
            token_ids=prompt.token_ids,
            detokenizer=Detokenizer(self._text.tokenizer, params),
        )
        self._core.add(job.request_id, job.token_ids, params)
        return job

    def _run(self, jobs: Sequence[_Job], use_tqdm: bool) -> list[RequestOutput]:
        live = {job.request_id: job for job in jobs}
        results: dict[str, RequestOutput] = {}
        with importlib.import_module("tqdm").tqdm(total=len(jobs), disable=not use_tqdm, unit=" answers") as bar:
            while live:
                for output in self._core.step():
                    result = live[output.request_id].take(output)
                    if result is not None:
                        self._core.abort(output.request_id)  # it goes on if a stop string, which is text, ended it
                        results[output.request_id] = result
                        del live[output.request_id]
                        bar.update()
        return [results[job.request_id] for job in jobs]

    def _one_each(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        given = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params] * count
        if len(given) != count:
            raise InvalidRequestError(
                f"sampling_params lists {len(given)} for {count} prompts: give one each, or a single one for all",
                param="sampling_params",
            )
        return [params_or_defaults(params, self.model_info.default_sampling) for params in given]


def _conversations(messages: Sequence[Any]) -> list[Sequence[Message]]:
    """One conversation or a list of them. Raises InvalidRequestError."""
    conversations = list(messages) if messages and not isinstance(messages[0], Mapping) else [messages]
    for conversation in conversations:
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not is_list or not conversation or not all(isinstance(m, Mapping) and "role" in m for m in conversation):
            raise InvalidRequestError(
                "a conversation is a list of dicts with 'role' and 'content', at least one, found "
                f"{conversation!r:.200}",
                param="messages",
            )
    return conversations
