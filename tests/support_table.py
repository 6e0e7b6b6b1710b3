"""Print the README's support table, made of the same cases as the tests.

Use: python tests/support_table.py
"""

from case_table import CORNER, TOLERANCE
from layers import CASES

START, END = "<!-- support table -->\n", "<!-- /support table -->"


def stored(kinds):
    """In words: factors (`kernel`), dense (`bias`)."""
    names = {
        kind: ", ".join(f"`{name}`" for name in kinds if kinds[name] == kind)
        for kind in ("factors", "rows", "dense")
    }
    used = {kind: leaves for kind, leaves in names.items() if leaves}
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{kind} ({leaves})" for kind, leaves in used.items())


def markdown():
    """One row for the cases of a library whose gradients are stored in the same way."""
    rows = {}
    for case in CASES.values():
        if case.group != CORNER:
            exact = "to its rounding" if case.wide else f"{TOLERANCE:.0e}".replace("e-0", "e-")
            rows.setdefault((case.group, stored(case.kinds), exact), []).append(case.name)
    lines = ["| layer | gradient as | exact (tested) |", "| --- | --- | --- |"]
    lines += [
        f"| **{group}**: {'; '.join(names)} | {kinds} | {exact} |"
        for (group, kinds, exact), names in sorted(rows.items(), key=lambda row: row[0][0])
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(markdown(), end="")
