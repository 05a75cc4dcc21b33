"""The settings of CI: ci/nightly.yaml, read and checked whole before anything is made of it. Pure.

Every error is one line that names the file, the place in it and the remedy. A value is never
shown where it could be a secret.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ci import arguments, document
from ci.document import Place
from harness.errors import UsageError

DEFAULT = Path(__file__).resolve().parent / "nightly.yaml"
"""The file that is read where none is named."""

MAX_KEY = 80
"""Characters. Buildkite takes 100, and folders, groups and block steps are named after keys."""

MAX_CONTEXT = 100
"""Characters of an annotation's context (facts/buildkite.md)."""

MAX_PARALLELISM = 500
"""Jobs: what one upload may have in all (facts/buildkite.md)."""

MAX_MINUTES = 24 * 60

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


@dataclass(frozen=True)
class Step:
    """One class of devices: a step with as many jobs as it has shards."""

    key: str
    queue: str
    """The agents' queue."""
    timeout_in_minutes: int
    """Of each job."""
    label: str = ""
    devices: tuple[str, ...] = ("auto",)
    """Device SPECs; `auto` takes what the agent has, which must be a GPU or a slice."""
    engine: str = "current"
    pytest: tuple[str, ...] = ()
    """Further arguments of pytest."""
    parallelism: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    concurrency: int | None = None
    """Jobs of this step that may run at a time, in all builds."""
    plugins: tuple[Any, ...] = ()
    """As Buildkite takes them, such as the container that a queue of vLLM's wants."""
    vllm_device: str | None = None
    """`device` of vLLM's test areas; a step without one is not part of them."""

    @property
    def real(self) -> bool:
        """True where a GPU or a slice must be there."""
        return any(arguments.is_real(spec) for spec in self.devices)


@dataclass(frozen=True)
class Premerge:
    """The step for pull requests: virtual devices, no GPU."""

    step: Step
    changes: tuple[str, ...]
    """Glob patterns of files; a change of any of them wants the step."""
    when: str = "build.pull_request.id != null"
    """Buildkite's `if`, where one upload has the nightly steps as well."""


@dataclass(frozen=True)
class Nightly:
    """The steps that run every night."""

    steps: tuple[Step, ...]
    when: str = 'build.source == "schedule"'


@dataclass(frozen=True)
class Merge:
    """The step that makes one report of all shards."""

    key: str
    queue: str
    timeout_in_minutes: int = 15
    label: str = ""
    history: str | None = None
    """Folder of earlier runs."""
    baseline: str | None = None
    """matrix.json of an earlier run, or its folder."""
    context: str = "kvmatrix"
    """Of the annotation: a later one with the same context replaces it."""
    owners: tuple[str, ...] = ()
    """Who is to look at a new failure."""
    slack: tuple[str, ...] = ()
    """Channels that hear of a night that failed."""
    env: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[Any, ...] = ()
    vllm_device: str | None = None


@dataclass(frozen=True)
class Area:
    """Where the steps stand in vLLM's own pipeline."""

    group: str = "KV cache"
    working_dir: str = "/vllm-workspace/tests"
    """Where a job starts in vLLM's image."""
    folder: str = "kvmatrix"
    """As `Settings.folder`, from there."""
    setup: tuple[str, ...] = ("uv pip install --system -q -e kvmatrix",)
    """As `Settings.setup`."""
    depends_on: tuple[str, ...] = ("image-build",)
    merge_depends_on: tuple[str, ...] = ("image-build-cpu",)


@dataclass(frozen=True)
class Settings:
    """The whole file."""

    merge: Merge
    nightly: Nightly | None = None
    premerge: Premerge | None = None
    setup: tuple[str, ...] = ()
    """Shell commands that come first in each step. One that fails is infrastructure."""
    folder: str = "."
    """Where kvmatrix lies, from the folder that a job starts in."""
    python: str = "python3"
    infra_fails: bool = False
    """True where a step that only infrastructure kept from its result fails the build."""
    vllm: Area = field(default_factory=Area)


