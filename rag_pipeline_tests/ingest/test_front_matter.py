"""Typed, bounded front matter."""

import time

import pytest

from rag_pipeline.ingest.front_matter import FrontMatter, read_front_matter


def test_all_fields_of_yaml() -> None:
    text = (
        "---\ntitle: Disk full\ndomain: storage\nkeywords: [disk, etcd]\ntags: disk, 磁盘\naliases:\n- df\n- /old/url\n"
        "alerts: NodeDiskFull\nservice: etcd\nseverity: 1\nowner: sre\nlanguage: ZH\nupdated: 2026-01-31\n"
        "other: {a: b}\n---\nbody\n"
    )
    assert read_front_matter(text) == FrontMatter(
        body_start=text.index("body"),
        title="Disk full",
        category="storage",
        keywords=("disk", "etcd", "磁盘", "df"),
        alerts=("NodeDiskFull",),
        service="etcd",
        severity="1",
        owner="sre",
        language="zh",
        updated="2026-01-31",
    )


def test_all_kinds_of_toml() -> None:
    text = '+++\ntitle = "T"\ntags = ["a", "b"]\nseverity = 2\nupdated = 2026-01-31\nowner = true\n+++\nbody'
    found = read_front_matter(text)
    assert (found.title, found.keywords, found.severity, found.updated, found.owner) == (
        "T",
        ("a", "b"),
        "2",
        "2026-01-31",
        "true",
    )
    assert text[found.body_start :] == "body"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "text\n---\na: b\n---\n",
        "---\na: b\n",
        "---\n\nProse between rules.\n\n---\n",
        " ---\na: b\n---\n",
        "---",
    ],
)
def test_none(text: str) -> None:
    assert read_front_matter(text) == FrontMatter()


@pytest.mark.parametrize(
    ("text", "line", "kind"),
    [
        ("---\ntitle: ok\ntags: [a\n---\nbody", 4, "YAML"),
        ("---\ntitle: a\n\tb: c\n---\nbody", 3, "YAML"),
        ("---\na: !!python/object:x [\n---\nbody", 3, "YAML"),
        ("+++\na = 1\nb = \n+++\nbody", 3, "TOML"),
        ("---\na: *nowhere\n---\nbody", 2, "YAML"),
        ("---\na: " + "[" * 5000 + "\n---\nbody", 1, "YAML"),
    ],
)
def test_broken_front_matter_is_left_out_and_reported(text: str, line: int, kind: str) -> None:
    found = read_front_matter(text)
    assert text[found.body_start :] == "body"
    assert kind in found.fault
    assert found.fault_line == line


def test_bombs_stay_small() -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 30))
    merges = "".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}\n" for n in range(1, 20))
    text = f"---\nl0: &l0 [x]\n{levels}m0: &m0 {{a: b}}\n{merges}tags: *l29\ntitle: *l0\n---\nbody"
    started = time.process_time()
    found = read_front_matter(text)
    assert time.process_time() - started < 5
    assert (found.title, found.keywords, found.fault) == ("x", (), "")


def test_values_are_limited() -> None:
    many = ", ".join(f"k{number}" for number in range(500))
    found = read_front_matter(
        f'---\ntitle: |\n  two\n  lines {"x" * 400}\ntags: [{many}]\nalerts: "a\\0\\ud800"\n---\n'
    )
    assert len(found.keywords) == 64
    assert found.title.startswith("two lines x")
    assert len(found.title) == 200
    assert found.alerts == ("a\ufffd?",)
    assert read_front_matter(f"---\na: {'x' * 70_000}\n---\nbody").fault.startswith("The front matter is longer")


def test_a_field_that_is_cut_is_reported_with_its_line_and_stays_whole_characters() -> None:
    text = f"---\nowner: sre\nDomain: {'🔥' * 150}\ntags:\n- ok\n- {'k' * 201}\n---\nbody"
    found = read_front_matter(text)
    assert found.category == "🔥" * 128
    assert len(found.category.encode()) == 512
    assert found.keywords == ("ok", "k" * 200)
    assert [line for line, _ in found.cuts] == [3, 4]
    assert "`domain`" in found.cuts[0][1]
    assert "512 bytes" in found.cuts[0][1]
    assert "shorten it" in found.cuts[0][1]
    assert read_front_matter('+++\na = 1\ncategory = "' + "x" * 201 + '"\n+++\n').cuts[0][0] == 3
    assert read_front_matter(f"---\ncategory: {'x' * 200}\n---\n").cuts == ()


def test_no_field_is_over_its_bytes() -> None:
    names = ("title", "category", "service", "severity", "owner", "language", "updated", "keywords", "alerts")
    found = read_front_matter("---\n" + "".join(f"{name}: {'𠀀' * 300}\n" for name in names) + "---\n")
    assert len(found.category.encode()) <= 512
    for value in (found.title, found.service, found.severity, found.owner, found.language, found.updated,
                  *found.keywords, *found.alerts):  # fmt: skip
        assert 0 < len(value.encode()) <= 1000
    assert [line for line, _ in found.cuts] == [2, 3, 9, 10, 4, 5, 6, 7, 8]
