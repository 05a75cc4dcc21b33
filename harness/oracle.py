"""What the layout oracle says of a whole record. Pure.

The model's layers and its drafter's, as one rank has them, and the checkpoint's own quantisation.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from harness import checkpoint, layout
from harness.layouts import cpu, drafter, rank
from harness.layouts.page import Config
from harness.layouts.state_space import NO_TOKENS
from harness.record import KVCache, Record


@dataclass(frozen=True)
class Oracle:
    """The oracle of one cell."""

    config: Config
    """The model's config.json, of the reduced model where that is what ran."""
    drafts: bool = False
    """True where multi-token prediction (MTP) layers are constructed beside the model."""
    features: tuple[str, ...] = ()
    """`Device.features` of a CPU."""

    def __call__(self, record: Record) -> list[str]:
        """One line per disagreement; [] means confirmed.

        A format that is not written down confirms nothing, and so is a disagreement: no page may be
        waved through.
        """
        try:
            lines = [
                ("drafter: " if draft else "") + line
                for config, draft in self._configs(record)
                for line in layout.compare(
                    config,
                    _kv(record, draft),
                    record.resolved,
                    record.capability,
                    record.block_size,
                    _longest(record),
                    checkpoints=_checkpoints(record),
                )
            ]
        except layout.UnknownLayout as error:
            return [f"no layout confirms it: {error}"]
        if record.block_size:
            lines += _other_blocks(record)
        return lines + checkpoint.differences(self.config, record)

    def matches(self, record: Record) -> tuple[layout.Match, ...]:
        """Each cache beside the page that it must have. Raises as `layout.matches`."""
        return tuple(
            match
            for config, draft in self._configs(record)
            for match in layout.matches(
                config,
                _kv(record, draft),
                record.resolved,
                record.capability,
                record.block_size,
                _longest(record),
                checkpoints=_checkpoints(record),
            )
        )

    def _configs(self, record: Record) -> list[tuple[Config, bool]]:
        """The configs whose pages there must be on this rank, and whether it is the drafter's."""
        config = rank.of(self.config, record.tensor_parallel_size)
        config = cpu.of(config, self.features)
        return [(config, False), *([(drafter.of(config), True)] if self.drafts else [])]


_CHECKPOINTS_SINCE = Version("0.33.dev0")
"""vLLM 0.33.0 aligns the blocks of a hybrid to checkpoints of its states' kernels, and 0.32.0 and
those before do not: seen in the source of both."""


def _checkpoints(record: Record) -> bool:
    """`Blocks.checkpoints` of the record's engine; one without a version counts as new."""
    try:
        return Version(record.engine) >= _CHECKPOINTS_SINCE
    except InvalidVersion:
        return True


def _longest(record: Record) -> int:
    """Tokens of the longest sequence; 0 where it was not seen."""
    return 0 if record.capacity is None else record.capacity.max_model_len


def _kv(record: Record, draft: bool) -> list[KVCache]:
    return [cache for cache in record.kv if cache.draft == draft]


def _other_blocks(record: Record) -> list[str]:
    """One line where a block size was asked for and no layer has it. Not beside a state, which asks
    for a block that holds it: there the family says how large."""
    seen = sorted({cache.block_size for cache in record.kv})
    states = any(cache.compress_ratio == NO_TOKENS for cache in record.kv)
    if record.block_size in seen or states or not seen:
        return []
    blocks = ", ".join(map(str, seen))
    return [f"block size {record.block_size} was asked for, yet blocks have {blocks} tokens"]
