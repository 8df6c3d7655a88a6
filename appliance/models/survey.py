"""Walks through a model's layers as loading it would, without keeping any."""

from __future__ import annotations

from appliance.kernels.backend import Backend
from appliance.models.config import ModelConfig
from appliance.models.decoder import read_layer
from appliance.models.header_reader import HeaderReader
from appliance.models.weights import WeightReader


def survey(config: ModelConfig, reader: WeightReader, backend: Backend) -> None:
    """Afterwards the reader and its planner know what loading the model would tell them."""
    embed = reader.embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        read_layer(config, reader, backend, index)
    reader.norm("model.norm.weight", config.hidden_size, config.norms_add_one)
    if isinstance(reader, HeaderReader):
        reader.plan_lm_head(embed, config.tie_word_embeddings)
    else:
        reader.lm_head(embed, config.tie_word_embeddings)
