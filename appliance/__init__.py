"""A single-GPU appliance that serves 4-bit language models to a browser chat and an OpenAI-compatible API."""

__version__ = "0.1.0"
