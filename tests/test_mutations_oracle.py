"""A wrong number in the oracle makes a cell fail: each of its literals is put wrong, one by one.

Every module of `harness.layouts`, and what makes an oracle of them, is taken as it is, so that a
new one counts from its first line on. What vLLM was seen to do (`tests/observed.py`) must then
disagree, or what it did wrongly be confirmed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

import harness
from harness import layouts, plan
from tests import observed
from tests.observed import Seen

PACKAGE = "harness.layouts"
TOP = ("checkpoint", "layout", "oracle")
MODULES = (
    *(f"harness.{name}" for name in TOP),
    *(f"{PACKAGE}.{module.name}" for module in pkgutil.iter_modules(layouts.__path__)),
)

_GUARD = "refuses what no shipped config has: tests/test_layouts_*.py"
_TEXT = "of a text for people, not of a page"
_WIDTHS = "other element types that hold the same bytes: leniency, where a record may have either"
_TOLD = "records tell the element type; for those that do not: tests/test_layouts_*.py"
_NAMED = "records name the backend; for those that do not: tests/test_layouts_state_space.py"
_CALLER = "what callers leave out in tests: `Oracle` always passes it"
_ELSEWHERE = "every shipped config lists its layers: the module's own tests"
_CPU = "for a CPU, and these records are of GPUs: tests/test_layouts_kernels.py"
_NO_CELL = "no cell of the matrix on vLLM 0.33.0 has it: tests/test_layouts_kernels.py"
_KEYS_OF_128 = "every shipped config has keys of 128: tests/test_layouts_kernels.py"

EXEMPT = {
    "layout: 16 in `DEFAULT_BLOCK_SIZE = 16`": "only where no cache was seen at all",
    "layout.compare: 0 in `config: Config, kv: Sequence[KVCache], resolved: Resolved, c…`": _CALLER,
    "layout.compare: 0 in `config: Config, kv: Sequence[KVCache], resolved: Resolved, c…` (2)": (
        _CALLER
    ),
    "layout.matches: 0 in `config: Config, kv: Sequence[KVCache], resolved: Resolved, c…` (2)": (
        _CALLER
    ),
    "oracle._longest: 0 in `0 if record.capacity is None else record.capacity.max_model_…`": (
        "every record with a KV cache has its capacity"
    ),
    "page.Blocks: 0 in `sequence: int = 0`": _CALLER,
    "layout.matches: 0 in `config: Config, kv: Sequence[KVCache], resolved: Resolved, c…`": _CALLER,
    "layout._block_size: 1 in `layers.most_common(1)`": "the first of any number is the first",
    "layout._layers: 1 in `count == 1`": _TEXT,
    "deepseek_v4: 8 in `_SCALE_FIELD = 8`": "7 scales fill 8 bytes by fours too",
    "deepseek_v4.page_of: 1 in `align > 1`": _TEXT,
    "deepseek_v4.latent_state: 0 in `nope <= 0`": _GUARD,
    "deepseek_v41._pages: 1 in `page_of('attn.compressor.state_cache', 1, "
    "pooled, _RING_BLOC…` (2)": "a ring of 32768 B is a multiple of 2, too",
    "deepseek_v41._main_block: 128 in `[128 for backend in blocks.backends if "
    "backend.startswith('F…`": "tells on Hopper only, where vLLM 0.33.0 fails",
    "deepseek_v41._main_block: 0 in `blocks.asked % least == 0`": (
        "vLLM 0.33.0 starts with none that is longer than the least: the module's own tests"
    ),
    "deepseek_v41._source_ratios: 0 in `0 <= at < layers`": _GUARD,
    "formats.Packed.pair: 2 in `size % 2`": "heads of 128 have even slots: the module's own tests",
    "full_attention._layout_of: 0 in `packed[0]` (2)": _TEXT,
    "full_attention._kept: 2 in `layers // 2`": "no model is as shallow: the module's own tests",
    "full_attention.format_of: 1 in `len(names) > 1`": "a third name is as wrong as a second",
    "full_attention.keys_and_values: 1 in `block_size < 1`": _GUARD,
    "full_attention.keys_and_values: 1 in `1:`": _WIDTHS,
    "kernels.Kernel: 0 in `preferred: int = 0`": "every kernel takes multiples of 2",
    "kernels['B12X']: 64 in `(64, 128)`": _NO_CELL,
    "kernels['B12X']: 128 in `(64, 128)`": _NO_CELL,
    "kernels['B12X']: 128 in `preferred=128`": _NO_CELL,
    "kernels['CPU_ATTN']: 32 in `(32,)`": _CPU,
    "kernels['CPU_ATTN']: 128 in `preferred=128`": _CPU,
    "kernels['HPC_ATTN']: 64 in `(64,)`": _NO_CELL,
    "kernels['AMX_MLA']: 32 in `(32,)`": _CPU,
    "kernels['CPU_MLA']: 16 in `(16,)`": _CPU,
    "kernels: 11 in `(10, 11)`": "no device profile is of SM11x",
    "kernels: 16 in `(16, 32, 64)`": _NAMED,
    "kernels: 32 in `(16, 32, 64)`": _NAMED,
    "kernels: 64 in `(16, 32, 64)`": _NAMED,
    "kernels.common: 1 in `asked or max((kernel.preferred for kernel in kernels)) or 1`": (
        "every kernel takes multiples of 2"
    ),
    "mla: 8 in `(8, 0)`": _TOLD,
    "mla: 0 in `(8, 0)`": _TOLD,
    "mla._layout_of: 0 in `ALIKE[name].elements[0]`": _TOLD,
    "mla._page: 1 in `block_size < 1`": _GUARD,
    "mla._page: 1 in `1:`": _WIDTHS,
    "mla._indexers: 1 in `at - first + 1`": _ELSEWHERE,
    "mla._indexers: 0 in `(at - first + 1) % every == 0`": _ELSEWHERE,
    "page: 1 in `'float8_e5m2': 1`": "every backend seen keeps float8_e5m2 as uint8",
    "page.Blocks: 0 in `asked: int = 0`": _CALLER,
    "page.count: 1 in `value < 1`": _GUARD,
    "rank.of: 1 in `size == 1`": "the only rank of a model has all of it, whether divided or not",
    "state_layers.State.sum: 1 in `self.kernel - 1`": _TEXT,
    "state_layers.periodic: 0 in `0 <= offset < period`": _GUARD,
    "state_layers.periodic: 1 in `period - 1`": _TEXT,
    "state_space._latent: 1 in `1:`": _WIDTHS,
    "state_space._anywhere: 1 in `return 1`": "every kernel takes multiples of 2",
    "state_space: 8 in `(8, 0)`": "float16 is as wide as bfloat16",
    "state_space: 0 in `(8, 0)`": "float16 is as wide as bfloat16",
    "state_space._chunks: 1 in `return 1`": "every kernel takes multiples of 2",
    "state_space._chunks: 0 in `_CHUNK_MAJORS[0]`": _KEYS_OF_128,
    "state_space._chunks: 1 in `_CHUNK if fits else 1`": _KEYS_OF_128,
    "state_space._layout_of: 0 in `known.elements[0]`": _TOLD,
    "state_space._pages: 1 in `block < 1`": _GUARD,
    "windowed._alternating: 2 in `at % 2`": _ELSEWHERE,
    "windowed: 6 in `_GEMMA_PERIOD = 6`": _ELSEWHERE,
    "windowed._interleaved: 1 in `at + 1`": _ELSEWHERE,
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
    again: int = 0
    """How many of the same name stand before it."""

    @property
    def name(self) -> str:
        """How people find it."""
        place = f"{self.module.rpartition('.')[2]}{self.scope}"
        which = f" ({self.again + 1})" if self.again else ""
        return f"{place}: {self.value} in `{self.expression}`{which}"


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
            elif isinstance(node, ast.Dict) and child in node.values:
                key = node.keys[node.values.index(child)]
                inner = scope if key is None else f"{scope}[{ast.unparse(key)}]"
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
    found: list[Literal] = []
    names: Counter[str] = Counter()
    for module in MODULES:
        for at, (scope, parent, number) in enumerate(numbers(ast.parse(source(module)))):
            one = Literal(module, scope, expression(parent, number), at, number.value)
            found.append(replace(one, again=names[one.name]))
            names[one.name] += 1
    return tuple(found)


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
    """`harness.oracle` with `value` in place of the literal."""
    finder = Mutated(literal, value)
    names = (*MODULES, PACKAGE)
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    attributes = {name: getattr(harness, name) for name in (*TOP, "layouts")}
    for name in attributes:
        delattr(harness, name)
    package = ModuleType(PACKAGE)
    package.__path__ = list(layouts.__path__)
    sys.modules[PACKAGE] = package
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("harness.oracle")
    finally:
        sys.meta_path.remove(finder)
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
        for name, module in attributes.items():
            setattr(harness, name, module)


@functools.cache
def records() -> tuple[tuple[plan.Model, Seen], ...]:
    """All that was seen, the first of each model before the second of any."""
    every = observed.models()
    found = [(n, every[key], one) for key in every for n, one in enumerate(observed.load(key))]
    return tuple((model, one) for _, model, one in sorted(found, key=lambda each: each[0]))


def noticed(literal: Literal, value: int) -> bool:
    """True where a cell that is right fails, or one that is wrong does no more."""
    try:
        with oracle(literal, value) as mutant:
            return any(
                seen.wrong != bool(mutant.Oracle(model.config, model.start.drafts)(seen.record))
                for model, seen in records()
            )
    except Exception:
        # An oracle that breaks down is no cell that passes.
        return True


def unnoticed(literal: Literal) -> str:
    """What was put in its place and made no cell fail; empty where all is well."""
    value = literal.value
    others = sorted({value + 1, 2 * value or 2, value // 2} - {value})
    green = [str(other) for other in others if not noticed(literal, other)]
    return f"{value} as {', '.join(green)}" if green else ""


@functools.cache
def survivors() -> dict[str, str]:
    return {one.name: text for one in literals() if (text := unnoticed(one))}


def test_every_record_is_judged_as_it_should_be_by_the_oracle_as_it_is() -> None:
    """Loaded as the mutants are, with nothing put wrong."""
    first = literals()[0]
    assert not noticed(first, first.value)
    assert 50 < len(records())


def test_every_module_has_numbers_that_are_put_wrong() -> None:
    assert {f"{PACKAGE}.{path.stem}" for path in Path(layouts.__path__[0]).glob("[a-z]*.py")} == (
        set(MODULES) - {f"harness.{name}" for name in TOP}
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
    assert {path.stem for path in observed.FOLDER.glob("*.jsonl")} <= observed.models().keys()