def read(path: Path) -> Settings:
    """The settings of a file. UsageError where it is missing or wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror or error}; name the settings with --config FILE"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    return load(text, str(path))


def load(text: str, source: str = "ci/nightly.yaml") -> Settings:
    """The settings of a YAML text. UsageError names the place and what is wrong there."""
    data = document.parse(text, source)
    top = Place.top(data, source, _names(Settings))
    premerge, nightly = top.part("premerge"), top.part("nightly")
    if premerge is None and nightly is None:
        raise UsageError(f"{source}: neither `premerge` nor `nightly`: there is nothing to run")
    merge = top.part("merge")
    if merge is None:
        raise UsageError(f"{source}: merge is missing: it makes one report of all shards")
    area = top.part("vllm")
    found = Settings(
        merge=_merge(merge),
        nightly=None if nightly is None else _nightly(nightly),
        premerge=None if premerge is None else _premerge(premerge),
        setup=tuple(_command(each, top.at("setup")) for each in top.words("setup", ())),
        folder=_folder(top.text("folder", "."), top.at("folder")),
        python=_python(top.text("python", "python3"), top.at("python")),
        infra_fails=top.flag("infra_fails", False),
        vllm=Area() if area is None else _area(area),
    )
    _check_keys(found, source)
    return found


def keys(settings: Settings) -> list[str]:
    """The keys of all steps, as often as they are used."""
    steps = list(settings.nightly.steps) if settings.nightly else []
    found = [step.key for step in steps] + [settings.merge.key]
    if settings.premerge is not None:
        found.append(settings.premerge.step.key)
        if settings.premerge.step.parallelism > 1:
            found.append(premerge_merge_key(settings.premerge))
    return found


def premerge_merge_key(premerge: Premerge) -> str:
    """The key of the step that merges the shards of a pull request."""
    return f"{premerge.step.key}-merge"


def _check_keys(settings: Settings, source: str) -> None:
    for key, often in Counter(keys(settings)).items():
        if often > 1:
            raise UsageError(f"{source}: {often} steps have the key {key!r}: each needs its own")


def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


_STEP = _names(Step)


def _premerge(place: Place) -> Premerge:
    place.only((*_STEP, "changes", "when"))
    step = _step(place)
    if step.real:
        raise UsageError(f"{place.at('devices')}: a step before merging has virtual devices alone")
    changes = place.words("changes")
    for pattern in changes:
        # Older agents read one pattern, so the list becomes `{a,b}`.
        if re.search(r"[{},\s]", pattern) or pattern.startswith(("/", "./", "../", "!")):
            raise UsageError(
                f"{place.at('changes')}: {pattern!r} is not like vllm/v1/**: no braces, commas, "
                "blanks, and from the root of the checkout"
            )
    return Premerge(step, changes, place.text("when", Premerge.when))


def _nightly(place: Place) -> Nightly:
    place.only(_names(Nightly))
    steps = tuple(_step(each.only(_STEP)) for each in place.parts("steps"))
    return Nightly(steps, place.text("when", Nightly.when))


def _step(place: Place) -> Step:
    key = _key(place)
    place = place.called(key)
    found = Step(
        key=key,
        queue=place.text("queue"),
        timeout_in_minutes=place.whole("timeout_in_minutes", MAX_MINUTES),
        label=place.text("label", ""),
        devices=place.words("devices", Step.devices),
        engine=place.text("engine", Step.engine),
        pytest=arguments.split(place.text("pytest", ""), place.at("pytest")),
        parallelism=place.whole("parallelism", MAX_PARALLELISM, 1),
        env=place.env("env"),
        concurrency=place.whole("concurrency", MAX_PARALLELISM, None),
        plugins=_plugins(place),
        vllm_device=place.text("vllm_device", None),
    )
    try:
        arguments.check(found.devices, found.engine, found.pytest)
    except UsageError as error:
        raise UsageError(f"{place.where}: {error}") from None
    return found


def _merge(place: Place) -> Merge:
    place.only(_names(Merge))
    key = _key(place)
    context = place.text("context", Merge.context)
    if len(context) > MAX_CONTEXT:
        raise UsageError(
            f"{place.at('context')}: an annotation's context has at most {MAX_CONTEXT} "
            f"characters, this has {len(context)}"
        )
    slack = place.words("slack", ())
    for channel in slack:
        if re.search(r"\s", channel):
            raise UsageError(f"{place.at('slack')}: {channel!r} is no channel such as #vllm-ci")
    history, baseline = place.text("history", None), place.text("baseline", None)
    for name, path in (("history", history), ("baseline", baseline)):
        if path is not None and re.search(r"[\"'`$\\]", path):
            raise UsageError(f"{place.at(name)}: leave quotes, $ and \\ out of a path")
    return Merge(
        key=key,
        queue=place.text("queue"),
        timeout_in_minutes=place.whole("timeout_in_minutes", MAX_MINUTES, Merge.timeout_in_minutes),
        label=place.text("label", ""),
        history=history,
        baseline=baseline,
        context=context,
        owners=place.words("owners", ()),
        slack=slack,
        env=place.env("env"),
        plugins=_plugins(place),
        vllm_device=place.text("vllm_device", None),
    )


def _area(place: Place) -> Area:
    place.only(_names(Area))
    return Area(
        place.text("group", Area.group),
        place.text("working_dir", Area.working_dir),
        _folder(place.text("folder", Area.folder), place.at("folder")),
        tuple(_command(each, place.at("setup")) for each in place.words("setup", Area.setup)),
        place.words("depends_on", Area.depends_on),
        place.words("merge_depends_on", Area.merge_depends_on),
    )


def _key(place: Place) -> str:
    key = place.text("key")
    if not _KEY.fullmatch(key) or len(key) > MAX_KEY or _UUID.fullmatch(key):
        raise UsageError(
            f"{place.at('key')}: {key!r} is no step key: at most {MAX_KEY} letters, digits, _ "
            "and -, and not like a UUID"
        )
    return key


def _plugins(place: Place) -> tuple[Any, ...]:
    found = place.plain("plugins")
    if found is None:
        return ()
    if not isinstance(found, list) or not all(
        isinstance(each, str) or (isinstance(each, dict) and len(each) == 1) for each in found
    ):
        raise UsageError(f"{place.at('plugins')} must be a list such as [docker#v5.2.0: {{...}}]")
    return tuple(found)


def _folder(text: str, where: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", text) or ".." in text.split("/"):
        raise UsageError(f"{where}: {text!r} is no folder within the checkout, such as kvmatrix")
    return text


def _python(text: str, where: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_./ -]+", text):
        raise UsageError(f"{where}: {text!r} does not start a Python: `python3`, `uv run python`")
    return text


def _command(text: str, where: str) -> str:
    """A command behind which ` || exit 75` can stand."""
    words = arguments.split(text, where)
    if not words or text.rstrip()[-1] in "&;|\\" or re.search(r"(^|\s)#", text):
        raise UsageError(f"{where}: {text!r} is not one whole command (without a comment)")
    return text
