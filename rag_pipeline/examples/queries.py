"""Lookups of all kinds, each printed as one line of JSON: what an agent gets for odd and ordinary queries.

    python -m rag_pipeline.examples.queries [NAME]...

With names only those are run.
"""

import json
import sys
from typing import Any

from rag_pipeline.lookup_knowledge import KnowledgeLookup, LookupResult

QUERIES: dict[str, str | dict[str, Any]] = {
    "chinese": "Redis 内存满了，key 被大量淘汰怎么办？",
    "english": "pod keeps restarting with exit code 137",
    "mixed": "KubePodCrashLooping 一直 restart，exit code 137 怎么处理",
    "alert": {
        "alertName": "RedisEvictionsHigh",
        "service": "redis-cart",
        "severity": "warning",
        "summary": "redis-cart-0 evicts more than 100 keys a second",
        "timeRange": {"start": "2026-11-30T08:00:00Z", "end": "2026-11-30T08:15:00Z"},
        "userRequest": "How do I fix it?",
    },
    "nobody can answer": "which canteen in the head office serves vegetarian lunch on Fridays",
    "over 10,000 characters": "exit code 137 " * 1_000,
    "empty": "",
    "emoji": "🔥🔥🔥",
    "quotes": 'category == "cache" or "1" == "1" \\',
}


def run(lookup: KnowledgeLookup, name: str) -> LookupResult:
    """One of the lookups."""
    asked = QUERIES[name]
    return lookup.lookup(asked) if isinstance(asked, str) else lookup.lookup_for_alert(asked)


def main() -> None:
    """Run the named lookups, or all of them."""
    with KnowledgeLookup() as lookup:
        for name in sys.argv[1:] or QUERIES:
            print(json.dumps({"name": name, **run(lookup, name).to_dict()}, ensure_ascii=False))


if __name__ == "__main__":
    main()
