"""The sampling panel: its controls, what they say, and the values that the loaded model suggests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from appliance.ui.chat import ChatSettings, default_settings

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens")
"""The fields of ChatSettings that have a control here, in the order shown."""


class SamplingPanel:
    """Controls, built where the page is being built. A number left empty is the field's neutral value."""

    def __init__(self) -> None:
        # Gradio's own reset buttons would go back to what was there before the model was known.
        slider: dict[str, Any] = {"buttons": []}
        number: dict[str, Any] = {"precision": 0}
        start = default_settings({})
        self.controls: dict[str, Any] = {
            "temperature": gr.Slider(
                0.0,
                2.0,
                start.temperature,
                step=0.05,
                label="Temperature",
                info="0 takes the likeliest token",
                **slider,
            ),
            "top_p": gr.Slider(0.0, 1.0, start.top_p, step=0.01, label="Top p", info="1 is off", **slider),
            "top_k": gr.Number(start.top_k, label="Top k", info="0 is off", minimum=0, **number),
            "min_p": gr.Slider(0.0, 1.0, start.min_p, step=0.01, label="Min p", info="0 is off", **slider),
            "repetition_penalty": gr.Slider(
                0.5, 2.0, start.repetition_penalty, step=0.01, label="Repetition penalty", info="1 is off", **slider
            ),
            "seed": gr.Number(None, label="Seed", info="Empty: a new one each time", placeholder="Random", **number),
            "max_tokens": gr.Number(
                0, label="Longest answer, in tokens", info="0: the rest of the context", step=64, minimum=0, **number
            ),
        }
        self.reset = gr.Button("Reset to the model's defaults", size="sm", elem_id="reset-sampling")

    @property
    def components(self) -> list[Any]:
        return [self.controls[name] for name in _FIELDS]

    def settings(self, values: Mapping[Any, Any], system_prompt: str) -> ChatSettings:
        """What the controls say, from Gradio's values by component."""
        told = {name: values[control] for name, control in self.controls.items()}
        return ChatSettings(
            system_prompt,
            **told | {"top_k": told["top_k"] or 0, "max_tokens": told["max_tokens"] or None},
        )

    def defaults(self, suggested: Mapping[str, float]) -> list[Any]:
        """An update for each of `components`: back to the defaults of the model, which suggests `suggested`."""
        settings = default_settings(suggested)
        values = {name: getattr(settings, name) for name in _FIELDS} | {"max_tokens": 0}
        return [type(control)(value=values[name]) for name, control in self.controls.items()]
