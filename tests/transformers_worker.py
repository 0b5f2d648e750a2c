"""transformers' DeepSeek-V4 in a process of its own: the other end of `test_transformers.py`.

    python tests/transformers_worker.py

It imports nothing of jaxspec, so that its Python may be another one. Each line that it reads is a
question, {"model": directory in the released layout, "tokens": [B, T], "prompts": lists of ids,
"steps": N}; each line that it writes an answer, {"logits": [B, T, V], "greedy": lists of N ids} or
{"error": words}. The first line that it writes holds the versions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


def read_config(directory: Path) -> DeepseekV4Config:
    """The released `config.json` with the ratios said as transformers can take any of them.

    It reads `compress_ratios` of 0, 4 and 128 alone, but has a ratio for each kind of layer.
    """
    raw = json.loads((directory / "config.json").read_text())
    ratios = raw.pop("compress_ratios")[: raw["num_hidden_layers"]]
    raw["layer_types"] = [SLIDING if r == 0 else CSA if r == 4 else HCA for r in ratios]
    folded = sorted({r for r in ratios if r not in (0, 4)}) or [128]
    if len(folded) > 1:
        raise ValueError(f"transformers has one ratio for all HCA layers, not {folded}")
    raw["compress_rates"] = {CSA: 4, HCA: folded[0]}
    return DeepseekV4Config.from_dict(raw)


@torch.inference_mode()
def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Logits of whole sequences in one pass, and greedy streams, each sequence on its own.

    A batch of prompts of several lengths would be padded on the left, which its compressors pool.
    """
    directory = Path(question["model"])
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        directory,
        config=read_config(directory),
        dtype=torch.float32,
        experts_implementation="eager",
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ValueError(f"{kind}: {sorted(map(str, info[kind]))}")
    model.eval()
    greedy = []
    for prompt in question["prompts"]:
        cache = DynamicCache(config=model.config)
        token, stream = torch.tensor([prompt]), []
        for _ in range(question["steps"]):
            out = model(token, cache=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            stream.append(int(token))
        greedy.append(stream)
    logits = model(torch.tensor(question["tokens"]), use_cache=False).logits
    return {"logits": logits.float().tolist(), "greedy": greedy}


def main() -> None:
    """Answers until the input ends; a failure is an answer too."""
    pipe, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not be an answer
    torch.set_num_threads(1)  # the models are tiny, and idle threads spin
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps(versions), file=pipe, flush=True)
    for line in sys.stdin:
        try:
            value = answer(json.loads(line))
        except Exception as error:
            value = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(value), file=pipe, flush=True)


if __name__ == "__main__":
    main()
