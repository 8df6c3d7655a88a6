"""What a layer needs of a request's past: all keys and values, those of a window, or a state of fixed size.

Owned by the model's declaration. Groups with a cache are made equal in size (`even_groups`), so that a block of one
takes as many bytes as a block of another and all can draw on one pool: layer number `i` of each group keeps its keys
and values in the i-th part of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.models.config_fields import ConfigFields

MAX_WINDOW = 1 << 30


class CacheKind(StrEnum):
    FULL = "full"
    SLIDING = "sliding"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose caches are alike. A sliding layer's token attends to the last `window` positions, its own included
    (transformers masking_utils: kv_idx > q_idx - sliding_window); a full layer has no window, a recurrent one no cache.
    """

    layers: tuple[int, ...]
    window: int | None = None
    is_recurrent: bool = False

    @property
    def kind(self) -> CacheKind:
        if self.is_recurrent:
            return CacheKind.RECURRENT
        return CacheKind.FULL if self.window is None else CacheKind.SLIDING


def group_layers(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """Groups of the layers with these windows, in order of their first layers."""
    return tuple(
        CacheGroup(tuple(layer for layer, other in enumerate(windows) if other == window), window)
        for window in dict.fromkeys(windows)
    )


def even_groups(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """The same layers in groups of at most as many as the smallest has: the last of a kind may have fewer."""
    size = min(len(group.layers) for group in groups)
    return tuple(
        CacheGroup(group.layers[start : start + size], group.window)
        for group in groups
        for start in range(0, len(group.layers), size)
    )


def read_cache_groups(
    fields: ConfigFields, num_layers: int, window: int | None, first_sliding: int = 0
) -> tuple[CacheGroup, ...]:
    """`layer_types` where config.json lists them; else layers from `first_sliding` on slide, if there is a window.

    Raises CheckpointError for a list that is not one kind a layer, or that slides without a window.
    """
    if not fields.has("layer_types"):
        return group_layers([window if layer >= first_sliding else None for layer in range(num_layers)])
    windows = {"full_attention": None, "sliding_attention": window}
    types = fields.values["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in list(windows) for kind in types):
        raise fields.wrong("layer_types", f"a list of {num_layers}, each of them {' or '.join(map(repr, windows))}")
    if window is None and "sliding_attention" in types:
        raise fields.wrong("layer_types", "no 'sliding_attention', since it says that no window is used")
    return group_layers([windows[kind] for kind in types])
