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

EXEMPT: dict[str, str] = {}
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
