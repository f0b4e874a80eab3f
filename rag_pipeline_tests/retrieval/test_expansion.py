"""Which neighbours join a hit: those that complete a step list or a code block of the same section, no others."""

import pytest

from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.expansion import continues, with_neighbours


def chain(*contents: str, sections: str = "") -> list[Candidate]:
    """Chunks that follow each other; ``sections`` has a letter for each, all ``a`` when left out."""
    named = sections or "a" * len(contents)
    return [
        Candidate(
            id=f"c{n}",
            content=content,
            category="",
            score=0.1,
            raw_score=0.1,
            score_label="l2_distance",
            metadata={
                "section": named[n],
                "section_part": named[: n + 1].count(named[n]),
                "section_parts": named.count(named[n]),
                "prev_id": f"c{n - 1}" if n else "",
                "next_id": f"c{n + 1}" if n + 1 < len(contents) else "",
            },
        )
        for n, content in enumerate(contents)
    ]


def grown(chunks: list[Candidate], hit: int, *, most: int = 4) -> tuple[list[str], list[str], list[str]]:
    """Ids of the block, of what was added, and of what was asked for."""
    asked: list[str] = []

    def fetch(ids: list[str]) -> dict[str, Candidate]:
        asked.extend(ids)
        return {chunk.id: chunk for chunk in chunks if chunk.id in ids}

    found, added = with_neighbours([chunks[hit]], most=most, fetch=fetch)
    return [chunk.id for chunk in found], sorted(added), asked


@pytest.mark.parametrize(
    ("before", "after", "goes_on"),
    [
        ("## Steps\n\n1. Stop writes.\n2. Flush.", "3. Restart.\n4. Verify.", True),
        ("- one\n- two", "- three", True),
        ("1. one\n\n   ```sh\n   run\n   ```", "2. two", True),
        ("Do this:\n\n1. one", "Do this:\n\n2. two", True),
        ("```sh\nfirst\n```", "```sh\nsecond\n```", True),
        ("一、先止血\n\n1、停写。", "2、重启。", True),
        ("1. one\n2. two", "1. another list", False),
        ("1. one\n2. two", "A paragraph.", False),
        ("A paragraph.", "1. one", False),
        ("```sh\nfirst\n```", "```yaml\nother: 1\n```", False),
        ("Text.", "Text.", False),
        ("", "1. one", False),
    ],
)
def test_a_list_or_code_block_goes_on(before: str, after: str, goes_on: bool) -> None:
    assert continues(before, after) is goes_on


def test_the_rest_of_a_step_list_joins_in_both_directions() -> None:
    chunks = chain("1. one\n2. two", "3. three", "4. four\n5. five", "The end.")
    assert grown(chunks, 1) == (["c0", "c1", "c2"], ["c0", "c2"], ["c2", "c3", "c0"])


def test_no_more_than_allowed_joins() -> None:
    chunks = chain(*(f"{n}. step" for n in range(1, 8)))
    assert grown(chunks, 0, most=2)[0] == ["c0", "c1", "c2"]


def test_the_next_section_never_joins() -> None:
    chunks = chain("1. one\n2. two", "3. three", sections="ab")
    assert grown(chunks, 0) == (["c0"], [], [])


def test_nothing_is_fetched_where_nothing_was_cut() -> None:
    assert grown(chain("A paragraph.", "Another one.", "A third."), 1) == (["c1"], [], [])


def test_a_neighbour_that_is_gone_is_done_without() -> None:
    chunks = chain("1. one", "2. two")
    found, added = with_neighbours(chunks[:1], most=4, fetch=lambda ids: {})
    assert ([chunk.id for chunk in found], added) == (["c0"], ())
