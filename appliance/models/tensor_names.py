"""Where a checkpoint keeps the tensors of a decoder. The decoder asks by Llama's names, files often have others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MODEL, LM_HEAD = "model", "lm_head"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """roots: pairs of what stands for `model` and for `lm_head`, the first that a checkpoint has is its own;
    renamed: pairs of a part of a name as the decoder and as the checkpoint says it.
    """

    roots: tuple[tuple[str, str], ...] = ((MODEL, LM_HEAD),)
    renamed: tuple[tuple[str, str], ...] = ()

    def resolve(self, has: Callable[[str], bool]) -> Callable[[str], str]:
        """From the decoder's names to those of the checkpoint that `has` knows the tensors of."""
        parts = dict(self.renamed)

        def under(root: tuple[str, str], name: str) -> str:
            first, *rest = name.split(".")
            stem = root[1] if first == LM_HEAD else root[0]
            return ".".join([stem, *(parts.get(part, part) for part in rest)])

        embedding = f"{MODEL}.embed_tokens.weight"
        root = next((root for root in self.roots if has(under(root, embedding))), self.roots[0])
        return lambda name: under(root, name)


LLAMA_NAMES = TensorNames()
