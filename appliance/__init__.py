"""A single-GPU appliance that serves 4-bit language models to a browser chat and an OpenAI-compatible API.

`from appliance import LLM, AsyncLLMEngine, SamplingParams` runs a model from Python. Names are resolved when they are
asked for: importing the package alone costs nothing.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLMEngine", "CompletionOutput", "RequestOutput", "SamplingParams"]

if TYPE_CHECKING:
    from appliance.async_llm_engine import AsyncLLMEngine
    from appliance.llm import LLM
    from appliance.outputs import CompletionOutput, RequestOutput
    from appliance.sampling_params import SamplingParams
else:

    def __getattr__(name):
        if name == "LLM":
            import appliance.llm as module
        elif name == "AsyncLLMEngine":
            import appliance.async_llm_engine as module
        elif name in ("CompletionOutput", "RequestOutput"):
            import appliance.outputs as module
        elif name == "SamplingParams":
            import appliance.sampling_params as module
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(module, name)
        return globals()[name]
