"""A wrong number in the oracle makes a cell fail: each of its literals is put wrong, one by one.

Every module of `harness.layouts` and `harness.layout` is taken as it is, so that a new one counts
from its first line on. What vLLM was seen to do (`tests/observed.py`) must then disagree.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

import harness
from harness import layouts
from tests import observed
from tests.observed import Seen
from tests.test_mutations_configs import MODELS, confirmed, known

PACKAGE = "harness.layouts"
MODULES = (
    "harness.layout",
    *(f"{PACKAGE}.{module.name}" for module in pkgutil.iter_modules(layouts.__path__)),
)

_GUARD = "refuses what no shipped config has: tests/test_layouts_*.py"
_TEXT = "of a text for people, not of a page"
_SILENT = "the oracle then has no opinion, and the records are no longer confirmed"
_KERNEL = "allows a block in parts, which no MLA cache was seen in: tests/test_layouts_mla.py"
_ELSEWHERE = "every shipped config lists its layers: the module's own tests"
_WIDTHS = "other element types that hold the same bytes: leniency, where a record may have either"

EXEMPT = {
    "layout: 16 in `DEFAULT_BLOCK_SIZE = 16`": "only where no cache was seen at all",
    "layout._block_size: 1 in `layers.most_common(1)`": "the first of any number is the first",
    "layout._layers: 1 in `count == 1`": _TEXT,
    "deepseek_v4: 8 in `_SCALE_FIELD = 8`": "7 scales fill 8 bytes by fours too",
    "deepseek_v4: 4 in `4: _Compressor(vectors=2, block=4, indexer=True)`": _SILENT,
    "deepseek_v4: 128 in `128: _Compressor(vectors=1, block=8, indexer=False)`": _SILENT,
    "deepseek_v4._latent: 0 in `nope <= 0`": _GUARD,
    "deepseek_v4._ratios: 0 in `(0, *_COMPRESSORS)`": _SILENT,
    "full_attention.format_of: 1 in `len(names) > 1`": "a third name is as wrong as a second",
    "full_attention.keys_and_values: 1 in `block_size < 1`": _GUARD,
    "full_attention.keys_and_values: 1 in `1:`": _WIDTHS,
    "full_attention: 1 in `_SOFTMAX = 1`": _SILENT,
    "mla: 32 in `(32, 64, 128)`": _KERNEL,
    "mla: 64 in `(32, 64, 128)`": _KERNEL,
    "mla: 128 in `(32, 64, 128)`": _KERNEL,
    "mla: 64 in `(64,)`": _KERNEL,
    "mla: 10 in `_NVFP4_MAJOR = 10`": _SILENT,
    "mla._layout_of: 0 in `FORMATS[name].elements[0]`": _WIDTHS,
    "mla._page: 1 in `block_size < 1`": _GUARD,
    "mla._page: 1 in `1:`": _WIDTHS,
    "mla._indexers: 1 in `at - first + 1`": _ELSEWHERE,
    "mla._indexers: 0 in `(at - first + 1) % every == 0`": _ELSEWHERE,
    "page: 1 in `'float8_e5m2': 1`": ("every backend seen keeps float8_e5m2 as uint8"),
    "page.count: 1 in `value < 1`": _GUARD,
    "state_space.State.sum: 1 in `self.kernel - 1`": _TEXT,
    "state_space._states_only: 0 in `(count(config, 'num_hidden_layers'), 0)`": _SILENT,
    "state_space._periodic: 0 in `0 <= offset < period`": _GUARD,
    "state_space._periodic: 1 in `period - 1`": _TEXT,
    "state_space._latent: 1 in `1:`": _WIDTHS,
    "state_space._chunks: 16 in `64 if capability is not None and capability[0] in (9, 10) el…`": (
        "the block seen elsewhere is 544 = 17 x 32 tokens"
    ),
    "state_space._pages: 1 in `block < 1`": _GUARD,
    "windowed._alternating: 2 in `at % 2`": _ELSEWHERE,
    "windowed: 6 in `_GEMMA_PERIOD = 6`": _ELSEWHERE,
    "windowed._interleaved: 1 in `at + 1`": "26 layers have 4 global ones at another offset too",
}
"""Literals that no cache can show: why."""


@dataclass(frozen=True)
class Literal:
    """A number in a module's source."""

    module: str
    scope: str
    expression: str
    """What it stands in, as source."""
    at: int
    """Its place among all numbers of the module."""
    value: int

    @property
    def name(self) -> str:
        """How people find it."""
        place = f"{self.module.rpartition('.')[2]}{self.scope}"
        return f"{place}: {self.value} in `{self.expression}`"


