"""What the page tells about the model: the details of `appliance inspect`, as HTML for people."""

from __future__ import annotations

import html
from collections.abc import Iterator

from appliance.client import EngineClient
from appliance.model_details import LayerPlan, ModelDetails

UNKNOWN = '<p class="about">Nothing is known of the model yet.</p>'


def about_html(client: EngineClient) -> str:
    """Facts, self-test and layers of the loaded model."""
    info = client.model_info
    if info is None or info.details is None:
        return UNKNOWN
    facts = "".join(f"<dt>{name}</dt><dd>{_escaped(text)}</dd>" for name, text in _facts(info.details))
    layers = "".join(f"<li>{_layer_html(layer)}</li>" for layer in info.details.layers)
    return f'<div class="about"><dl>{facts}</dl><p>Layers</p><ul>{layers}</ul></div>'


def _facts(details: ModelDetails) -> Iterator[tuple[str, str]]:
    memory = details.memory
    yield "Self-test", f"{details.self_test.verdict}: {details.self_test.summary}"
    yield from (("Fault", fault) for fault in details.self_test.faults)
    yield "Format", details.description
    yield "Zero points", details.zero_points
    yield from (("Otherwise", line) for line in details.exceptions)
    yield from (("Evidence", line) for line in details.evidence)
    yield "Architecture", f"{details.architecture}, {details.num_parameters / 1e6:,.0f} million parameters"
    yield "Context", f"{memory.max_model_len:,} of {details.max_position:,} tokens"
    yield (
        "Memory",
        f"weights {_mebibytes(memory.weights)}, KV cache {_mebibytes(memory.kv_cache)} "
        f"({memory.kv_bytes_per_token:,} bytes a token)",
    )


def _layer_html(layer: LayerPlan) -> str:
    kernels = " and ".join(dict.fromkeys((layer.decode, layer.prefill)))
    refused = "".join(f"<br>not {_escaped(f'{each.kernel}: it {each.reason}')}" for each in layer.refused)
    names = _escaped(", ".join(layer.layers).replace("model.layers.", ""))
    return f"<strong>{names}</strong><br>{layer.count} of {_escaped(layer.spec)}<br>{kernels}{refused}"


def _escaped(text: str) -> str:
    """On one line: a blank one would end the HTML and begin Markdown, and names come from a file."""
    return html.escape(" ".join(text.split()))


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
