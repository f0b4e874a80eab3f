"""Group the units of a section into chunks."""

from collections.abc import Sequence

from rag_pipeline.ingest.splitting import Limit, Unit


def pack(units: Sequence[Unit], limit: Limit, soft: int) -> list[list[Unit]]:
    """Group neighbouring units: closed once ``soft`` tokens are reached or the next unit would exceed ``limit``.

    Units that show nothing go with the group at hand. Units that lead in what follows stay with it while both fit.

    Returns:
        Groups in order; empty for no units.
    """
    groups: list[list[Unit]] = []
    current: list[Unit] = []
    tokens = size = 0
    for run in _runs(units, limit):
        run_tokens, run_size = _total(run)
        full = tokens >= soft or tokens + run_tokens > limit.tokens or size + run_size > limit.characters
        if current and tokens and run_tokens and full:
            groups.append(current)
            current, tokens, size = [], 0, 0
        if not tokens:
            tokens += sum(frame.tokens for frame in run[0].frames)
            size += sum(frame.size for frame in run[0].frames)
        current += run
        tokens += run_tokens
        size += run_size
    if groups and current:
        before, before_size = _total(groups[-1], framed=True)
        last, last_size = _total(current)
        fits = before + last <= limit.tokens and before_size + last_size <= limit.characters
        if last == 0 or (last * 3 < soft and fits):
            groups[-1] = groups[-1] + current
            current = []
    return [*groups, current] if current else groups


def _runs(units: Sequence[Unit], limit: Limit) -> list[list[Unit]]:
    """Join units with what they lead in, from the last one backwards, while the whole fits."""
    runs: list[list[Unit]] = []
    for unit in reversed(units):
        if runs and unit.keep_next:
            tokens, size = _total(runs[-1], framed=True)
            if tokens + unit.tokens <= limit.tokens and size + unit.size <= limit.characters:
                runs[-1].insert(0, unit)
                continue
        runs.append([unit])
    return runs[::-1]


def _total(units: Sequence[Unit], *, framed: bool = False) -> tuple[int, int]:
    frames = units[0].frames if framed else ()
    tokens = sum(unit.tokens for unit in units) + sum(frame.tokens for frame in frames)
    # A line end between two units.
    return tokens, sum(unit.size + 2 for unit in units) + sum(frame.size for frame in frames)


def shown_groups(units: Sequence[Unit]) -> list[list[Unit]]:
    """One group for each unit that shows something; those that show nothing go with the one before, else the first."""
    groups: list[list[Unit]] = []
    leading: list[Unit] = []
    for unit in units:
        if unit.tokens:
            groups.append([*leading, unit])
            leading = []
        elif groups:
            groups[-1].append(unit)
        else:
            leading.append(unit)
    return groups


def middle_of(units: Sequence[Unit]) -> int:
    """Index that halves two or more units by tokens, not behind one that leads in the next."""
    total = sum(unit.tokens for unit in units)
    seen = 0
    for index, unit in enumerate(units[:-1], start=1):
        seen += unit.tokens
        if 2 * seen >= total:
            return index - 1 if unit.keep_next and index > 1 else index
    return len(units) - 1
