"""Between what a model wrote and what the chat component is given to render.

Gradio renders messages as Markdown, which swallows everything that looks like a tag, `<think>` or `<i>`. `encode`
writes such text so that Markdown shows it as it is, folds a leading reasoning block, and marks up inline `$math$`
without touching prices; `decode` gives the model's text back, for the next turn and (the same rules in page.js) for
the copy buttons. Knows what is code in Markdown, and nothing else of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# A reference with needless zeros renders as "<" and is never written by anyone else, so that it can be taken back.
_LESS_THAN = "&#0060;"
# An empty TeX group, likewise: it tells our inline math from the model's own \( \).
_MATH = re.compile(r"(?<![\\$])\$(?![\s$])([^$\n]*?[^\s$\\])\$(?![\d$])")
_MATH_BACK = re.compile(r"\\\(\{\}(.*?)\\\)")
_TAG_START = re.compile(r"<(?=[A-Za-z/!?])")

_FENCE = re.compile(r"[\s>]*(?:[-*+]\s+|\d{1,9}[.)]\s+)?(`{3,}(?=[^`]*$)|~{3,})")
_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])\s")
_INDENTED = re.compile(r"(?: {4}|\t)")
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", re.DOTALL)

_OPEN, _CLOSE = "<think>", "</think>"
# Models whose template already writes the opening tag answer with the closing one only: "implied".
_FOLDS = {
    _OPEN: '<details class="reasoning"><summary>Reasoning</summary>\n\n',
    "": '<details class="reasoning implied"><summary>Reasoning</summary>\n\n',
}
_FOLD_END = "\n\n</details>\n\n"


def encode(raw: str) -> str:
    """Markdown that shows `raw`; `decode` reverses it."""
    start = len(raw) - len(raw.lstrip())
    opening = _OPEN if raw.startswith(_OPEN, start) else ""
    reasoning, closing, rest = raw[start + len(opening) :].partition(_CLOSE)
    is_folded = bool(opening) or (bool(closing) and _OPEN not in reasoning)
    if not is_folded or (closing and _ends_in_fence(reasoning)):
        return _encode_markdown(raw)
    fold = _FOLDS[opening]
    if not closing:
        return raw[:start] + fold.replace(">", " open>", 1) + _encode_markdown(reasoning)
    return raw[:start] + fold + _encode_markdown(reasoning) + _FOLD_END + _encode_markdown(rest)


def decode(shown: str) -> str:
    """The text of which `encode` made `shown`."""
    for opening, fold in _FOLDS.items():
        shown = shown.replace(fold, opening, 1).replace(fold.replace(">", " open>", 1), opening, 1)
    shown = shown.replace(_FOLD_END, _CLOSE, 1)
    return _MATH_BACK.sub(r"$\1$", shown).replace(_LESS_THAN, "<")


def _encode_markdown(text: str) -> str:
    return "".join(chunk if is_code else _encode_prose(chunk) for is_code, chunk in _blocks(text))


def _encode_prose(text: str) -> str:
    parts: list[str] = []
    position = 0
    for span in _CODE_SPAN.finditer(text):
        parts += (_encode_run(text[position : span.start()]), span.group())
        position = span.end()
    return "".join(parts) + _encode_run(text[position:])


def _encode_run(text: str) -> str:
    return _TAG_START.sub(_LESS_THAN, _MATH.sub(r"\\({}\1\\)", text))


def _ends_in_fence(text: str) -> bool:
    """A fold around such text would never end."""
    return any([fence for _, fence in _lines(text)][-1:])


def _blocks(text: str) -> Iterator[tuple[bool, str]]:
    """Runs of (is code block, lines)."""
    run: list[str] = []
    run_is_code = in_list = indented = False
    after_blank = True
    for line, fence in _lines(text):
        blank = not line.strip()
        in_list = bool(_LIST_ITEM.match(line)) or (in_list and (blank or line[0].isspace() or not after_blank))
        indented = not in_list and (after_blank or indented) and bool(_INDENTED.match(line) or (indented and blank))
        is_code = indented or bool(fence)
        if is_code != run_is_code and run:
            yield run_is_code, "".join(run)
            run = []
        run.append(line)
        run_is_code, after_blank = is_code, blank
    if run:
        yield run_is_code, "".join(run)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Lines with the fence that is open after each; a closing fence counts as prose, in which it has no tags."""
    fence = ""
    for line in text.splitlines(keepends=True):
        if fence:
            mark = line.strip(" \t\r\n>")
            if len(mark) >= len(fence) and not mark.strip(fence[0]):
                fence = ""
        elif match := _FENCE.match(line):
            fence = match.group(1)
        yield line, fence
