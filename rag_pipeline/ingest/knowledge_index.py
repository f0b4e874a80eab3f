"""The L0 knowledge index: which words of a query point at which documents; hints only, never evidence.

One row says that ``term`` names the document ``source`` in the way of ``kind``:

- ``title``, ``keyword``, ``alert``, ``category``, ``service``: from the document's fields.
- ``heading``: each heading above one of its chunks, without its numbering ("3. ", "2.1 ", "Step 2: ", "二、"), without
  an anchor (``{#name}``) and punctuation at its end; the first `MAX_HEADINGS` of a document. A heading equal to the
  title is the title only, and one that stands in at least `COMMON_DOCUMENTS` documents and in more than
  `COMMON_SHARE` of them is left out: it is part of the house's template.
- ``entity``: an identifier in the text that is worth matching exactly, the `MAX_ENTITIES` most frequent of a document
  (ties by term):
  CamelCase (``KubePodNotReady``, ``terminationGracePeriodSeconds``), snake_case with the colons of recording rules
  (``max_connections``, ``job:http_errors:rate5m``), dotted names (``spring.datasource.url``) unless they look like a
  file or host name, error codes (``ORA-00060``, ``MY-010957``, ``SQL1224N``), signals and errno names (``SIGKILL``,
  ``ENOSPC``), and numbered codes (``exit code 137``, ``ERROR 1213``, ``退出码 137``). The text is the title, the
  headings and the chunks' content, without URLs and link targets.

``term`` is the text after `normalise`, ``surface`` as it was written (its most frequent spelling). Left out are terms
of one character, over `MAX_TERM_CHARS`, without any letter, and titles and headings that every runbook has
("Summary", "排查步骤": `GENERIC`).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pandas as pd

from rag_pipeline.ingest.terms import KNOWLEDGE_INDEX_VERSION, normalise, rows_from_json
from rag_pipeline.tables import KNOWLEDGE_INDEX_COLUMNS

# `KNOWLEDGE_INDEX_VERSION` in `terms` changes with the rules above.
MAX_ENTITIES = 50
MAX_HEADINGS = 200
MAX_TERM_CHARS = 120
COMMON_DOCUMENTS = 5
COMMON_SHARE = 0.05


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split("|"))


GENERIC = _words(
    # English
    "about|action items|actions|alert|alerts|appendix|background|before you begin|cause|causes|changelog|checklist|"
    "checks|common causes|conclusion|configuration|contents|context|contributing|description|details|detection|"
    "diagnosis|diagnostics|discussion|escalation|example|examples|faq|fix|follow up|follow-up|followup|full context|"
    "further reading|getting started|glossary|history|how to fix|impact|index|installation|introduction|investigation|"
    "lessons learned|limitations|links|meaning|metrics|mitigation|monitoring|more information|next steps|note|notes|"
    "objectives|overview|possible causes|postmortem|prerequisites|prevention|procedure|purpose|quick start|readme|"
    "recovery|reference|references|related|related documents|remediation|requirements|resolution|resources|rollback|"
    "root cause|root causes|runbook|scope|see also|severity|solution|solutions|step|steps|summary|symptom|symptoms|"
    "table of contents|threshold|thresholds|timeline|triage|troubleshooting|usage|verification|verify|warning|"
    "what happened|what is next|what's next|workaround|workarounds|"
    # Chinese
    "介绍|简介|概述|概览|概要|总览|背景|背景知识|说明|描述|定义|目的|目标|范围|适用范围|现象|症状|故障现象|问题现象|"
    "告警现象|问题描述|故障描述|告警|告警规则|告警说明|告警含义|含义|影响|影响范围|严重程度|阈值|指标|监控|原因|可能原因|"
    "可能的原因|常见原因|根因|根本原因|原因分析|根因分析|问题分析|分析|定位|诊断|排查|排查步骤|排查思路|排查流程|排查方法|"
    "故障排查|问题排查|快速排查|检查|检查项|检查清单|步骤|操作|操作步骤|处理|处理步骤|处理流程|处理方法|处理方案|处置|"
    "处置步骤|处置流程|应急|应急处理|应急处置|应急预案|止血|止损|缓解|缓解措施|临时措施|解决|解决方案|解决方法|解决办法|"
    "修复|修复方案|恢复|恢复步骤|回滚|验证|验证方法|验证恢复|预防|预防措施|长期措施|改进措施|后续|后续跟进|复盘|时间线|"
    "经验教训|总结|小结|结论|注意|注意事项|备注|附录|附|参考|参考资料|参考链接|参考文档|相关|相关文档|相关链接|相关资料|"
    "示例|例子|举例|常见问题|目录|前提|前提条件|先决条件|前置条件|准备|准备工作|准备开始|升级|上报|接下来|下一步|流程|"
    "使用方法|用法|配置|更多信息|变更记录|修订记录"
)

_DIGITS = "0-9一二三四五六七八九十"
_NUMBERING = re.compile(
    rf"^(?:(?:step|part|phase|步骤|阶段)\s*[{_DIGITS}]+|第\s*[{_DIGITS}]+\s*(?:步|章|节|部分|阶段)"
    rf"|[0-9]{{1,2}}(?:\.[0-9]{{1,2}}){{1,2}}(?=\s)|\(?[{_DIGITS}]{{1,3}}(?:\.[0-9]{{1,2}})*\s*[.)、:](?![0-9]))"
    r"[\s.:、)\-–—]*"
)
_ANCHOR = re.compile(r"\s*\{#[^{}]*\}$")
_ENDING = " \t.:;,?!…。、"

_LINKS = re.compile(r"(?:https?|ftp)://\S+|(?<=\])\([^()\[\]\s]{0,2000}\)")
_START, _END = r"(?<![A-Za-z0-9_])", r"(?![A-Za-z0-9_])"
_PATTERNS = tuple(
    re.compile(_START + body + _END, re.ASCII)
    for body in (
        # A capital after a small letter, or a word after an acronym: at least two parts, five characters.
        r"(?=[A-Za-z0-9]{5})[A-Za-z][A-Za-z0-9]*?(?:[a-z][A-Z]|[A-Z]{2}[a-z]{2})[A-Za-z0-9]*",
        r"[A-Za-z][A-Za-z0-9]*(?::[A-Za-z0-9]+)*(?:_[A-Za-z0-9]+)+(?::[A-Za-z_][A-Za-z0-9_]*)*",
        r"(?<![.\-/@])[A-Za-z][A-Za-z0-9_\-]+(?:\.[A-Za-z][A-Za-z0-9_\-]+)+",
        r"[A-Z][A-Z0-9]+(?:-\d+)*-\d{2,}",
        r"[A-Z]{1,5}\d{3,6}[A-Z]?",
        r"SIG[A-Z]{2,6}",
        r"E(?:ACCES|ADDRINUSE|ADDRNOTAVAIL|AGAIN|CONNABORTED|CONNREFUSED|CONNRESET|DQUOT|HOSTUNREACH|INTR|INVAL|IO"
        r"|MFILE|NETUNREACH|NFILE|NOBUFS|NOENT|NOMEM|NOSPC|NOTCONN|PERM|PIPE|ROFS|TIMEDOUT|XIST)",
        r"(?i:exit (?:code|status)|error code|errno) ?\d{1,5}",
        r"(?i:error|http) ?\d{3,5}",
        r"(?:退出码|错误码|状态码|返回码) ?\d{1,5}",
    )
)
# Dotted names that end so are files and hosts, which a query seldom means.
_FILES_AND_HOSTS = _words(
    "cn|com|dev|gz|htm|html|internal|io|jpg|js|json|local|log|md|mdx|net|org|png|py|sh|sql|svg|svc|tar|toml|ts|txt|xml|"
    "yaml|yml|zip"
)


def build_knowledge_index(documents: pd.DataFrame, chunks: pd.DataFrame) -> pd.DataFrame:
    """Collect the terms of all documents by the module's rules.

    Args:
        documents: The indexed documents, in any order.
        chunks: Their chunks, in any order; chunks of other sources are ignored.

    Returns:
        `KNOWLEDGE_INDEX_COLUMNS`, all text, one row for each term, kind and source, in this order; no rows for no
        documents.
    """
    ordered = chunks.sort_values(["source", "chunk_index"], kind="stable")
    headings: dict[str, list[str]] = {}
    contents: dict[str, list[str]] = {}
    for source, breadcrumb, content in zip(ordered["source"], ordered["breadcrumb"], ordered["content"], strict=True):
        headings.setdefault(source, []).extend(breadcrumb)
        contents.setdefault(source, []).append(content)

    titles = dict(zip(documents["source"], documents["title"], strict=True))
    headed = {source: _headings(headings.get(source, ()), title=title) for source, title in titles.items()}
    common = {
        term
        for term, count in Counter(term for terms in headed.values() for term, _ in terms).items()
        if count >= COMMON_DOCUMENTS and count > COMMON_SHARE * len(headed)
    }

    rows: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for document in documents.to_dict("records"):
        source, title, category = document["source"], document["title"], document["category"]
        named = [
            ("title", _unless_generic([title])),
            ("keyword", _plain(document["keywords"])),
            ("alert", _plain(document["alerts"])),
            ("heading", [found for found in headed[source] if found[0] not in common]),
            ("category", _plain([category])),
            ("service", _plain([document["service"]])),
            ("entity", _entities([title, *dict.fromkeys(headings.get(source, ())), *contents.get(source, ())])),
        ]
        for kind, terms in named:
            for term, surface in terms:
                rows.setdefault((term, kind, source), (term, surface, kind, source, title, category))
    return _table(rows[key] for key in sorted(rows))


def to_json(index: pd.DataFrame) -> bytes:
    """The published artefact, UTF-8: equal bytes for equal tables, whatever the order of their rows."""
    rows = sorted(index[list(KNOWLEDGE_INDEX_COLUMNS)].itertuples(index=False, name=None))
    found = {"version": KNOWLEDGE_INDEX_VERSION, "columns": list(KNOWLEDGE_INDEX_COLUMNS), "rows": rows}
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()


def from_json(data: bytes) -> pd.DataFrame:
    """The table that `to_json` wrote, ordered as `build_knowledge_index` gives it.

    Raises:
        StoreUnavailableError: Not such a file, or one of another version.
    """
    return _table(rows_from_json(data))


def _table(rows: Iterable[tuple[str, ...]]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(KNOWLEDGE_INDEX_COLUMNS), dtype="str")


def _usable(term: str) -> bool:
    return 1 < len(term) <= MAX_TERM_CHARS and any(character.isalpha() for character in term)


def _plain(surfaces: Iterable[str]) -> Iterator[tuple[str, str]]:
    for surface in surfaces:
        if _usable(term := normalise(surface)):
            yield term, " ".join(surface.split())


def _unless_generic(surfaces: Iterable[str]) -> Iterator[tuple[str, str]]:
    for term, surface in _plain(surfaces):
        # Numbers and signs of any kind in front ("3.2.1.4 概述", "🔥 Symptoms") do not make it special.
        if re.sub(r"^[\W\d_]+", "", _bare(term)) not in GENERIC:
            yield term, surface


def _headings(surfaces: Iterable[str], *, title: str) -> list[tuple[str, str]]:
    terms: dict[str, str] = {}
    for term, surface in _unless_generic(dict.fromkeys(surfaces)):
        bare = _bare(term)
        if _usable(bare) and normalise(title) not in {term, bare}:
            terms.setdefault(bare, surface)
    return list(terms.items())[:MAX_HEADINGS]


def _bare(term: str) -> str:
    return _NUMBERING.sub("", _ANCHOR.sub("", term), count=1).rstrip(_ENDING)


def _entities(contents: Iterable[str]) -> list[tuple[str, str]]:
    spellings: dict[str, Counter[str]] = {}
    for content in contents:
        text = _LINKS.sub(" ", content).replace("\\_", "_")
        for pattern in _PATTERNS:
            for match in pattern.finditer(text):
                surface = match.group()
                if surface.rpartition(".")[2].lower() not in _FILES_AND_HOSTS and _usable(term := normalise(surface)):
                    spellings.setdefault(term, Counter())[surface] += 1
    frequent = sorted(spellings, key=lambda term: (-spellings[term].total(), term))[:MAX_ENTITIES]
    return [(term, min(spellings[term].items(), key=lambda item: (-item[1], item[0]))[0]) for term in frequent]
