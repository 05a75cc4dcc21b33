"""A wrong number in a config makes a cell fail: every number of every shipped config is put wrong.

What vLLM did with the right config (`tests/observed.py`) must then disagree with the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from harness import layout, plan
from harness.errors import UsageError
from tests import geometry, observed
from tests.geometry import Path, Recording, changed, leaves
from tests.observed import Seen

MODELS = {model.key: model.config for model in plan.models()}

WITHOUT = {"bge-base": "an encoder without a KV cache"}
"""Models of which nothing can be seen."""

_WINDOW = "a window decides how many blocks there are, not what one costs"
_WIDTH = "only another dtype of the same width shows there, and nothing stored names it"

EXEMPT = {
    "gemma3: sliding_window": _WINDOW,
    "gpt-oss: sliding_window": _WINDOW,
    "mistral: sliding_window": _WINDOW,
    "llama4: attention_chunk_size": _WINDOW,
    "jamba: attn_layer_offset": "which layers are attention does not change how many",
    "jamba: attn_layer_period": "32 layers have 4 of attention in nines as in eights",
    "llama3-fp8kv: torch_dtype": "unset is the checkpoint's fp8, so auto never is the own dtype",
    "llama3-fp8kv-ct: torch_dtype": "as llama3-fp8kv",
    "mamba2: torch_dtype": _WIDTH,
}
"""Keys that the oracle reads and no cache can show: why. Any other must turn a record red."""


def known(model: str) -> bool:
    return MODELS[model].get("model_type") in layout._FAMILIES


MODEL = pytest.mark.parametrize("model", sorted(filter(known, MODELS)))


def outcome(config: Mapping[str, Any], seen: Seen) -> str:
    """`red` where the cell fails, `silent` where the oracle has no opinion, else `green`."""
    try:
        lines = layout.compare(config, seen.kv, seen.resolved, seen.capability)
    except layout.UnknownLayout:
        return "silent"
    except UsageError:
        return "red"
    return "red" if lines else "green"


@functools.cache
def confirmed(model: str) -> tuple[Seen, ...]:
    return tuple(one for one in observed.load(model) if outcome(MODELS[model], one) == "green")


@MODEL
def test_the_default_and_other_caches_of_each_model_were_seen(model: str) -> None:
    """Those of formats that are not written down wait here; none may disagree."""
    if model in WITHOUT:
        return
    assert {"red"}.isdisjoint(outcome(MODELS[model], one) for one in observed.load(model))
    assert any(one.kv for one in confirmed(model) if one.id == f"{model}-default-unset")


def asked(model: str) -> set[Path]:
    """What the oracle reads of the config, for what was seen and for any other layout."""
    config = MODELS[model]
    found = geometry.read(config)
    for seen in confirmed(model):
        layout.compare(Recording(config, found), seen.kv, seen.resolved, seen.capability)
    return found


def wrong(value: Any, layers: int) -> Iterator[Any]:
    """Other values in place of `value`; none where it holds neither number nor name. Entries of a
    list behind those of the layers are the MTP layers', which no plan has."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        yield from {value + 1, 2 * value or 2, value // 2} - {value}
    elif value in ("bfloat16", "float16", "float32"):
        yield from {"bfloat16", "float16"} - {value}
    elif isinstance(value, list | str) and value:
        # One entry made like another one of the list, wherever it stands.
        for old in dict.fromkeys(value[:layers]):
            for new in set(value) - {old}:
                at = value.index(old)
                yield (
                    value[:at] + new + value[at + 1 :]
                    if isinstance(value, str)
                    else [*value[:at], new, *value[at + 1 :]]
                )


def pages(config: Mapping[str, Any], seen: Seen) -> Any:
    """All that the oracle says; None where it says nothing."""
    try:
        kind = layout.layout_of(
            config, seen.resolved.kv_cache_dtype, seen.resolved.storage_dtype, seen.capability
        )
        return layout.expected_pages(config, kind, seen.capability)
    except (LookupError, ValueError, UsageError):
        return None


@functools.cache
def unnoticed(model: str) -> dict[str, str]:
    """Key -> what was put there and made no cell fail, for keys that the oracle reads.

    A copy of the config hides what is read of it, so a key counts too where another value changes
    what the oracle says.
    """
    config, read, seen = MODELS[model], asked(model), confirmed(model)
    right = [pages(config, one) for one in seen]
    found: dict[str, str] = {}
    for path, value in leaves(config):
        if path == ("model_type",):
            continue
        layers = config.get("num_hidden_layers", len(str(value)))
        outcomes: dict[str, set[str]] = {}
        for other in wrong(value, layers):
            mutant = changed(config, path, other)
            if path in read or right != [pages(mutant, one) for one in seen]:
                outcomes[str(other)] = {outcome(mutant, one) for one in seen}
        green = [other for other, each in outcomes.items() if each == {"green"}]
        if green or (outcomes and not any("red" in each for each in outcomes.values())):
            found[path[-1]] = f"{value} as {', '.join(green or outcomes)}"
    return found


@MODEL
def test_every_number_that_the_oracle_reads_turns_a_cell_red(model: str) -> None:
    left = {f"{model}: {key}": text for key, text in unnoticed(model).items()}
    assert {} == {name: text for name, text in left.items() if name not in EXEMPT}


def test_no_exemption_is_left_over() -> None:
    used = {f"{model}: {key}" for model in filter(known, MODELS) for key in unnoticed(model)}
    assert set() == set(EXEMPT) - used


def test_a_number_that_only_the_arithmetic_shows_is_noticed() -> None:
    """That `unnoticed` finds what it looks for."""
    assert "sliding_window" in unnoticed("gemma3")
