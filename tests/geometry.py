"""Geometries for tests: the shipped configs, what the oracle reads of them, others like them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from harness import layout, plan
from harness.errors import UsageError
from harness.layout import NoLayout, UnknownLayout
from harness.layouts.page import ELEMENT_BYTES, Capability

Path = tuple[str, ...]
"""Keys from the outermost object of a config.json inwards."""

NAMES = (
    *("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"),
    *("fp8_ds_mla", "nvfp4_ds_mla", "nvfp4", "nvfp4_4over6"),
    *("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
)
"""What kv_cache_dtype may resolve to."""

CAPABILITIES: tuple[Capability | None, ...] = (
    *((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)),
    None,
)

_ALIKE = {"qwen2": "llama"}
"""model_type of no shipped config -> one whose geometry has the same keys."""


@functools.cache
def _shipped() -> dict[str, Mapping[str, Any]]:
    return {str(m.config["model_type"]): m.config for m in reversed(plan.models())}


def templates() -> dict[str, Mapping[str, Any]]:
    """model_type -> a config of it, for each that the oracle knows. KeyError where there is none:
    ship a config, or name one that is alike in `_ALIKE`."""
    shipped = _shipped()
    return {
        kind: shipped.get(kind) or {**shipped[_ALIKE[kind]], "model_type": kind}
        for kind in layout._FAMILIES
    }


class Recording(Mapping[str, Any]):
    """A config that knows which of its values were asked for; of a copy (`{**config}`) nothing."""

    def __init__(self, data: Mapping[str, Any], read: set[Path], at: Path = ()) -> None:
        self._data, self._read, self._at = data, read, at
        self._copied: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        value = self._data[key]
        if key in self._copied:
            self._copied.remove(key)
            return value
        if isinstance(value, Mapping):
            return Recording(value, self._read, (*self._at, key))
        self._read.add((*self._at, key))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def keys(self) -> Any:
        """What makes a copy asks for the keys, and then for the value of each."""
        self._copied = set(self._data)
        return self._data.keys()

    def __len__(self) -> int:
        return len(self._data)


def leaves(data: Mapping[str, Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is no object, with its path."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*at, key))
        else:
            yield (*at, key), value


def changed(config: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """`config` with another value at `path`."""
    key, *rest = path
    return {**config, key: changed(config[key], tuple(rest), value) if rest else value}


def names(config: Mapping[str, Any], capability: Capability | None) -> list[tuple[str, str, str]]:
    """(resolved kv_cache_dtype, element type, layout) of all that the model can store."""
    found = []
    for name in NAMES:
        for storage in ELEMENT_BYTES:
            try:
                kind = layout.layout_of(config, name, storage, capability)
                layout.expected_pages(config, kind, capability)
            except (NoLayout, UnknownLayout):
                continue
            found.append((name, storage, kind))
    return found


def read(config: Mapping[str, Any]) -> set[Path]:
    """What the oracle asks of `config` for any layout on any device."""
    found: set[Path] = set()
    for capability in CAPABILITIES:
        for name, storage, kind in names(config, capability):
            layout.layout_of(Recording(config, found), name, storage, capability)
            layout.expected_pages(Recording(config, found), kind, capability)
    return found


_STRUCTURE = re.compile("layer|interval|pattern|freq|offset|sliding|window|chunk")
"""Keys that say which layers are what, and how far they look: no sizes."""


def _sizes(config: Mapping[str, Any]) -> dict[Path, int]:
    asked = read(config)
    return {
        path: value
        for path, value in leaves(config)
        if path in asked and type(value) is int and not _STRUCTURE.search(path[-1])
    }


SIZES = {kind: _sizes(config) for kind, config in templates().items()}
"""model_type -> the sizes that its pages are made of, as published."""


WITHOUT_PAGES = ("bert",)
"""model_types that have no KV cache."""


@st.composite
def geometries(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """A config of the model_type with other sizes: multiples, so that scales still divide."""
    config = dict(templates()[kind])
    for path, value in SIZES[kind].items():
        config = changed(config, path, value * draw(st.sampled_from([1, 2, 3, 4, 7])))
    return config


@functools.cache
def formats(kind: str, capability: Capability | None) -> list[tuple[str, str, str]]:
    """`names` of the model_type, which are those of all its multiples."""
    return names(templates()[kind], capability)


def possible(config: Mapping[str, Any]) -> bool:
    """True where heads are whole shares of the hidden size, where they are shares of it."""
    try:
        kind = formats(config["model_type"], (10, 0))[0][2]
        layout.expected_pages(config, kind, (10, 0))
    except UsageError:
        return False
    return True


_DEPTHS = ("num_hidden_layers", "decoder_layers")


def deepened(config: Mapping[str, Any], times: int) -> dict[str, Any]:
    """`config` with all its layers again, `times` times in all; entries of MTP layers stay last."""
    depth = config.get("text_config", config)["num_hidden_layers"]

    def deep(data: Mapping[str, Any]) -> dict[str, Any]:
        return {key: again(value, key) for key, value in data.items()}

    def again(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return deep(value)
        if key in _DEPTHS:
            return value * times
        if not isinstance(value, Sequence) or not value:
            return value
        if (
            re.search("_layers$|_layer_ids$", key)
            and len(value) < depth
            and set(map(type, value)) == {int}
        ):
            # Layers by number.
            return [one + depth * n for n in range(times) for one in value]
        return value[:depth] * times + value[depth:] if len(value) >= depth else value

    return deep(config)
