"""The chat page: components, their events, and mounting them on the server's app. Knows Gradio; what a turn does is
in `appliance.ui.chat`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

from appliance.client import EngineClient
from appliance.ui.about import UNKNOWN, about_html
from appliance.ui.chat import Chat, Message, Observe, edited_turn, split_last_turn, user_message
from appliance.ui.guard import GradioGuard, calm_queue
from appliance.ui.sampling import SamplingPanel
from appliance.ui.status import is_settling, status_html

Told = Mapping[Any, Any]
"""The values of the page by component."""

_FOLDER = Path(__file__).parent
_EXAMPLES = (
    "Explain how a paged KV cache works, in three short paragraphs.",
    "Write a Python function that merges two sorted lists, with a test.",
    "Derive the quadratic formula step by step.",
)
_LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
_STATUS_SECONDS = 2.0
_MAX_QUEUED_EVENTS = 512


def build_ui(client: EngineClient, observe: Observe | None = None) -> gr.Blocks:
    """The page. `observe` wraps each request's stream, e.g. to count it in the server's metrics."""
    ui: gr.Blocks = gr.Blocks(
        title="Appliance chat", fill_height=True, analytics_enabled=False, delete_cache=(3600, 86400)
    )
    with ui:
        with gr.Sidebar(position="right", open=False, label="Settings", width=300, elem_id="settings"):
            gr.Markdown("### Settings")
            system_prompt = gr.Textbox(label="System prompt", lines=4, max_lines=12, placeholder="None")
            sampling = SamplingPanel()
            with gr.Accordion("About this model", open=False, elem_id="about"):
                about = gr.Markdown(UNKNOWN)
        has_defaults = gr.State(False)
        status = gr.Markdown(status_html(client), elem_id="status")
        timer = gr.Timer(_STATUS_SECONDS, active=False)
        chatbot = gr.Chatbot(
            show_label=False,
            elem_id="chat",
            container=False,
            scale=1,
            height="100%",
            layout="bubble",
            latex_delimiters=_LATEX,
            buttons=["copy", "copy_all"],
            allow_tags=False,
            editable="user",
            placeholder="## What shall we talk about?\nThe model runs on this machine; nothing you write leaves it.",
            examples=[{"text": text} for text in _EXAMPLES],
        )
        textbox = gr.Textbox(
            show_label=False,
            elem_id="message",
            container=False,
            placeholder="Write a message",
            lines=1,
            max_lines=10,
            autofocus=True,
            submit_btn=True,
        )
        page = _Page(client, Chat(client, observe), chatbot, textbox, system_prompt, sampling)
        told = {textbox, chatbot, system_prompt, *sampling.components}
        shown = [chatbot, textbox, status, timer]
        answering: dict[str, Any] = {
            "outputs": shown,
            "concurrency_limit": None,
            "show_progress": "hidden",
            "api_visibility": "private",
        }
        at_once: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        textbox.submit(page.send, told, **answering)
        picked = chatbot.example_select(page.pick, None, textbox, **at_once)
        picked.success(page.send, told, **answering)
        chatbot.retry(page.retry, told, **answering)
        chatbot.edit(page.edit, told, **answering)
        chatbot.undo(page.undo, [chatbot], [chatbot, textbox], **at_once)
        chatbot.clear(page.clear, None, None, **at_once)
        textbox.stop(page.stop, None, None, **at_once)
        sampling.reset.click(page.reset, None, sampling.components, **at_once)
        seen = [status, timer, has_defaults, about, *sampling.components]
        ui.load(page.look, [has_defaults], seen, **at_once)
        timer.tick(page.look, [has_defaults], seen, **at_once)
    ui.queue(max_size=_MAX_QUEUED_EVENTS, api_open=False)
    calm_queue(ui)
    return ui


def mount_ui(
    app: FastAPI,
    client: EngineClient,
    path: str = "/",
    *,
    observe: Observe | None = None,
    blocked_paths: Sequence[str] = (),
) -> FastAPI:
    """Mount the page at `path`; routes of the app must be registered before, for a mount at / takes all the others.

    `blocked_paths` are folders that Gradio must never serve, whatever its temporary folder holds. Returns `app`.
    """
    app.add_middleware(GradioGuard, path=path)
    gr.mount_gradio_app(
        app,
        build_ui(client, observe),
        path=path,
        footer_links=[],
        run_history=False,
        allowed_paths=[],
        blocked_paths=list(blocked_paths),
        show_error=False,
        max_file_size="1mb",
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
        theme=gr.themes.Default(
            primary_hue="blue",
            neutral_hue="gray",
            font=["system-ui", "sans-serif"],
            font_mono=["ui-monospace", "monospace"],
        ),
        css_paths=_FOLDER / "page.css",
        head=f"<script>{(_FOLDER / 'page.js').read_text(encoding='utf-8')}</script>",
    )
    return app


class _Page:
    """The events of the page, each in the shape Gradio calls: component values in, component updates out."""

    def __init__(
        self,
        client: EngineClient,
        chat: Chat,
        chatbot: gr.Chatbot,
        textbox: gr.Textbox,
        system_prompt: gr.Textbox,
        sampling: SamplingPanel,
    ) -> None:
        self._client = client
        self._chat = chat
        self._chatbot = chatbot
        self._textbox = textbox
        self._system_prompt = system_prompt
        self._sampling = sampling

    async def send(self, told: Told, request: gr.Request) -> AsyncGenerator[tuple[Any, ...]]:
        text = told[self._textbox]
        if not text.strip():
            return
        async with aclosing(self._answer([*told[self._chatbot], user_message(text)], told, request, "")) as updates:
            async for update in updates:
                yield update

    async def retry(self, told: Told, request: gr.Request) -> AsyncGenerator[tuple[Any, ...]]:
        before, text = split_last_turn(told[self._chatbot])
        async with aclosing(self._answer([*before, user_message(text)], told, request, told[self._textbox])) as updates:
            async for update in updates:
                yield update

    async def edit(self, told: Told, edited: gr.EditData, request: gr.Request) -> AsyncGenerator[tuple[Any, ...]]:
        """Answer a message of the user that was written anew; emptied, it stays as it was."""
        index = edited.index if isinstance(edited.index, int) else edited.index[0]
        text, history = _written(edited.value), told[self._chatbot]
        if not text.strip():
            yield history, gr.skip(), gr.skip(), gr.skip()
            return
        turns = edited_turn(history, index, text)
        async with aclosing(self._answer(turns, told, request, told[self._textbox])) as updates:
            async for update in updates:
                yield update

    async def _answer(
        self, history: list[Message], told: Told, request: gr.Request, draft: str
    ) -> AsyncGenerator[tuple[Any, ...]]:
        """Updates of chatbot, textbox, status and timer; the textbox shows `draft`, and Stop meanwhile."""
        settings, session = self._sampling.settings(told, told[self._system_prompt]), _session(request)
        textbox: Any = gr.Textbox(draft, submit_btn=False, stop_btn=True)
        async with aclosing(self._chat.reply(history, settings, session)) as histories:
            async for shown in histories:
                yield shown, textbox, gr.skip(), gr.skip()
                textbox = gr.skip()
        if not self._chat.is_answering(session):
            yield gr.skip(), gr.Textbox(submit_btn=True, stop_btn=False), *self._status()

    async def pick(self, example: gr.SelectData) -> str:
        return str(example.value["text"])

    async def undo(self, history: list[Message]) -> tuple[list[Message], str]:
        return split_last_turn(history)

    async def clear(self, request: gr.Request) -> None:
        self._chat.stop(_session(request), discard=True)

    async def stop(self, request: gr.Request) -> None:
        self._chat.stop(_session(request))

    async def look(self, has_defaults: bool) -> tuple[Any, ...]:
        """Status and timer; once the model is known, what is to be told about it, and its defaults for the sampling,
        before anyone chose others."""
        if self._client.model_info is None or has_defaults:
            return *self._status(), has_defaults, gr.skip(), *(gr.skip() for _ in self._sampling.components)
        return *self._status(), True, about_html(self._client), *await self.reset()

    async def reset(self) -> list[Any]:
        info = self._client.model_info
        return self._sampling.defaults({} if info is None else info.default_sampling)

    def _status(self) -> tuple[Any, Any]:
        """The timer runs only while the state will change by itself."""
        return status_html(self._client), gr.Timer(active=is_settling(self._client.health))


def _written(value: Any) -> str:
    """The text of a message that was edited: a string, or a list of parts."""
    return value if isinstance(value, str) else "\n".join(part["text"] for part in value)


def _session(request: gr.Request) -> str:
    return request.session_hash or ""
