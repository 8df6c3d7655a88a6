"""The text part of a model that also sees: its fields of config.json and its tensors' names. The rest is not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.models.config_fields import ConfigFields
from appliance.models.tensor_names import LM_HEAD, MODEL

TEXT_PART_ROOTS = (
    ("language_model.model", "language_model.lm_head"),
    ("model.language_model", LM_HEAD),
    (MODEL, LM_HEAD),
)
"""As files on the hub have them, as transformers 5 names its modules, and as tools that cut the text part out do."""


def read_text_config(fields: ConfigFields, model_type: str, defaults: Mapping[str, Any]) -> ConfigFields:
    """`text_config` over its architecture's defaults, which makers leave out.

    Raises CheckpointError where there is none, UnsupportedModelError where it is another architecture's than
    `model_type`.
    """
    text = fields.object("text_config")
    if not text.values:
        raise CheckpointError("config.json has no 'text_config': the shape of the model's text part is needed.")
    found = text.values.get("model_type", model_type)
    if found != model_type:
        raise UnsupportedModelError(
            f"config.json says 'text_config.model_type' is {found!r}: this architecture is served with a text part of "
            f"type {model_type!r}, use another model."
        )
    return text.over(defaults)
