"""systemd unit files are read by meaning, as systemd reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.unit import EnvironmentFile, parse_unit, quote_word, split_words

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def test_continuations_are_joined_and_comments_inside_them_skipped() -> None:
    """A continued ExecStart is one command, and a comment line in the middle does not end it."""
    unit = parse_unit("[Service]\nExecStart=/bin/server \\\n  --tp 8 \\\n# why eight\n; because\n  --port 30000\n")
    assert unit.commands({}) == (("/bin/server", "--tp", "8", "--port", "30000"),)


def test_a_backslash_before_a_space_continues_nothing() -> None:
    """Only a backslash that is the line's last character continues it, and two of them are one written backslash."""
    unit = parse_unit("[Service]\nUser=a\\\\\nGroup=b\\ \nNice=1\n")
    assert [s.key for s in unit.settings] == ["User", "Group", "Nice"]


def test_lines_that_systemd_ignores_are_ignored() -> None:
    """An assignment outside of a section and a line without an equals sign mean nothing."""
    unit = parse_unit("Nice=1\n[Service]\nnonsense\n Nice = 2 \n")
    assert unit.value("Service", "Nice") == "2"
    assert len(unit.settings) == 1


def test_an_empty_assignment_resets_a_list() -> None:
    """A drop-in that resets ExecStart and sets another leaves one command."""
    unit = parse_unit(
        "[Service]\nExecStart=/bin/old --tp 8\n",
        {"/etc/systemd/system/x.service.d/tp.conf": "[Service]\nExecStart=\nExecStart=/bin/new --tp 4\n"},
    )
    assert unit.commands({}) == (("/bin/new", "--tp", "4"),)


def test_drop_ins_apply_in_the_order_of_their_file_names() -> None:
    """The name alone orders drop-ins, whatever folder they are in."""
    drop_ins = {
        "/etc/systemd/system/x.service.d/20-b.conf": "[Service]\nEnvironment=A=late\n",
        "/run/systemd/system/x.service.d/10-a.conf": "[Service]\nEnvironment=A=early B=1\n",
    }
    assert parse_unit("[Service]\nEnvironment=A=unit\n", drop_ins).environment == {"A": "late", "B": "1"}


def test_environment_takes_several_quoted_assignments_on_one_line() -> None:
    """Quotes group one assignment, before the name or after the equals sign."""
    unit = parse_unit("[Service]\nEnvironment=\"A=one two\" B='three four' C=5 nonsense\n")
    assert unit.environment == {"A": "one two", "B": "three four", "C": "5"}


def test_an_unbalanced_quote_drops_the_rest() -> None:
    """From a quote that is never closed on, nothing is set."""
    assert parse_unit('[Service]\nEnvironment=A=1 "B=2\n').environment == {"A": "1"}


def test_environment_files_beat_environment_and_unset_beats_both() -> None:
    """The process gets a file's value over the unit's own, and nothing for a name that is unset."""
    unit = parse_unit(
        "[Service]\nEnvironment=A=unit B=unit C=unit\nEnvironmentFile=-/etc/one\nEnvironmentFile=/etc/two\n"
        "UnsetEnvironment=C\n",
    )
    assert unit.environment_files == (EnvironmentFile("/etc/one", True), EnvironmentFile("/etc/two", False))
    files = {"/etc/one": {"A": "one"}, "/etc/two": {"A": "two"}}
    assert unit.process_environment(files) == {"A": "two", "B": "unit"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-/bin/x a", ("/bin/x", "a")),
        ("@/bin/x shown a", ("/bin/x", "a")),
        ("!!/bin/x $A", ("/bin/x", "one", "two")),
        ("/bin/x ${A} $A end", ("/bin/x", "one two", "one", "two", "end")),
        ("/bin/x ${B} $B end", ("/bin/x", "${B}", "$B", "end")),
        (":/bin/x $A ${A}", ("/bin/x", "$A", "${A}")),
        ("/bin/x $$A 100%%", ("/bin/x", "$A", "100%")),
        ("/bin/x --json '{\"a\": 1}'", ("/bin/x", "--json", '{"a": 1}')),
    ],
)
def test_exec_lines_lose_their_prefixes_and_get_their_variables(line: str, words: tuple[str, ...]) -> None:
    """The words are those that the process is started with."""
    assert parse_unit(f'[Service]\nEnvironment="A=one two"\nExecStart={line}\n').commands({}) == (words,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r"a\x20b c\sd", ("a b", "c d")),
        (r"\101 \u00e9 \U0001f600", ("A", "é", "\U0001f600")),
        (r"a\qb", (r"a\qb",)),
        ("'' a", ("", "a")),
    ],
)
def test_c_escapes_are_undone(text: str, words: tuple[str, ...]) -> None:
    """Known escapes are undone, an unknown one stays as written, empty quotes are an empty word."""
    assert split_words(text) == words


@given(st.lists(TEXT, min_size=1, max_size=5))
def test_quoted_words_read_back_as_written(words: list[str]) -> None:
    """What quote_word writes into ExecStart, the parser reads back as exactly the same words."""
    line = " ".join(quote_word(word, command=True) for word in ["/bin/x", *words])
    assert parse_unit(f"[Service]\nExecStart={line}\n").commands({}) == (("/bin/x", *words),)


@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), TEXT, max_size=4))
def test_quoted_environment_reads_back_as_written(environment: dict[str, str]) -> None:
    """What quote_word writes into Environment= is what the process gets."""
    lines = [f"Environment={quote_word(f'{name}={value}')}" for name, value in environment.items()]
    assert parse_unit("\n".join(["[Service]", *lines])).process_environment({}) == environment


@given(TEXT)
def test_reading_never_fails(text: str) -> None:
    """Any text is a unit, at worst one that means nothing."""
    unit = parse_unit("[Service]\nExecStart=" + text + "\nEnvironment=" + text)
    unit.commands({})