@functools.cache
def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def numbers(tree: ast.AST) -> Iterator[tuple[str, ast.AST, ast.Constant]]:
    """(scope, parent, number) of every number, in the order of the source."""

    def walk(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST, ast.Constant]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and type(child.value) is int:
                yield scope, node, child
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{scope}.{child.name}"
            yield from walk(child, inner)

    return walk(tree, "")


def expression(parent: ast.AST, number: ast.Constant) -> str:
    """What the number stands in, of a dict its own entry."""
    text = ast.unparse(parent)
    if isinstance(parent, ast.Dict):
        for key, value in zip(parent.keys, parent.values, strict=True):
            if number in (key, value) and key is not None:
                text = f"{ast.unparse(key)}: {ast.unparse(value)}"
    return text if len(text) <= 60 else f"{text[:60]}…"


@functools.cache
def literals() -> tuple[Literal, ...]:
    return tuple(
        Literal(module, scope, expression(parent, number), at, number.value)
        for module in MODULES
        for at, (scope, parent, number) in enumerate(numbers(ast.parse(source(module))))
    )


@functools.cache
def code(module: str, at: int = -1, value: int = 0) -> CodeType:
    """The module's code, the number at place `at` being `value`."""
    tree = ast.parse(source(module))
    if at >= 0:
        list(numbers(tree))[at][2].value = value
    return compile(tree, module, "exec")


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the oracle anew, with one number put wrong."""

    def __init__(self, literal: Literal, value: int) -> None:
        self._literal, self._value = literal, value

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        mutated = name == self._literal.module
        chosen = code(name, self._literal.at, self._value) if mutated else code(name)
        exec(chosen, module.__dict__)


@contextmanager
def oracle(literal: Literal, value: int) -> Iterator[ModuleType]:
    """`harness.layout` with `value` in place of the literal."""
    finder = Mutated(literal, value)
    names = (*MODULES, PACKAGE)
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    attributes = {name: getattr(harness, name) for name in ("layout", "layouts")}
    package = ModuleType(PACKAGE)
    package.__path__ = list(layouts.__path__)
    sys.modules[PACKAGE] = package
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("harness.layout")
    finally:
        sys.meta_path.remove(finder)
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
        for name, module in attributes.items():
            setattr(harness, name, module)


@functools.cache
def records() -> tuple[tuple[Mapping[str, Any], Seen], ...]:
    found = [(MODELS[key], one) for key in filter(known, MODELS) for one in confirmed(key)]
    # Those with most kinds first: they show most.
    return tuple(sorted(found, key=lambda one: -len(one[1].kv)))


def outcome(literal: Literal, value: int) -> str:
    """`red` where a cell fails, `silent` where the oracle only loses its opinion, else `green`."""
    silent = False
    try:
        with oracle(literal, value) as mutant:
            for config, seen in records():
                try:
                    if mutant.compare(config, seen.kv, seen.resolved, seen.capability):
                        return "red"
                except mutant.UnknownLayout:
                    silent = True
    except Exception:
        # An oracle that breaks down is no cell that passes.
        return "red"
    return "silent" if silent else "green"


def unnoticed(literal: Literal) -> str:
    """What was put in its place and made no cell fail; empty where all is well."""
    value = literal.value
    others = {value + 1, 2 * value or 2, value // 2} - {value}
    outcomes = {other: outcome(literal, other) for other in sorted(others)}
    if "green" in outcomes.values() or "red" not in outcomes.values():
        return f"{value} as {', '.join(map(str, outcomes))}: {', '.join(outcomes.values())}"
    return ""


@functools.cache
def survivors() -> dict[str, str]:
    return {one.name: text for one in literals() if (text := unnoticed(one))}


def test_every_record_is_confirmed_by_the_oracle_as_it_is() -> None:
    """Loaded as the mutants are, with nothing put wrong."""
    first = literals()[0]
    assert "green" == outcome(first, first.value)
    assert 50 < len(records())


def test_every_module_has_numbers_that_are_put_wrong() -> None:
    assert {f"{PACKAGE}.{path.stem}" for path in Path(layouts.__path__[0]).glob("[a-z]*.py")} == (
        set(MODULES) - {"harness.layout"}
    )


def test_every_number_of_the_oracle_turns_a_cell_red() -> None:
    assert {} == {name: text for name, text in survivors().items() if name not in EXEMPT}


def test_no_exemption_is_left_over() -> None:
    assert set() == set(EXEMPT) - set(survivors())


@pytest.mark.parametrize("module", MODULES)
def test_the_oracle_itself_is_left_as_it_was(module: str) -> None:
    first = literals()[0]
    before = sys.modules[module]
    with oracle(first, first.value):
        assert before is not sys.modules.get(module)
    assert before is sys.modules[module]


def test_all_observed_files_are_of_shipped_models() -> None:
    assert {path.stem for path in observed.FOLDER.glob("*.jsonl")} <= MODELS.keys()
