"""Join the documents of a step into rows. A pure function of lengths in global order, before ranks are known."""

from collections.abc import Sequence


def pack_rows(
    lengths: Sequence[int], max_tokens: int, *, names: Sequence[str] | None = None
) -> tuple[tuple[int, ...], ...]:
    """First fit: each document, in order, goes to the first row with room for it. Returns the documents of each row.

    lengths: [documents]  tokens of each
    names:   [documents]  what to call them in an error
    Raises ValueError when a document is longer than a row.

        pack_rows([5, 4, 3, 6], 8) -> ((0, 2), (1,), (3,))
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for document, length in enumerate(lengths):
        if length > max_tokens:
            name = f"sample '{names[document]}'" if names is not None else f"document {document}"
            raise ValueError(
                f"{name} has {length} tokens, a row holds {max_tokens}; lower its budget or raise the row's tokens"
            )
        row = next((i for i, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(max_tokens)
        rows[row].append(document)
        room[row] -= length
    return tuple(tuple(row) for row in rows)
