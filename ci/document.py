"""A YAML document read key by key: each thing that is wrong is named by its place. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import yaml

from harness import safe
from harness.errors import UsageError, near

D = TypeVar("D")
_MISSING: Any = object()

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Loader(yaml.SafeLoader):
    """A key that stands twice would silently lose the first one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            # `<<` merges what an anchor names, as often as it stands.
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse(text: str, source: str) -> Any:
    """The document, of plain data. UsageError names the line where it is no YAML, and the place of
    what looks like a secret, without showing it."""
    try:
        data = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise UsageError(f"{source}{line}: {problem}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise UsageError(f"{source} is not plain YAML: {error}") from None
    try:
        return _plain(data, source, "")
    except RecursionError:
        raise UsageError(f"{source}: an anchor is part of itself") from None


def _plain(data: Any, source: str, place: str) -> Any:
    """A copy that is JSON, and holds nothing that is to stay secret."""
    at = f"{source}: {place or 'the document'}"
    if isinstance(data, dict):
        for key in data:
            if not isinstance(key, str):
                raise UsageError(f"{at} has the key {key!r}, which is no text: quote it")
        return {
            _plain(key, source, place): _plain(value, source, f"{place}.{key}".lstrip("."))
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [_plain(each, source, f"{place}[{n}]") for n, each in enumerate(data, 1)]
    if isinstance(data, str):
        if safe.mask(data, {}) != data:
            raise UsageError(
                f"{at} looks like a secret: what is here is printed and kept by Buildkite; give "
                "it to the agents instead"
            )
        if not data.isprintable():
            raise UsageError(f"{at} has a character that is not printable, or a second line")
        if r"\$" in data:
            # `pipeline upload` would read it as a `$` and go on from there.
            raise UsageError(f"{at} has a \\ before a $: leave it out, $ stays as it is")
        return data
    if data is None or isinstance(data, bool | int):
        return data
    if isinstance(data, float) and math.isfinite(data):
        return data
    raise UsageError(f"{at} is neither text nor a number: quote it")


@dataclass(frozen=True)
class Place:
    """A mapping, and where it stands."""

    data: dict[str, Any]
    source: str
    path: str = ""
    name: str = ""

    @classmethod
    def top(cls, data: Any, source: str, known: Sequence[str]) -> Place:
        """The document. UsageError where it is no mapping of known keys."""
        if not isinstance(data, dict):
            raise UsageError(f"{source} must be a mapping of {', '.join(known)}")
        return cls(data, source).only(known)

    @property
    def where(self) -> str:
        """The place, for an error."""
        named = f" ({self.name})" if self.name else ""
        return f"{self.source}: {self.path}{named}" if self.path else self.source

    def at(self, key: str) -> str:
        """The place of a key, for an error."""
        return f"{self.where}{'.' if self.path else ': '}{key}"

    def called(self, name: str) -> Place:
        """This place with the name of the thing, which people look for."""
        return replace(self, name=name)

    def only(self, known: Sequence[str]) -> Place:
        """This place. UsageError where it has a key that is not known."""
        for key in self.data:
            if key not in known:
                close = near(key, known)
                hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
                raise UsageError(
                    f"{self.where}: unknown key {key!r}: {hint}known are {', '.join(known)}"
                )
        return self

    def part(self, key: str) -> Place | None:
        """The mapping under a key; None where there is none."""
        found = self.data.get(key)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise UsageError(f"{self.at(key)} must be a mapping")
        return Place(found, self.source, f"{self.path}.{key}".lstrip("."))

    def parts(self, key: str) -> list[Place]:
        """The mappings of a list that has at least one."""
        found = self.data.get(key)
        if not isinstance(found, list) or not found:
            raise UsageError(f"{self.at(key)} must be a list of at least one")
        path = f"{self.path}.{key}".lstrip(".")
        places = []
        for n, each in enumerate(found, 1):
            if not isinstance(each, dict):
                raise UsageError(f"{self.at(key)}[{n}] must be a mapping")
            places.append(Place(each, self.source, f"{path}[{n}]"))
        return places

    def _found(self, key: str, default: Any) -> Any:
        found = self.data.get(key)
        if found is None and default is _MISSING:
            raise UsageError(f"{self.where}: {key} is missing")
        return found

    def text(self, key: str, default: D = _MISSING) -> str | D:
        """A text that is not empty. UsageError where it is missing and there is no default."""
        found = self._found(key, default)
        if found is None:
            return default
        if not isinstance(found, str) or not found.strip():
            raise UsageError(f"{self.at(key)} must be text that is not empty (quote a number)")
        return found

    def words(self, key: str, default: D = _MISSING) -> tuple[str, ...] | D:
        """A list of texts, at least one; one text counts as a list."""
        found = self._found(key, default)
        if found is None:
            return default
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list) or not (found or default == ()):
            raise UsageError(f"{self.at(key)} must be a list of texts, with at least one")
        for each in found:
            if not isinstance(each, str) or not each.strip():
                raise UsageError(f"{self.at(key)} must be a list of texts: {each!r} is none")
        return tuple(found)

    def whole(self, key: str, most: int, default: D = _MISSING) -> int | D:
        """A whole number from 1 to `most`."""
        found = self._found(key, default)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= most:
            raise UsageError(f"{self.at(key)} must be a whole number from 1 to {most}")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        found = self._found(key, default)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise UsageError(f"{self.at(key)} must be true or false")
        return found

    def env(self, key: str) -> dict[str, str]:
        """Variables of an environment; numbers become text. A secret is refused by its name."""
        found = self.data.get(key)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise UsageError(f"{self.at(key)} must be a mapping of names to values")
        for name, value in found.items():
            if not _VARIABLE.fullmatch(name) or name.startswith("BUILDKITE"):
                raise UsageError(f"{self.at(key)}: {name!r} is no variable that a step can set")
            if safe.is_secret(name):
                raise UsageError(
                    f"{self.at(key)}: {name} names a secret, and a pipeline is kept by Buildkite: "
                    "give it to the agents (an environment hook, or Buildkite secrets)"
                )
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise UsageError(f"{self.at(key)}: {name} must be text or a number: quote it")
        return {name: str(value) for name, value in found.items()}

    def plain(self, key: str) -> Any:
        """What stands under a key, as it is; None where there is nothing."""
        return self.data.get(key)
