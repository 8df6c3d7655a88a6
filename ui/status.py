"""The two lines above the chat: which model runs, how, and in what state. HTML for people, from an `EngineClient`."""

from __future__ import annotations

import html

from appliance.client import EngineClient, EngineState, Health, ModelInfo

_WORDS = {
    EngineState.LOADING: "Loading the model",
    EngineState.READY: "Ready",
    EngineState.RESTARTING: "Restarting the engine",
    EngineState.FAILED: "The engine has failed",
    EngineState.STOPPED: "Stopped",
}


def is_settling(health: Health) -> bool:
    """True in the states that end by themselves, which are worth looking at again soon."""
    return health.state in (EngineState.LOADING, EngineState.RESTARTING)


def status_html(client: EngineClient) -> str:
    """Model, state in words, format, kernels and context length; the state alone while nothing else is known."""
    health = client.health
    words = _WORDS[health.state]
    if health.detail and health.state is not EngineState.READY:
        words += f": {health.detail}"
    state = f'<span class="state state-{health.state}" role="status">{html.escape(words)}</span>'
    info = client.model_info
    if info is None:
        return f'<div class="status">{state}</div>'
    facts = "".join(f"<span>{html.escape(fact)}</span>" for fact in _facts(info))
    notes = "".join(f'<div class="status-warning">{html.escape(warning)}</div>' for warning in info.warnings)
    return f'<div class="status"><strong>{html.escape(info.id)}</strong>{state}{facts}</div>{notes}'


def _facts(info: ModelInfo) -> list[str]:
    kernels = f"{'kernels' if len(info.kernels) > 1 else 'kernel'} {', '.join(info.kernels)}" if info.kernels else ""
    facts = (info.format, kernels, f"{info.dtype} on {info.device}", f"{info.max_model_len:,} tokens of context")
    return [fact for fact in facts if fact]
