"""Generated Markdown loses no word, keeps every limit, and the judge of it can say no."""

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_pipeline.ingest.chunking import chunk_document
from rag_pipeline.ingest.documents import parse_document
from rag_pipeline.records import ChunkBudget
from rag_pipeline_tests.ingest.counting import OddCounter, WordCounter, check_invariants, chunks_of, document
from rag_pipeline_tests.ingest.visible import lost_words, uncovered

_WORDS = """
disk etcd latency 磁盘 延迟高。 请重启！ node.js C# snake_case 2.0 end. Stop! why? e\u0301te\u0301 ด้ว 🔥 \u2028 \x0b
**bold** _em_ `co de` `a|b` ~~old~~ \\* \\_x a\\|b &amp; &nbsp; x&#60;y [link](http://x/y) [ref][a] [^1]
![alt](i.png) [![badge](b.svg)](u) <http://auto.link> <b>bold</b> <namespace> <Resolved_Ts> <br/> <Tabs> </Tabs>
{{<_note_>}} {{<tip>}} <!--hidden--> * _ [ ] ] ( ` ! # |
"""
WORDS = [re.sub("(?<=<)_|_(?=>)|(?<=d)_(?=T)", " ", word) for word in re.split("[ \n]+", _WORDS.strip())]
OTHER = [
    "---",
    "[a]: http://x/y 'title'",
    "[^1]: foot note",
    "<!-- a\n\n# no\n\n-->",
    "    indented code",
    "#",
    "***",
    "<div>",
    "{{< note >}}\n\n{{< /note >}}",
]


def line(draw: Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))


def lines(draw: Random, most: int = 4) -> str:
    return "\n".join(line(draw) for _ in range(draw.randint(1, most)))


def heading(draw: Random) -> str:
    return "#" * draw.randint(1, 6) + f" {line(draw)}" + draw.choice(["", " ##", " {#anchor}", "\n"])


def setext(draw: Random) -> str:
    return f"{lines(draw)}\n{draw.choice(['===', '---'])}"


def fence(draw: Random) -> str:
    mark = draw.choice(["```", "~~~~"])
    return f"{mark}{draw.choice(['', 'yaml', 'sh title'])}\n{lines(draw, 8)}\n" + draw.choice([mark, mark, mark, ""])


def table(draw: Random) -> str:
    rows = [f"| {line(draw)} | {line(draw)} |" for _ in range(draw.randint(0, 8))]
    return "\n".join(["| a | b |", "| :-- | ---: |", *rows])


def html(draw: Random) -> str:
    tag = draw.choice(["div", "details", "pre", "table", "script", "Card"])
    return f"<{tag}>{lines(draw)}</{tag}>\n{line(draw)}"


def other(draw: Random) -> str:
    return draw.choice(OTHER)


def quote(draw: Random) -> str:
    return "> " + nested(draw).replace("\n", "\n> ")


def items(draw: Random) -> str:
    gap = draw.choice(["\n", "\n\n"])
    marks = [f"{number}. " for number in range(1, 5)] if draw.random() < 0.5 else ["- "] * 4
    return gap.join(
        mark + nested(draw).replace("\n", "\n" + " " * len(mark)) for mark in marks[: draw.randint(1, len(marks))]
    )


def nested(draw: Random) -> str:
    kinds = [lines, lines, heading, fence, table, html, other, quote, items]
    return "\n\n".join(draw.choice(kinds)(draw) for _ in range(draw.choice([1, 1, 1, 2])))


KINDS = st.sampled_from([lines, heading, setext, fence, table, html, other, quote, items])
# Hypothesis chooses the blocks and shrinks them away; each block's text comes from its own seed, which is quick.
BLOCK = st.builds(lambda kind, seed: kind(Random(seed)), KINDS, st.integers(0, 2**32))
MARKDOWN = st.builds(
    lambda front, blocks, gap, newline: (front + gap.join(blocks)).replace("\n", newline),
    st.sampled_from(["", "", "---\ntitle: T\n---\n", "+++\n+++\n", "---\na: [\n---\n"]),
    st.lists(BLOCK, max_size=8),
    st.sampled_from(["\n\n", "\n\n", "\n"]),
    st.sampled_from(["\n", "\n", "\r\n"]),
)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=2000, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(MARKDOWN, st.sampled_from([(16, 24), (30, 60), (300, 480)]), st.booleans())
def test_generated_markdown_is_lossless(text: str, budget: tuple[int, int], odd: bool) -> None:
    soft, hard = budget
    parsed, _ = parse_document("folder/file.md", text.encode())
    assert parsed is not None
    tokens = OddCounter() if odd else WordCounter()
    chunks = chunk_document(parsed, tokens=tokens, budget=ChunkBudget(soft_tokens=soft, hard_tokens=hard))
    check_invariants(parsed, chunks, tokens=tokens, hard=hard)


@settings(max_examples=1000, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(st.text(alphabet="#*_`~-=|<>[]()!&;\\{}%:.+1a 文\n\t\u0301", max_size=200))
def test_any_characters_are_taken(text: str) -> None:
    parsed, _ = parse_document("folder/file.md", text.encode())
    assert parsed is not None
    chunks = chunks_of(parsed, soft=20, hard=30)
    check_invariants(parsed, chunks, tokens=WordCounter(), hard=30)


def test_the_judge_misses_a_word() -> None:
    parsed = document("# A\n\none two three\n\n## B\n\nfour\n")
    chunks = chunks_of(parsed)
    assert lost_words(parsed, chunks) == []
    cut = [replace(chunks[0], content="# A\n\none three"), *chunks[1:]]
    assert lost_words(parsed, cut) == ["two"]
    assert lost_words(parsed, chunks[:1]) == ["B", "four"]
    assert uncovered(parsed, chunks[:1]) == "## B\n\nfour"


@pytest.mark.parametrize("hidden", ["<!-- gone -->", "<script>gone()</script>", "[gone]: http://gone.example 'gone'"])
def test_what_is_hidden_is_in_no_content(hidden: str) -> None:
    (chunk,) = chunks_of(f"# A\n\n{hidden}\n\nhere\n")
    assert "gone" not in chunk.content
    assert re.sub(r"\s+", " ", chunk.content) == "# A here"
