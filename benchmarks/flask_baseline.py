"""The usual deployment to compare with: Transformers' generate() behind Flask, one request at a time.

    pip install flask
    python -m benchmarks.flask_baseline HF_FOLDER --port 8083

Every answer has exactly max_tokens tokens, greedy. /v1/models and /v1/chat/completions, streaming or not.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from typing import Any

import torch
from flask import Flask, Response, jsonify, request
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer


class Baseline:
    """One model and the lock that lets one request at it."""

    def __init__(self, folder: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        models: Any = AutoModelForCausalLM  # transformers' own annotations stop half-way
        self.model = models.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.lock = threading.Lock()

    def models(self) -> Any:
        return jsonify(data=[{"id": "baseline"}])

    def chat(self) -> Any:
        body = request.get_json()
        inputs = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        num_prompt, num_output = inputs["input_ids"].shape[1], body["max_tokens"]
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
        wishes = {**inputs, "max_new_tokens": num_output, "min_new_tokens": num_output, "do_sample": False}
        if body.get("stream"):
            return Response(self._events(wishes, usage), mimetype="text/event-stream")
        with self.lock, torch.inference_mode():
            tokens = self.model.generate(**wishes)
        text = self.tokenizer.decode(tokens[0, num_prompt:])
        return jsonify(choices=[{"message": {"content": text}}], usage=usage)

    def _events(self, wishes: dict[str, Any], usage: dict[str, int]) -> Iterator[str]:
        with self.lock:
            streamer: Any = TextIteratorStreamer(self.tokenizer, skip_prompt=True)
            worker = threading.Thread(target=self.model.generate, kwargs={**wishes, "streamer": streamer})
            worker.start()
            for text in streamer:
                if text:
                    yield _event({"choices": [{"index": 0, "delta": {"content": text}}]})
            worker.join()
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a Hugging Face model folder")
    parser.add_argument("--port", type=int, default=8083)
    options = parser.parse_args()
    baseline = Baseline(options.folder)
    app = Flask(__name__)
    app.add_url_rule("/v1/models", view_func=baseline.models)
    app.add_url_rule("/v1/chat/completions", view_func=baseline.chat, methods=["POST"])
    app.run(host="127.0.0.1", port=options.port, threaded=True)


if __name__ == "__main__":
    main()
