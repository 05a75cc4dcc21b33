"""What vLLM's selector considered where no backend was asked for. Reads, and decides nothing.

The selector keeps its answers in a `functools.cache`, whose keys are the very questions that the
layers asked; they are put to the platform once more, for its reasons (vLLM 0.27.1 - 0.33.0).
"""

from __future__ import annotations

import gc
import traceback
from dataclasses import dataclass, replace
from typing import Any

from harness.record import Candidate


@dataclass(frozen=True)
class Question:
    """One question to the selector, and what it chose."""

    config: Any
    """vLLM's `AttentionSelectorConfig`, a named tuple."""
    heads: int | None
    chosen: Any
    """The backend's class; None where the selector found none."""


def candidates(vllm_config: Any, error: BaseException | None = None) -> tuple[Candidate, ...]:
    """`Record.candidates`. `error` is what ended the start: a choice that failed is not kept, but
    stands in the frames that it went through."""
    if vllm_config is None:
        return ()
    from vllm.config import set_current_vllm_config

    questions = [*_kept(), *_failed(error)]
    try:
        # A contract may read the config that is being built.
        with set_current_vllm_config(vllm_config):
            answers = [_considered(question) for question in questions]
    except Exception:
        # A contract that cannot be asked says nothing, neither for nor against.
        traceback.print_exc()
        return ()
    if all(answer == answers[0] for answer in answers):
        return tuple(answers[0]) if answers else ()
    return tuple(
        replace(one, asked=_asked(question, questions))
        for question, answer in zip(questions, answers, strict=True)
        for one in answer
    )


def _kept() -> list[Question]:
    from vllm.v1.attention import selector

    inside = gc.get_referents(selector._cached_get_attn_backend)
    kept = [part for part in inside if isinstance(part, dict)]
    return [
        question
        for answers in kept
        for key, chosen in answers.items()
        if isinstance(key, tuple) and (question := _question(key, chosen)) is not None
    ]


def _question(key: tuple[Any, ...], chosen: Any) -> Question | None:
    """A key of the cache: a mark, then names and values in turns. None where a backend was named,
    for then nothing else is considered."""
    named = dict(zip(key[1::2], key[2::2], strict=False))
    if named.get("backend") is not None or "attn_selector_config" not in named:
        return None
    return Question(named["attn_selector_config"], named.get("num_heads"), chosen)


def _failed(error: BaseException | None) -> list[Question]:
    trace = error.__traceback__ if error is not None else None
    found = []
    while trace is not None:
        names = trace.tb_frame.f_locals
        if trace.tb_frame.f_code.co_name == "get_attn_backend_cls" and (
            names.get("selected_backend") is None and "attn_selector_config" in names
        ):
            found.append(Question(names["attn_selector_config"], names.get("num_heads"), None))
        trace = trace.tb_next
    return found


def _considered(question: Question) -> list[Candidate]:
    from vllm.platforms import current_platform

    # Of the class: the platform object logs every name that it lacks.
    ask = getattr(type(current_platform), "get_valid_backends", None)
    if ask is None:
        # The CPU's platform has no list to choose from.
        return []
    valid, invalid = ask(
        device_capability=current_platform.get_device_capability(),
        attn_selector_config=question.config,
        num_heads=question.heads,
    )
    found = {int(one.priority): Candidate(str(one.backend.name), ()) for one in valid}
    chosen = [int(one.priority) for one in valid if one.backend_class is question.chosen]
    if chosen:
        found[min(chosen)] = replace(found[min(chosen)], selected=True)
    for backend, (priority, reasons) in invalid.items():
        found[int(priority)] = Candidate(str(backend.name), tuple(map(str, reasons)))
    return [found[priority] for priority in sorted(found)]


def _asked(question: Question, questions: list[Question]) -> str:
    """What tells `question` from the others."""
    fields = question.config._asdict()
    others = [other.config._asdict() for other in questions]
    differing = [
        f"{name}={value}"
        for name, value in fields.items()
        if any(other.get(name) != value for other in others)
    ]
    if any(other.heads != question.heads for other in questions):
        differing.append(f"num_heads={question.heads}")
    return ", ".join(differing)
