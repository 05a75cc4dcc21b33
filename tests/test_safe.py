from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import safe


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (r"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        (r"a\x00b", "a\0b"),
        (r"progress\rdone", "progress\rdone"),
        (r"csi\x9bK", "csi\x9bK"),
        (r"exe\u202egpj", "exe\u202egpj"),
        (r"a\u2028b", "a\u2028b"),
        (r"tag\U000e0041", "tag\U000e0041"),
        (r"lone\udc80", "lone\udc80"),
        (r"a\nb\tc", "a\nb\tc"),
        ("Größe 段 ✓", "Größe 段 ✓"),
    ],
)
def test_what_would_act_on_the_terminal_is_shown_as_its_escape(shown: str, text: str) -> None:
    assert shown == safe.printable(text)


def test_newlines_stay_only_where_asked() -> None:
    assert "a\nb\\r\nc" == safe.printable("a\nb\r\nc", lines=True)


@given(st.text())
def test_printable_text_can_be_written_and_is_one_line(text: str) -> None:
    shown = safe.printable(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
    shown.encode()


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "buildkite_agent_access_token",
        "CLIENT_SECRET",
        "PGPASSWORD",
        "MYSQL_PASSWD",
        "OPENAI_API_KEY",
        "AWS_ACCESS_KEY_ID",
        "SSH_PRIVATE_KEY",
        "REGISTRY_CREDENTIALS",
    ],
)
def test_the_value_of_a_secret_variable_is_masked(name: str) -> None:
    assert "login with *** failed" == safe.mask("login with s3cr.t+x failed", {name: "s3cr.t+x"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOME", "allocate"),
        ("MY_TOKEN", "alloc"),
        ("TOKENIZER_MODE", "allocate"),
    ],
)
def test_other_and_short_values_stay(name: str, value: str) -> None:
    assert "failed in allocate" == safe.mask("failed in allocate", {name: value})


def test_a_count_of_tokens_is_not_a_secret() -> None:
    environ = {"VLLM_MAX_TOKENS_PER_EXPERT_FUSED_MOE": "163840"}
    assert "163840 bytes" == safe.mask("163840 bytes", environ)


def test_a_secret_that_begins_with_another_is_masked_whole() -> None:
    environ = {"A_TOKEN": "prefix", "B_TOKEN": "prefix-and-more"}
    assert "*** ***" == safe.mask("prefix-and-more prefix", environ)


def test_each_line_of_a_key_is_masked() -> None:
    environ = {"DEPLOY_PRIVATE_KEY": "first-line\nsecond-line\n"}
    assert "got *** here" == safe.mask("got second-line here", environ)


def test_a_secret_in_a_url_is_masked_in_its_quoted_form() -> None:
    assert "?key=***" == safe.mask("?key=pass%2Fword", {"MY_SECRET": "pass/word"})


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ("token *** used", "token hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh used"),
        ("***", "hf_abc123def456"),
        ("x=***", "x=bkua_0123456789abcdef0123456789abcdef01234567"),
        ("***,", "bkct_AbCdEf0123456789,"),
        ("***", "ghp_0123456789abcdefghijABCDEFGHIJ012345"),
        ("Authorization: Bearer ***", "Authorization: Bearer abc.def-ghi="),
        ("authorization: basic ***", "authorization: basic dXNlcjpwYXNz"),
        ("https://***@host.example/x", "https://me:pa@ss:w0rd@host.example/x"),
        ("redis://***@host", "redis://:password@host"),
    ],
)
def test_what_looks_like_a_token_is_masked_without_any_variable(shown: str, text: str) -> None:
    assert shown == safe.mask(text, {})


@pytest.mark.parametrize(
    "text",
    [
        "unknown option hf_overrides, hf_text_config or hf_transfer",
        "git+ssh://git@host.example/x",
        "http://localhost:8000/v1 as me@host.example",
        "fp8_ds_mla layout only supports fp8 kv-cache, got auto",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert text == safe.mask(text, {})


def test_short_text_is_not_clipped() -> None:
    assert "x" * 50 == safe.clip("x" * 50, 50)


def test_clipped_text_says_how_much_is_missing() -> None:
    text = "a" * 500 + "b" * 500
    shown = safe.clip(text, 100)
    head, _, rest = shown.partition(" ... [")
    count, _, tail = rest.partition(" characters left out] ... ")
    assert (set("a"), set("b")) == (set(head), set(tail))
    assert 1000 == len(head) + int(count) + len(tail)


@given(st.text(max_size=300), st.integers(0, 200))
def test_clipped_text_keeps_to_its_limit(text: str, limit: int) -> None:
    assert max(limit, 0) >= len(safe.clip(text, limit)) or len(text) <= limit


def test_wide_and_combining_characters_are_measured_in_columns() -> None:
    assert (5, 4, 1) == (safe.columns("plain"), safe.columns("段错"), safe.columns("e\u0301"))


def test_a_long_word_is_broken_where_a_reader_would() -> None:
    assert ["turboquant_", "4bit_nc"] == safe.fold("turboquant_4bit_nc", 11)
    assert ["aaaa", "aa"] == safe.fold("aaaaaa", 4)


def test_a_word_as_wide_as_the_first_line_is_not_broken_for_the_hanging_indent() -> None:
    assert ["FLASHINFER_MLA"] == safe.wrap("FLASHINFER_MLA", 14, hanging="  ")


@given(st.text("ab_段 ", max_size=120), st.integers(8, 40))
def test_wrapped_text_fits_and_loses_nothing(text: str, width: int) -> None:
    lines = safe.wrap(text, width, "  ", "    ")
    assert width >= max(map(safe.columns, lines))
    assert text.replace(" ", "") == "".join(lines).replace(" ", "")
