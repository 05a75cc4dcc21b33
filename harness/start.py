"""How a model is started, beyond its config.json: `cases/models/<key>/start.json`, all optional."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from harness.errors import UsageError, near


@dataclass(frozen=True)
class Start:
    """What vLLM is told for a model whatever the case, and what the model needs."""

    config: str = ""
    """Key of the model whose config.json it shares; empty for its own."""
    engine_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of vLLM's `EngineArgs`, such as `{"runner": "pooling"}`."""
    capability: tuple[int, int] | None = None
    """The first compute capability that its weights can be used on; None for any."""
    why: str = ""
    """What needs that capability."""
    virtual: str = ""
    """Why it can start on a virtual device only; empty where it can anywhere."""
    attention: bool = True
    """False for a model without attention, which no attention backend can serve."""

    @property
    def drafts(self) -> bool:
        """True where layers that draft tokens are constructed beside the model."""
        return "speculative_config" in self.engine_args


def load(path: Path) -> Start:
    """Read a start.json; a default Start where there is none. UsageError names what is wrong."""
    name = f"{path.parent.name}/{path.name}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Start()
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{name} must be a JSON object")
    known = [each.name for each in fields(Start)]
    for key in data:
        if key not in known:
            close = near(key, known)
            hint = f"; did you mean {close[0]!r}?" if close else f": known are {', '.join(known)}"
            raise UsageError(f"{name}: unknown key {key!r}{hint}")
    if not isinstance(data.get("engine_args", {}), dict):
        raise UsageError(f"{name}: engine_args must be an object")
    for key, kind in (("config", str), ("why", str), ("virtual", str), ("attention", bool)):
        if not isinstance(data.get(key, kind()), kind):
            raise UsageError(f"{name}: {key} must be a {kind.__name__}")
    capability = data.get("capability")
    if capability is not None:
        if not (
            isinstance(capability, list)
            and len(capability) == 2
            and all(type(part) is int for part in capability)
        ):
            raise UsageError(f"{name}: capability must be [major, minor], not {capability!r}")
        if not data.get("why"):
            raise UsageError(f"{name}: why must say what needs the capability")
        data["capability"] = (capability[0], capability[1])
    return Start(**data)
