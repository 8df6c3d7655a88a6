"""A person opens the page of a real server and asks; needs Debian's chromium and playwright, marker `browser`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.builtin.serving import serving
from tests.ui.test_browser import ARGUMENTS

pytestmark = pytest.mark.browser


def test_the_page_answers_paris(folder: Path) -> None:
    with serving(folder) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        page = browser.new_page()
        page.goto(server.base)
        expect(page.locator("#status")).to_contain_text("GGUF Q4_1 4-bit")
        page.locator("#message textarea").fill("What is the capital of France?")
        page.keyboard.press("Enter")
        expect(page.locator("#chat")).to_contain_text("Paris", timeout=30_000)
        expect(page.locator("#chat")).to_contain_text("tokens/s", timeout=30_000)
        page.locator("#message textarea").fill("Write a very long story about a lighthouse.")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Stop").click(timeout=30_000)
        expect(page.locator("#chat .answer-note").last).to_contain_text("stopped")
        server.assert_idle()
        if target := os.environ.get("APPLIANCE_SCREENSHOT"):
            page.screenshot(path=target)
        browser.close()
