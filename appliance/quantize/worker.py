"""The process that runs auto-gptq 0.7.1 or autoawq 0.2.9, in their environment: it may import nothing of the appliance.

    python -I worker.py        a job on stdin, progress and result on stdout, as child.py says

The job: method (awq or gptq), model (a folder that transformers 4.51 can load), out (an existing folder, which gets the
weights alone), bits, group_size, blocks (token ids, all of one length). The packages' own loaders are not used: both
would run Python that lies in a model folder.
"""

# The packages live in an environment of their own.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

Report = Callable[[str, float], None]


def load(job: dict[str, Any]) -> Any:
    """The model on the CPU, in float16 where a card computes and in float32 where the CPU does."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model, loading = auto.from_pretrained(
        job["model"],
        torch_dtype=torch.float16 if torch.cuda.is_available() else torch.float32,
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
        low_cpu_mem_usage=True,
        output_loading_info=True,
    )
    if loading["missing_keys"]:
        raise ValueError(f"the model's files lack {', '.join(sorted(loading['missing_keys'])[:4])}")
    return model.eval()


def awq(model: Any, job: dict[str, Any], report: Report) -> Any:
    from awq.models._config import AwqConfig
    from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
    from awq.quantize.quantizer import AwqQuantizer

    class Reporting(AwqQuantizer):  # type: ignore[misc]
        done = 0

        def _get_input_feat(self, *args: Any) -> Any:  # called once a layer
            report("Quantising", self.done / len(self.modules))
            self.done += 1
            return super()._get_input_feat(*args)

        def _compute_best_scale(self, x: Any, w_mean: Any, x_mean: Any, module: Any, *args: Any) -> Any:
            """The search keeps the weights by `state_dict().cpu()` and then scales them in place: on a CPU that copies
            nothing, so that it would go on from, and end with, weights that are scaled already.
            """
            original = module.state_dict
            module.state_dict = lambda: {name: tensor.clone() for name, tensor in original().items()}
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module, *args)
            finally:
                del module.state_dict

    kind = model.config.model_type
    wrapper = AWQ_CAUSAL_LM_MODEL_MAP[kind](model, kind, False, model.config, AwqConfig(), None)
    model.config.use_cache = False
    wrapper.quantize(
        None,
        {"zero_point": True, "q_group_size": job["group_size"], "w_bit": job["bits"], "version": "GEMM"},
        calib_data=job["blocks"],
        max_calib_samples=len(job["blocks"]),
        max_calib_seq_len=len(job["blocks"][0]),
        n_parallel_calib_samples=16,
        quantizer_cls=Reporting,
    )
    return wrapper.model


def gptq(model: Any, job: dict[str, Any], report: Report) -> Any:
    import torch
    from auto_gptq import BaseQuantizeConfig
    from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP

    class Layers(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words = record.getMessage().split()  # Start quantizing layer 3/32
            if words[:3] == ["Start", "quantizing", "layer"]:
                layer, count = map(int, words[3].split("/"))
                report("Quantising", (layer - 1) / count)
            elif words[0] == "Packing":
                report("Packing", 0.0)

    for name in ("auto_gptq.modeling._base", "auto_gptq.modeling._utils"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(Layers())
    config = BaseQuantizeConfig(bits=job["bits"], group_size=job["group_size"], desc_act=False, sym=True)
    wrapper = GPTQ_CAUSAL_LM_MODEL_MAP[model.config.model_type](model, False, config)
    blocks = [torch.tensor([block]) for block in job["blocks"]]
    wrapper.quantize(
        [{"input_ids": block, "attention_mask": torch.ones_like(block)} for block in blocks],
        cache_examples_on_gpu=False,
    )
    return wrapper.model.cpu()


def save(model: Any, biases: set[str], out: str) -> None:
    """Write the weights alone, floats in float16. auto-gptq adds zero biases where the model has none; they go."""
    from huggingface_hub import save_torch_state_dict

    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith(".bias") or name in biases
    }
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_torch_state_dict(tensors, out, max_shard_size="4GB", force_contiguous=True)


def main() -> int:
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the packages print is no message
    job = json.loads(sys.stdin.readline())

    def end_with_the_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=messages, flush=True)

    def report(what: str, fraction: float) -> None:
        send({"progress": [what, fraction]})

    try:
        report("Loading the model", 0.0)
        model = load(job)
        biases = {name for name in model.state_dict() if name.endswith(".bias")}
        model = {"awq": awq, "gptq": gptq}[job["method"]](model, job, report)
        report("Saving", 0.0)
        save(model, biases, job["out"])
    except Exception:  # whatever the packages raise, the last line of the log is the reason that is shown
        traceback.print_exc()
        return 1
    send({"result": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
