"""Which terms a query has, technical or not, in either language, and where they stand in a text."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_pipeline.retrieval.lexical import MAX_TERMS, Terms, is_chinese, standing, terms_of


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        ("why are keys evicted", (), ("keys", "evict")),
        ("How do services keep running queries", (), ("servic", "runn", "quer")),
        ("evictions evicted evicts", (), ("evict",)),
        # Identifiers of all kinds, in parts.
        ("the KubePodCrashLooping alert", ("kube", "pod", "crash", "loop"), ("alert",)),
        ("HTTPServer is slow", ("http", "server"), ("slow",)),
        ("raise max_connections", ("max", "connect"), ("rais",)),
        ("p99 of web", ("p99",), ("web",)),
        ("high CPU", ("cpu",), ("high",)),
        # A capital inside a sentence is a name, one that begins it is not.
        ("is Kafka slow", ("kafka",), ("slow",)),
        ("Kafka slow. Disk full? Node: Lost", (), ("kafka", "slow", "disk", "full", "node", "lost")),
        ("kafka slow, then Kafka hangs", ("kafka",), ("slow", "hang")),
        ("is Kafka slow as kafka hangs", ("kafka",), ("slow", "hang")),
        # A hyphen or dot alone makes no name.
        ("redis-cli hangs", (), ("redi", "cli", "hang")),
        ("spring.datasource.url", (), ("spring", "datasourc", "url")),
        # Numbers of three to five digits are names, unless they are part of a time, an address, a share or a date.
        ("exit code 137 and error 1040", ("137", "1040"), ("exit", "code", "error")),
        ("ORA-01555 again", ("ora", "01555"), ()),
        ("at 10.20.300.4:8080, 300%, 2026-03-01, 123456, 42, v100.5", ("v100",), ()),
        # Instances, stop words, single letters and short numbers say nothing.
        ("api-7f9c4b8d6-x2x9z", (), ()),
        ("shop/checkout-7d9f5c6b8-x2lqk on worker-3 of prod-eu-1", (), ()),
        ("shop/checkout on worker", (), ("shop", "checkout", "worker")),
        ("what should we do with it", (), ()),
        ("x 13 a", (), ()),
        ("", (), ()),
        ("🔥 ???", (), ()),
    ],
)
def test_terms_of_latin_queries(text: str, names: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert terms_of(text) == Terms(names=names, words=words, bigrams=(), chinese=False)


@pytest.mark.parametrize(
    ("text", "names", "bigrams"),
    [
        ("磁盘写满了怎么办", (), ("磁盘", "盘写", "写满")),
        ("为什么 pod 一直 restart", ("pod", "restart"), ()),
        ("max_connections打满怎么办", ("max", "connect"), ("打满",)),
        ("磁盘,磁盘", (), ("磁盘",)),
        ("请问如何处理内存", (), ("处理", "理内", "内存")),
        ("盘", (), ()),
    ],
)
def test_terms_of_chinese_queries(text: str, names: tuple[str, ...], bigrams: tuple[str, ...]) -> None:
    assert terms_of(text) == Terms(names=names, words=(), bigrams=bigrams, chinese=True)


@pytest.mark.parametrize(
    ("text", "chinese"),
    [
        ("内存", True),
        ("KubePodCrash 告警处理", True),
        ("内abcde", True),
        ("内abcdef", False),
        ("How does 内存 relate to the heap of a process", False),
        ("", False),
        ("137 !!", False),
        ("メモリ", False),
    ],
)
def test_a_sixth_of_the_letters_makes_a_text_chinese(text: str, chinese: bool) -> None:
    assert is_chinese(text) is chinese


def test_long_queries_give_their_first_terms() -> None:
    words = [f"w{chr(97 + at // 26)}{chr(97 + at % 26)}or" for at in range(MAX_TERMS + 5)]
    assert terms_of(" ".join(words)).words == tuple(words[:MAX_TERMS])
    run = "".join(chr(0x4E10 + at) for at in range(MAX_TERMS + 5))
    assert terms_of(run).bigrams == tuple(run[at : at + 2] for at in range(MAX_TERMS))


@pytest.mark.parametrize(
    ("term", "text", "stands"),
    [
        ("evict", "Evictions begin", True),
        ("evict", "maxEvictions", True),
        ("evict", "evicted_keys_total", True),
        ("evict", "reevict", False),
        ("loop", "KubePodCrashLooping", True),
        ("loop", "kubepodcrashlooping", False),
        # Short ones are whole words, their plural aside.
        ("pod", "the pod.", True),
        ("pod", "Pods", True),
        ("pod", "podcast", False),
        ("pod", "podsx", False),
        ("pod", "podcast of a pod", True),
        ("pod", "PodName", True),
        ("pod", "kube_pod_name", True),
        ("pod", "内pod存", True),
        ("cpu", "CPUs", True),
        ("p99", "p999", False),
        ("磁盘", "节点磁盘写满", True),
        ("盘写", "磁盘 写满", False),
        ("evict", "", False),
        # Capitals that grow when lowered move nothing.
        ("max", "İİ max", True),
        ("pod", "İpod", True),
        ("pod", "İİİxpod", False),
        ("pod", "İxpOd", False),
    ],
)
def test_a_stem_stands_where_a_word_begins_with_it(term: str, text: str, stands: bool) -> None:
    assert standing([term], text) == ({term} if stands else set())


def test_only_what_stands_is_given() -> None:
    assert standing(("pod", "evict", "磁盘"), "磁盘 evicts") == {"evict", "磁盘"}
    assert standing((), "pod") == frozenset()


@given(
    st.lists(
        st.sampled_from(["Redis", "max_connections", "KubePodLost", "evicted", "keys", "pods", "磁盘写满", "内存"])
    )
)
def test_a_query_stands_in_itself(parts: Sequence[str]) -> None:
    text = " ".join(parts)
    terms = terms_of(text)
    asked = (*terms.names, *terms.words, *terms.bigrams)
    assert standing(asked, text) == set(asked)
    assert len(asked) == len(set(asked))


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_text_is_taken(query: str, text: str) -> None:
    terms = terms_of(query)
    assert not set(terms.names) & set(terms.words)
    assert standing((*terms.names, *terms.words, *terms.bigrams), text) <= {*terms.names, *terms.words, *terms.bigrams}
