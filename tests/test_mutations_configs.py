"""A wrong number in a config makes a cell fail: every number of every shipped config is put wrong.

What vLLM did with the right config (`tests/observed.py`) must then disagree with the oracle, or
what it did wrongly must no longer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from harness import layout
from harness.errors import UsageError
from harness.oracle import Oracle
from harness.record import Record
from tests import geometry, observed
from tests.geometry import Path, Recording, changed, leaves

MODELS = {key: model.config for key, model in observed.models().items()}

_SHARED = "only that several heads share a key counts: tests/test_layouts_kernels.py"

WRONG_DEFAULT = {
    "llama3-fp8kv-fp8": "vLLM ignores the checkpoint's own fp8: cases/known.yaml",
}
"""Models whose default is rightly red."""

_HEAD_DIM_WRITTEN = (
    *("falcon-h1", "gemma3", "gpt-oss", "llama4", "minimax-m2", "nemotron-h", "nemotron3-nano"),
    *("qwen3", "qwen3-embed", "qwen3-moe", "qwen3-next"),
)

EXEMPT = {
    **{f"{model}: num_attention_heads": _SHARED for model in _HEAD_DIM_WRITTEN},
    "dsv41: compress_ratios": "the first two layers, of ratio 0, are no sources",
    "jamba: attn_layer_offset": "which layers are attention does not change how many",
    "jamba: attn_layer_period": "32 layers have 4 of attention in nines as in eights",
    "mamba2: torch_dtype": "float16 is as wide, and nothing stored names it",
}
"""Keys that the oracle reads and no cache can show: why. Any other must turn a record red."""


def known(model: str) -> bool:
    return MODELS[model].get("model_type") in layout._FAMILIES


MODEL = pytest.mark.parametrize("model", sorted(filter(known, MODELS)))


def oracle(model: str, config: Mapping[str, Any]) -> Oracle:
    return Oracle(config, observed.models()[model].start.drafts)


def disagrees(oracle: Oracle, record: Record) -> bool:
    """True where the cell fails."""
    try:
        return bool(oracle(record))
    except UsageError:
        # A config without its numbers is no cell that passes.
        return True


@MODEL
def test_the_default_of_each_model_was_seen(model: str) -> None:
    defaults = [one for one in observed.load(model) if one.record.id == f"{model}-default-unset"]
    assert defaults
    assert {model in WRONG_DEFAULT} == {one.wrong for one in defaults}


@MODEL
def test_every_record_is_judged_as_it_is_known_to_be(model: str) -> None:
    right = oracle(model, MODELS[model])
    for seen in observed.load(model):
        assert seen.wrong == disagrees(right, seen.record), seen.record.id


def asked(model: str) -> set[Path]:
    """What the oracle reads of the config, for what was seen and for any other layout."""
    config = MODELS[model]
    found = geometry.read(config)
    for record in observed.right(model):
        # A rank divides whatever heads there are, those that nothing is stored of too.
        if record.tensor_parallel_size == 1:
            oracle(model, Recording(config, found))(record)
    return found


def wrong(value: Any, layers: int) -> Iterator[Any]:
    """Other values in place of `value`; none where it holds neither number nor name. Entries of a
    list behind those of the layers are the MTP layers', which no plan has."""
    if isinstance(value, bool):
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


def pages(model: str, config: Mapping[str, Any]) -> list[Any]:
    """All that the oracle says of what was seen; None where it says nothing."""
    found: list[Any] = []
    for record in observed.right(model):
        try:
            found.append([match.page for match in oracle(model, config).matches(record)])
        except (LookupError, ValueError, UsageError):
            found.append(None)
    return found


@functools.cache
def unnoticed(model: str) -> dict[str, str]:
    """Key -> what was put there and made no cell fail, for keys that the oracle reads.

    A copy of the config hides what is read of it, so a key counts too where another value changes
    what the oracle says.
    """
    config, read, right = MODELS[model], asked(model), pages(model, MODELS[model])
    layers = config.get("text_config", config).get("num_hidden_layers", 0)
    found: dict[str, str] = {}
    for path, value in leaves(config):
        if path[-1] == "model_type":
            continue
        green = []
        for other in wrong(value, layers or len(str(value))):
            mutant = oracle(model, changed(config, path, other))
            if any(seen.wrong != disagrees(mutant, seen.record) for seen in observed.load(model)):
                continue
            if path in read or right != pages(model, mutant.config):
                green.append(str(other))
        if green:
            found[path[-1]] = f"{value} as {', '.join(green)}"
    return found


@MODEL
def test_every_number_that_the_oracle_reads_turns_a_cell_red(model: str) -> None:
    left = {f"{model}: {key}": text for key, text in unnoticed(model).items()}
    assert {} == {name: text for name, text in left.items() if name not in EXEMPT}


def test_no_exemption_is_left_over() -> None:
    used = {f"{model}: {key}" for model in filter(known, MODELS) for key in unnoticed(model)}
    assert set() == set(EXEMPT) - used
