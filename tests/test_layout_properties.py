"""What holds of every layout, whatever the geometry: over all families of the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.layout import _FAMILIES, Page, compare, expected_pages
from harness.layouts import deepseek_v41
from harness.layouts.formats import PACKED
from harness.layouts.page import ELEMENT_BYTES, Capability
from harness.record import KVCache, Resolved
from tests import geometry
from tests.geometry import CAPABILITIES, SIZES, deepened, formats, geometries, possible

every_family = pytest.mark.parametrize(
    "family", [kind for kind in _FAMILIES if kind not in geometry.WITHOUT_PAGES]
)
any_device = st.sampled_from(CAPABILITIES)
blocks = st.sampled_from([16, 32, 48, 64, 128, 256, 1024])
few = settings(max_examples=25, deadline=None)

Config = dict[str, Any]


def of(page: Page) -> tuple[str, int, str | None]:
    return page.role, page.compress_ratio, page.kind


def state(page: Page) -> bool:
    """A state of fixed size, whatever the block is."""
    return page.compress_ratio < 1


def layouts(config: Config, capability: Capability | None) -> list[tuple[str, str, str]]:
    assume(possible(config))
    found = formats(config["model_type"], capability)
    # The plain caches of DeepSeek-V4 on a CPU, for one, are not written down.
    assume(found)
    return found


def pick(data: st.DataObject, family: str) -> tuple[Config, Capability | None, str]:
    config, capability = data.draw(geometries(family)), data.draw(any_device)
    return config, capability, data.draw(st.sampled_from(layouts(config, capability)))[2]


@every_family
def test_every_family_has_sizes_that_are_varied(family: str) -> None:
    assert 2 <= len(SIZES[family])


@pytest.mark.parametrize("family", geometry.WITHOUT_PAGES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_model_without_a_kv_cache_has_no_page_and_may_have_none(
    family: str, capability: Capability | None
) -> None:
    config = geometry.templates()[family]
    assert {()} == {
        expected_pages(config, kind, capability) for _, _, kind in formats(family, capability)
    }
    other = seen(expected_pages(geometry.templates()["llama"], "fp8", capability)[0])
    [line] = compare(config, [other], Resolved("auto", "bfloat16"), capability)
    assert "of a kind that the model does not have" in line


@every_family
@few
@given(data=st.data())
def test_a_block_is_a_whole_number_of_equal_states(family: str, data: st.DataObject) -> None:
    config, capability, layout = pick(data, family)
    for page in expected_pages(config, layout, capability, data.draw(blocks)):
        states, rest = (1, 0) if state(page) else divmod(page.block_size, page.compress_ratio)
        assert (0, 0) == (rest, page.content_bytes % states)
        if page.tail is not None:
            # A row for a state, or with TurboQuant's slots for each of its heads.
            row = page.tail * ELEMENT_BYTES[page.storage]
            packed = layout.rpartition("+")[2] in PACKED
            heads = page.content_bytes // (states * row) if packed else 1
            assert page.content_bytes == states * heads * row
        for tokens in page.kernel_blocks:
            assert 0 == page.block_size % tokens
            assert 0 == page.content_bytes * tokens % page.block_size


@every_family
@few
@given(data=st.data())
def test_padding_is_for_the_alignment_or_for_sharing(family: str, data: st.DataObject) -> None:
    """Only the formats of DeepSeek-V4 align a page (576 B packed, 512 B plain); a hybrid's state is
    padded up to the page of its attention layers, so that one pool serves both."""
    config, capability, layout = pick(data, family)
    pages = expected_pages(config, layout, capability, data.draw(blocks))
    whole = {page.page_size_bytes for page in pages if not state(page)}
    for page in pages:
        assert page.content_bytes <= page.page_size_bytes
        if family.startswith("deepseek_v4"):
            align = 576 if layout == "packed" else 512
            # The ring of a compressor lies in no page that another cache has, too.
            align = 1 if page.kind == deepseek_v41.RING_KIND else align
            assert page.page_size_bytes == -(-page.content_bytes // align) * align
        elif state(page):
            assert {page.page_size_bytes} == (whole or {page.content_bytes})
        else:
            assert page.content_bytes == page.page_size_bytes


@every_family
@few
@given(data=st.data(), times=st.integers(2, 6))
def test_a_block_is_linear_in_its_tokens(family: str, data: st.DataObject, times: int) -> None:
    """Where the model leaves the block to its caller; else the block changes nothing at all."""
    config, capability, layout = pick(data, family)
    block = data.draw(blocks)
    once = expected_pages(config, layout, capability, block)
    many = expected_pages(config, layout, capability, block * times)
    if once == many:
        return
    for one, more in zip(once, many, strict=True):
        assert (block, block * times) == (one.block_size, more.block_size)
        grow = 1 if state(one) else times
        assert one.content_bytes * grow == more.content_bytes
        assert (of(one), one.layers, one.tail) == (of(more), more.layers, more.tail)


# Narrower first: each at most as many bytes a token as the next.
ORDERED = [
    *(("nvfp4", "fp8"), ("int4_per_token_head", "int8_per_token_head")),
    *(("fp8", "bfloat16"), ("fp8_e5m2", "bfloat16"), ("float16", "float32")),
    *(("fp8", "fp8_per_token_head"), ("int8_per_token_head", "float16")),
    *(("nvfp4_ds_mla", "fp8_ds_mla"), ("fp8_ds_mla", "bfloat16")),
    *(("plain_fp8", "packed"), ("packed", "plain_bf16")),
]
EXACT = {("fp8", "bfloat16"): 2, ("fp8_e5m2", "bfloat16"): 2, ("float16", "float32"): 2}


@every_family
@few
@given(data=st.data())
def test_a_wider_element_never_makes_a_token_cheaper(family: str, data: st.DataObject) -> None:
    config, capability = data.draw(geometries(family)), data.draw(any_device)
    have = {kind for _, _, kind in layouts(config, capability)}
    for pair in ORDERED:
        if not have >= set(pair):
            continue
        slim, wide = (expected_pages(config, kind, capability) for kind in pair)
        for one, two in zip(slim, wide, strict=True):
            assert of(one) == of(two)
            if state(one):
                assert one.content_bytes == two.content_bytes
                continue
            narrow, broad = (page.content_bytes / page.block_size for page in (one, two))
            assert narrow <= broad
            # An indexer's key has a format of its own, whatever the main cache stores.
            if pair in EXACT and "indexer" not in one.role:
                assert narrow * EXACT[pair] == broad


@every_family
@few
@given(data=st.data(), times=st.integers(2, 4))
def test_depth_changes_nothing_but_the_counts(family: str, data: st.DataObject, times: int) -> None:
    config, capability, layout = pick(data, family)
    block = data.draw(blocks)
    once = expected_pages(config, layout, capability, block)
    deep = expected_pages(deepened(config, times), layout, capability, block)

    def uncounted(pages: Sequence[Page]) -> list[Page]:
        return sorted((replace(page, layers=0) for page in pages), key=of)

    assert uncounted(once) == uncounted(deep)
    assert sum(page.layers for page in once) * times == sum(page.layers for page in deep)


@every_family
@few
@given(data=st.data())
def test_twice_the_kv_heads_are_twice_the_bytes_of_a_token(
    family: str, data: st.DataObject
) -> None:
    config, capability, layout = pick(data, family)
    if ("num_key_value_heads",) not in SIZES[family]:
        return
    twice = config | {"num_key_value_heads": 2 * config["num_key_value_heads"]}
    one, two = (expected_pages(each, layout, capability, 64) for each in (config, twice))
    for few_, many in zip(one, two, strict=True):
        if not state(few_):
            assert 2 * few_.content_bytes * many.block_size == many.content_bytes * few_.block_size


def seen(page: Page) -> KVCache:
    """The cache that a page asks for, as a child would tell it."""
    element = ELEMENT_BYTES[page.storage]
    row, handed = page.tail or 1, max(page.kernel_blocks, default=page.block_size)
    return KVCache(
        kind=page.kind or "Spec",
        role=page.role,
        layers=page.layers,
        block_size=page.block_size,
        page_size_bytes=page.page_size_bytes,
        content_bytes=page.content_bytes,
        dtype=page.storage,
        compress_ratio=page.compress_ratio,
        shape=(-1, page.content_bytes * handed // page.block_size // (row * element), row),
        tensor_dtype=page.storage,
        window=page.window,
    )


WRONG: Mapping[str, Any] = {
    "content_bytes": lambda kv: kv.content_bytes + 1,
    "page_size_bytes": lambda kv: kv.page_size_bytes - 1,
    "layers": lambda kv: kv.layers + 1,
    "role": lambda kv: f"{kv.role}.other",
    "tensor_dtype": lambda _: "float64",
    "window": lambda kv: (kv.window or 0) + 1,
    "shape": lambda kv: (*kv.shape[:-1], kv.shape[-1] + 1),
}


@every_family
@few
@given(data=st.data(), field=st.sampled_from(sorted(WRONG)))
def test_one_number_off_in_any_geometry_is_told(
    family: str, data: st.DataObject, field: str
) -> None:
    config, capability = data.draw(geometries(family)), data.draw(any_device)
    name, storage, layout = data.draw(st.sampled_from(layouts(config, capability)))
    resolved = Resolved(name, storage)
    kv = [seen(page) for page in expected_pages(config, layout, capability, data.draw(blocks))]
    assert [] == compare(config, kv, resolved, capability)
    at = data.draw(st.integers(0, len(kv) - 1))
    kv[at] = replace(kv[at], **{field: WRONG[field](kv[at])})
    assert [] != compare(config, kv, resolved, capability)


def test_a_model_type_without_a_geometry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_FAMILIES, "new_model", _FAMILIES["llama"])
    with pytest.raises(KeyError, match="new_model"):
        geometry.templates()
